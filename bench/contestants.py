"""The libraries that peers.py times, one small class each, and the worker process that runs one of them.

A class has a `versions()` text and `prepare(workload, dtype, q, k, v)`, which returns a function without arguments
that computes attention once and returns something `fetch` turns into a float array [batch, heads, q_len, head_dim].
Inputs are float32 arrays whose values the dtype can hold. `prepare` raises Unsupported, with the reason, where the
library cannot do the row. Each class uses its library the way its documentation recommends for speed.

    python contestants.py NAME THREADS      reads one JSON command a line, answers with one JSON line
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], Any]


class Unsupported(Exception):
    """The library has no way to compute this row."""


@dataclass(frozen=True)
class Workload:
    name: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool

    @property
    def unit(self) -> str:
        """What a row is judged by: bytes of K and V for decode, the time of a call for tiny, else arithmetic."""
        if self.q_len == 1:
            return "GB/s"
        return "us" if self.flops < 1e6 else "GFLOP/s"

    @property
    def pairs(self) -> int:
        """Of a query and a key that it attends, of all heads."""
        pairs = self.q_len * (self.q_len + 1) // 2 if self.causal else self.q_len * self.kv_len
        return self.batch * self.heads * pairs

    @property
    def flops(self) -> int:
        return 4 * self.pairs * self.head_dim

    def kv_bytes(self, dtype: str) -> int:
        return 2 * self.batch * self.kv_heads * self.kv_len * self.head_dim * ITEM_SIZE[dtype]

    def value(self, seconds: float, dtype: str) -> float:
        """The time of a call in this row's unit."""
        if self.unit == "us":
            return seconds * 1e6
        return (self.kv_bytes(dtype) if self.unit == "GB/s" else self.flops) / seconds / 1e9


@dataclass(frozen=True)
class Layer:
    """A row of layers.txt. Its weights are what Workload's K and V are to decode: what a call must read."""

    name: str
    batch: int
    heads: int
    tokens: int
    width: int
    causal: bool

    @property
    def unit(self) -> str:
        return "GB/s" if self.batch * self.tokens <= 8 else "GFLOP/s"

    @property
    def pairs(self) -> int:
        pairs = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens**2
        return self.batch * self.heads * pairs

    @property
    def flops(self) -> int:
        return 8 * self.batch * self.tokens * self.width**2 + 4 * self.pairs * self.width // self.heads

    def kv_bytes(self, dtype: str) -> int:
        return 4 * self.width**2 * ITEM_SIZE[dtype]

    def value(self, seconds: float, dtype: str) -> float:
        return (self.kv_bytes(dtype) if self.unit == "GB/s" else self.flops) / seconds / 1e9


Row = Workload | Layer
# What a CPU could do with multiply-adds alone while it turns a score into a weight: 6 cycles of a vector, each of two
# multiply-adds on as many lanes.
WEIGHT_FLOPS = 24


def limit_seconds(w: Row, dtype: str, fma: float, read: float) -> float:
    """What no kernel on multiply-adds goes below: its arithmetic at `fma` GFLOP/s, or K and V at `read` GB/s."""
    return max((w.flops + WEIGHT_FLOPS * w.pairs) / fma, w.kv_bytes(dtype) / read) / 1e9


ITEM_SIZE = {"f32": 4, "bf16": 2, "f16": 2}
# Largest difference from the result in float64, absolute and relative.
TOLERANCE = {"f32": 2e-5, "f16": 2e-3, "bf16": 1.6e-2}


def read_workloads() -> dict[str, Row]:
    table: dict[str, Row] = {}
    folder = Path(__file__).parent
    for file in (folder.parent / "python" / "manyhead" / "workloads.txt", folder / "layers.txt"):
        for line in file.read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            name, *words = line.split()
            if file.name == "layers.txt":
                batch, heads, tokens, width, causal = map(int, words[:5])
                table[name] = Layer(name, batch, heads, tokens, width, causal == 1)
            else:
                batch, heads, kv_heads, q_len, kv_len, head_dim, causal = map(int, words[:7])
                table[name] = Workload(name, batch, heads, kv_heads, q_len, kv_len, head_dim, causal == 1)
    return table


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """The array in the row's dtype."""
    if dtype == "bf16":
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16)
    return x.astype(np.float16) if dtype == "f16" else x


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 with the values of the row's dtype."""
    return stored(x, dtype).astype(np.float32, copy=False)


def make_inputs(w: Row, dtype: str) -> tuple[np.ndarray, ...]:
    """The same q, k, v, or x and the weights of a layer, in every process."""
    rng = np.random.default_rng(zlib.crc32(w.name.encode()))
    if isinstance(w, Layer):
        shapes = (w.batch, w.tokens, w.width), (3 * w.width, w.width), (3 * w.width,), (w.width, w.width), (w.width,)
        x, *weights = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
        return rounded(x, dtype), *(rounded(a / np.float32(math.sqrt(w.width)), dtype) for a in weights)

    def normal(heads: int, length: int) -> np.ndarray:
        return rounded(rng.standard_normal((w.batch, heads, length, w.head_dim), dtype=np.float32), dtype)

    return normal(w.heads, w.q_len), normal(w.kv_heads, w.kv_len), normal(w.kv_heads, w.kv_len)


def sample_rows(w: Row) -> list[tuple[int, ...]]:
    """Output rows that are compared, (batch, head, query) or, of a layer, (batch, query): the corners, and some in
    between."""
    rng = np.random.default_rng(1)
    if isinstance(w, Layer):
        return [(0, 0), (w.batch - 1, w.tokens - 1), (w.batch // 2, w.tokens // 3), (w.batch - 1, w.tokens // 2)]
    last = (w.batch - 1, w.heads - 1, w.q_len - 1)
    rows: list[tuple[int, ...]] = [(0, 0, 0), last, (0, 0, w.q_len - 1), (w.batch - 1, w.heads - 1, 0)]

    def below(n: int) -> int:
        return int(rng.integers(n + 1))

    rows += [(below(last[0]), below(last[1]), below(last[2])) for _ in range(12)]
    return rows


def reference_rows(w: Row, *inputs: np.ndarray) -> np.ndarray:
    """The sampled rows in float64."""
    if isinstance(w, Layer):
        exact = [a.astype(np.float64) for a in inputs]
        return np.array([reference_layer_row(w, b, i, *exact) for b, i in sample_rows(w)])
    q, k, v = inputs
    out = []
    for b, h, i in sample_rows(w):
        kv_head = h // (w.heads // w.kv_heads)
        keys = i + 1 if w.causal else w.kv_len
        scores = k[b, kv_head, :keys].astype(np.float64) @ q[b, h, i].astype(np.float64) / math.sqrt(w.head_dim)
        weights = np.exp(scores - scores.max())
        out.append(weights @ v[b, kv_head, :keys].astype(np.float64) / weights.sum())
    return np.array(out)


def reference_layer_row(w: Layer, b: int, i: int, x: Any, w_in: Any, b_in: Any, w_out: Any, b_out: Any) -> np.ndarray:
    projected = x[b] @ w_in.T + b_in
    q, k, v = (a.reshape(w.tokens, w.heads, -1).transpose(1, 0, 2) for a in np.split(projected, 3, axis=1))
    keys = i + 1 if w.causal else w.tokens
    scores = np.einsum("hd,hkd->hk", q[:, i], k[:, :keys]) / math.sqrt(w.width // w.heads)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    heads = np.einsum("hk,hkd->hd", weights / weights.sum(axis=1, keepdims=True), v[:, :keys])
    return heads.reshape(-1) @ w_out.T + b_out


class Contestant(ABC):
    reference_dtype: str | None = None  # its own precision where it is lower than the row's
    is_attention = True

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @abstractmethod
    def versions(self) -> str: ...

    @abstractmethod
    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run: ...

    def prepare_layer(self, w: Layer, dtype: str, x: np.ndarray, weights: dict[str, np.ndarray]) -> Run:
        """The same for a layer; `weights` are named as those of torch.nn.MultiheadAttention."""
        raise Unsupported("no layer of its own")

    def prepare_row(self, w: Row, dtype: str) -> Run:
        inputs = make_inputs(w, dtype)
        if isinstance(w, Workload):
            return self.prepare(w, dtype, *inputs)
        names = "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"
        return self.prepare_layer(w, dtype, inputs[0], dict(zip(names, inputs[1:], strict=True)))

    def fetch(self, result: Any) -> np.ndarray:
        return np.asarray(result, dtype=np.float32)


class Manyhead(Contestant):
    """manyhead.attention with its result in an array that is there, as the sessions of the others have it."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import manyhead

        self.lib = manyhead
        manyhead.set_threads(threads)

    def versions(self) -> str:
        return f"manyhead {self.lib.version()}, {self.lib.isa()}"

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        q, k, v = (stored(x, dtype) for x in (q, k, v))
        out = np.empty_like(q)
        attention = self.lib.attention
        return lambda: attention(q, k, v, causal=w.causal, out=out)

    def prepare_layer(self, w: Layer, dtype: str, x: np.ndarray, weights: dict[str, np.ndarray]) -> Run:
        x = stored(x, dtype)
        layer = self.lib.MultiHeadAttention.from_state_dict(weights, num_heads=w.heads, dtype=x.dtype)
        out = np.empty_like(x)
        return lambda: layer(x, causal=w.causal, out=out)


class ManyheadBound(Manyhead):
    """A plan with its arrays bound once, as the others' sessions and graphs have theirs. Where calls are long it is the
    same."""

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        if w.unit != "us":
            raise Unsupported("the same as manyhead")
        q, k, v = (stored(x, dtype) for x in (q, k, v))
        return self.lib.plan(q, k, v, causal=w.causal).bind(q, k, v)

    def prepare_layer(self, w: Layer, dtype: str, x: np.ndarray, weights: dict[str, np.ndarray]) -> Run:
        raise Unsupported("the same as manyhead")


class Torch(Contestant):
    """torch.nn.functional.scaled_dot_product_attention without autograd; layers: torch.nn.MultiheadAttention."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import torch

        self.torch = torch
        torch.set_num_threads(threads)

    def versions(self) -> str:
        return f"torch {self.torch.__version__}"

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        torch = self.torch
        kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        tq, tk, tv = (torch.from_numpy(x).to(kind) for x in (q, k, v))
        gqa = w.heads != w.kv_heads
        sdpa = torch.nn.functional.scaled_dot_product_attention

        @torch.inference_mode()
        def run() -> Any:
            return sdpa(tq, tk, tv, is_causal=w.causal, enable_gqa=gqa)

        return run

    def prepare_layer(self, w: Layer, dtype: str, x: np.ndarray, weights: dict[str, np.ndarray]) -> Run:
        torch = self.torch
        kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        layer = torch.nn.MultiheadAttention(w.width, w.heads, batch_first=True).eval()
        layer.load_state_dict({name: torch.from_numpy(a) for name, a in weights.items()})
        layer = layer.to(kind)
        tx, mask = torch.from_numpy(x).to(kind), None
        if w.causal:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(w.tokens, dtype=kind)

        @torch.inference_mode()
        def run() -> Any:
            return layer(tx, tx, tx, attn_mask=mask, is_causal=w.causal, need_weights=False)[0]

        # Its fast path computes all scores and then masks them; the other one skips what is masked. The faster counts.
        seconds = {}
        for fast in (True, False):
            torch.backends.mha.set_fastpath_enabled(fast)
            run()
            seconds[fast] = time_calls(run, 0.2)["min"]
        torch.backends.mha.set_fastpath_enabled(seconds[True] <= seconds[False])
        return run

    def fetch(self, result: Any) -> np.ndarray:
        return result.float().numpy()


class Ort(Contestant):
    """ONNX Runtime, the standard operator Attention (opset 23), inputs and output bound once."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import onnx
        import onnxruntime

        self.onnx, self.ort = onnx, onnxruntime

    def versions(self) -> str:
        return f"onnxruntime {self.ort.__version__}"

    def session(self, node: Any, inputs: dict[str, Any], outputs: dict[str, list[Any]]) -> Any:
        helper, proto = self.onnx.helper, self.onnx.TensorProto
        types = {"float32": proto.FLOAT, "float16": proto.FLOAT16, "int32": proto.INT32}
        infos = [helper.make_tensor_value_info(n, types[a.dtype.name], a.shape) for n, a in inputs.items()]
        float_type = types[next(iter(inputs.values())).dtype.name]
        results = [helper.make_tensor_value_info(n, float_type, s) for n, s in outputs.items()]
        model = helper.make_model(
            helper.make_graph([node], "attention", infos, results),
            opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)],
            ir_version=10,
        )
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            return self.ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exception types are not public
            raise Unsupported(str(error).splitlines()[0]) from None

    def bound(self, session: Any, inputs: dict[str, Any], shared: dict[str, str] | None = None) -> Run:
        """`shared`: outputs that are written into the memory of an input."""
        binding = session.io_binding()
        value_of = self.ort.OrtValue.ortvalue_from_numpy
        values = {name: value_of(a) for name, a in inputs.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        first = next(iter(inputs.values()))
        for output in session.get_outputs():
            if not shared or output.name not in shared:
                values[output.name] = value_of(np.zeros(output.shape, first.dtype))
            binding.bind_ortvalue_output(output.name, values[(shared or {}).get(output.name, output.name)])

        def run() -> Any:
            session.run_with_iobinding(binding)
            return values["out"]

        return run

    def numpy_type(self, dtype: str) -> Any:
        if dtype == "bf16":
            raise Unsupported("no bfloat16 on CPU")
        return {"f32": np.float32, "f16": np.float16}[dtype]

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        kind = self.numpy_type(dtype)
        inputs = {"q": q.astype(kind), "k": k.astype(kind), "v": v.astype(kind)}
        node = self.onnx.helper.make_node("Attention", list(inputs), ["out"], is_causal=int(w.causal))
        return self.bound(self.session(node, inputs, {"out": list(q.shape)}), inputs)

    def fetch(self, result: Any) -> np.ndarray:
        return result.numpy().astype(np.float32)


class OrtContrib(Ort):
    """ONNX Runtime's own operators: GroupQueryAttention for causal and decode rows, else MultiHeadAttention. Their
    arrays are [batch, len, heads * head_dim], made beforehand."""

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        kind = self.numpy_type(dtype)
        self.shape = (w.batch, w.q_len, w.heads, w.head_dim)
        make_node = self.onnx.helper.make_node

        def flat(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x.transpose(0, 2, 1, 3), kind).reshape(x.shape[0], x.shape[2], -1)

        out = {"out": [w.batch, w.q_len, w.heads * w.head_dim]}
        if not w.causal and w.q_len > 1:
            inputs = {"q": flat(q), "k": flat(k), "v": flat(v)}
            node = make_node("MultiHeadAttention", list(inputs), ["out"], domain="com.microsoft", num_heads=w.heads)
            return self.bound(self.session(node, inputs, out), inputs)

        # The cache holds all keys; the newest q_len of them are passed as new, and written to their place again.
        heads = {"domain": "com.microsoft", "num_heads": w.heads, "kv_num_heads": w.kv_heads}
        inputs = {
            "q": flat(q), "k": flat(k[:, :, -w.q_len :]), "v": flat(v[:, :, -w.q_len :]),
            "seqlens_k": np.full((w.batch,), w.kv_len - 1, np.int32), "total": np.array([w.kv_len], np.int32),
        }  # fmt: skip
        cache = {"past_k": k.astype(kind), "past_v": v.astype(kind)}
        present = {"present_k": list(k.shape), "present_v": list(v.shape)}
        names = ["q", "k", "v", "past_k", "past_v", "seqlens_k", "total"]
        node = make_node("GroupQueryAttention", names, [*out, *present], **heads)
        cached = self.bound(self.session(node, inputs | cache, out | present), inputs | cache,
                            {"present_k": "past_k", "present_v": "past_v"})  # fmt: skip
        if not w.causal:
            return cached
        # A prompt can be computed without a cache too. Which is faster depends on the shape: take the better one.
        names[3:5] = ["", ""]
        node = make_node("GroupQueryAttention", names, ["out"], **heads)
        alone = self.bound(self.session(node, inputs, out), inputs)
        times = {run: min(time_calls(run, 0.05)["min"] for _ in range(2)) for run in (cached, alone)}
        return min(times, key=lambda run: times[run])

    def fetch(self, result: Any) -> np.ndarray:
        return super().fetch(result).reshape(self.shape).transpose(0, 2, 1, 3)


class OpenVino(Contestant):
    """OpenVINO's operator ScaledDotProductAttention in a model of its own; K and V of grouped queries are broadcast
    in the graph, as its converters write it. A CPU that has bf16 but not f16 takes the hint "f16" for bf16, with the
    errors of that: there f16 rows are asked for in f32."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        os.environ.setdefault("OPENVINO_TELEMETRY", "0")
        import openvino

        self.ov = openvino

    def versions(self) -> str:
        return f"openvino {self.ov.__version__.split('-')[0]}"

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        ov = self.ov
        ops = ov.opset13
        has_f16 = "FP16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        kind = {"f32": "f32", "bf16": "bf16", "f16": "f16" if has_f16 else "f32"}[dtype]
        params = [ops.parameter(x.shape, np.float32) for x in (q, k, v)]
        group = w.heads // w.kv_heads

        def widen(x: Any) -> Any:
            if group == 1:
                return x
            shape = (w.batch, w.kv_heads, group, w.kv_len, w.head_dim)
            x = ops.broadcast(ops.unsqueeze(x, np.int64(2)), np.array(shape))
            return ops.reshape(x, np.array((w.batch, w.heads, w.kv_len, w.head_dim)), False)

        node = ops.scaled_dot_product_attention(params[0], widen(params[1]), widen(params[2]), causal=w.causal)
        model = ov.Model([node], params)
        compiled = ov.Core().compile_model(
            model,
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": self.threads,
                "INFERENCE_PRECISION_HINT": kind,
                "ENABLE_HYPER_THREADING": True,
            },
        )
        request = compiled.create_infer_request()
        self.inputs = (q, k, v)  # the tensors only point to this memory
        for i, x in enumerate(self.inputs):
            request.set_input_tensor(i, ov.Tensor(x, shared_memory=True))
        self.output = request.get_output_tensor(0)
        return request.infer

    def fetch(self, result: Any) -> np.ndarray:
        return self.output.data.astype(np.float32)


class Ggml(Contestant):
    """ggml_flash_attn_ext through ctypes, from the package libggml-python; K and V in the row's dtype. q and the
    result are float32 there always, and the causal mask is an array."""

    class InitParams(ctypes.Structure):
        _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    class Plan(ctypes.Structure):
        _fields_ = [
            ("work_size", ctypes.c_size_t),
            ("work_data", ctypes.c_void_p),
            ("n_threads", ctypes.c_int),
            ("threadpool", ctypes.c_void_p),
            ("abort_callback", ctypes.c_void_p),
            ("abort_callback_data", ctypes.c_void_p),
            ("use_ref", ctypes.c_bool),
        ]

    TYPES = {"f32": 0, "f16": 1, "bf16": 30}

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import libggml

        folder = Path(libggml.__file__).parent / "lib64"
        base = self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        cpu = self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64

        def declare(lib: Any, name: str, result: Any, *arguments: Any) -> None:
            getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments

        declare(base, "ggml_version", ctypes.c_char_p)
        declare(base, "ggml_init", pointer, self.InitParams)
        declare(base, "ggml_free", None, pointer)
        declare(base, "ggml_new_tensor_4d", pointer, pointer, ctypes.c_int, i64, i64, i64, i64)
        declare(base, "ggml_get_data", pointer, pointer)
        declare(base, "ggml_flash_attn_ext", pointer, *[pointer] * 5, *[ctypes.c_float] * 3)
        declare(base, "ggml_new_graph", pointer, pointer)
        declare(base, "ggml_build_forward_expand", None, pointer, pointer)
        declare(base, "ggml_threadpool_params_default", self.pool_params(), ctypes.c_int)
        declare(cpu, "ggml_cpu_init", None)
        declare(cpu, "ggml_threadpool_new", pointer, pointer)
        declare(cpu, "ggml_graph_plan", self.Plan, pointer, ctypes.c_int, pointer)
        declare(cpu, "ggml_graph_compute", ctypes.c_int, pointer, ctypes.POINTER(self.Plan))
        cpu.ggml_cpu_init()
        params = base.ggml_threadpool_params_default(threads)
        self.pool = cpu.ggml_threadpool_new(ctypes.byref(params))
        self.context = None

    @staticmethod
    def pool_params() -> Any:
        class PoolParams(ctypes.Structure):
            _fields_ = [
                ("cpumask", ctypes.c_bool * 512),
                ("n_threads", ctypes.c_int),
                ("prio", ctypes.c_int),
                ("poll", ctypes.c_uint32),
                ("strict_cpu", ctypes.c_bool),
                ("paused", ctypes.c_bool),
            ]

        return PoolParams

    def versions(self) -> str:
        return f"ggml {self.base.ggml_version().decode()}"

    def tensor(self, x: np.ndarray, dtype: str) -> int:
        """A copy of a [batch, heads, len, dim] array; ggml counts dimensions from the last one."""
        copy = np.ascontiguousarray(stored(x, dtype))
        tensor = self.base.ggml_new_tensor_4d(self.context, self.TYPES[dtype], *reversed(x.shape))
        ctypes.memmove(self.base.ggml_get_data(tensor), copy.ctypes.data, copy.nbytes)
        return tensor

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        kv_dtype = self.kv_dtype(dtype)
        if self.context:
            self.base.ggml_free(self.context)
        size = 4 * (2 * q.size + w.q_len * w.kv_len) + ITEM_SIZE[kv_dtype] * 2 * k.size + (64 << 20)
        self.context = self.base.ggml_init(self.InitParams(size, None, False))
        mask = None
        if w.causal:
            allowed = np.tri(w.q_len, w.kv_len, dtype=bool)
            mask = self.tensor(np.where(allowed, 0, -np.inf).astype(np.float32)[None, None], "f16")
        out = self.base.ggml_flash_attn_ext(
            self.context,
            self.tensor(q, "f32"),
            self.tensor(k, kv_dtype),
            self.tensor(v, kv_dtype),
            mask,
            1 / math.sqrt(w.head_dim),
            0.0,
            0.0,
        )
        graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(graph, out)
        plan = self.cpu.ggml_graph_plan(graph, self.threads, self.pool)
        self.work = np.zeros(max(plan.work_size, 1), np.uint8)
        plan.work_data = self.work.ctypes.data
        self.shape = (w.batch, w.q_len, w.heads, w.head_dim)
        compute, plan_pointer = self.cpu.ggml_graph_compute, ctypes.byref(plan)

        def run() -> Any:
            if compute(graph, plan_pointer) != 0:
                raise RuntimeError("ggml_graph_compute failed")
            return out

        return run

    def kv_dtype(self, dtype: str) -> str:
        return dtype

    def fetch(self, result: Any) -> np.ndarray:
        size = math.prod(self.shape)
        flat = (ctypes.c_float * size).from_address(self.base.ggml_get_data(result))
        return np.ctypeslib.as_array(flat).reshape(self.shape).transpose(0, 2, 1, 3)


class GgmlF16(Ggml):
    """float16 K and V where the row has float32: what its users run, at float16 precision."""

    reference_dtype = "f16"

    def kv_dtype(self, dtype: str) -> str:
        if dtype != "f32":
            raise Unsupported("the same as ggml")
        return "f16"


class BareProducts(Contestant):
    """Not attention: only the products q k^T and weights v, one sgemm a head, as fast as NumPy's OpenBLAS does them
    on one thread. A yardstick: attention on sgemm that spent nothing on softmax would take this long. Causal rows
    compute the whole products, and their rate counts all of it."""

    is_attention = False

    def versions(self) -> str:
        config = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
        return f"numpy {np.__version__}, {config['name']} {config['version']}"

    def prepare(self, w: Workload, dtype: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Run:
        if dtype != "f32" or w.unit != "GFLOP/s":
            raise Unsupported("for prefill in f32 only")
        group = w.heads // w.kv_heads
        scores, out = np.empty((w.q_len, w.kv_len), np.float32), np.empty_like(q)
        heads = [
            (q[b, h], k[b, h // group].T, v[b, h // group], out[b, h]) for b in range(w.batch) for h in range(w.heads)
        ]

        def run() -> Any:
            for head_q, head_k, head_v, head_out in heads:
                np.matmul(head_q, head_k, out=scores)
                np.matmul(scores, head_v, out=head_out)
            return out

        expected = (heads[0][0].astype(np.float64) @ heads[0][1]) @ heads[0][2]
        if not np.allclose(run()[0, 0], expected, rtol=1e-3, atol=1e-2):
            raise Unsupported("wrong: the products differ from float64")
        return run


CONTESTANTS: dict[str, Callable[[int], Contestant]] = {
    "manyhead": Manyhead,
    "manyhead-bound": ManyheadBound,
    "torch": Torch,
    "ort": Ort,
    "ort-contrib": OrtContrib,
    "openvino": OpenVino,
    "ggml": Ggml,
    "ggml-f16": GgmlF16,
    "bare products": BareProducts,
}


def time_calls(run: Run, seconds: float) -> dict[str, Any]:
    """Minimum and median of the time of a call; the first call after a pause only warms up."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"min": min(times), "median": float(np.median(times)), "calls": len(times)}


def serve(name: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    try:
        contestant = CONTESTANTS[name](threads)
    except (ImportError, OSError) as error:
        answer(absent=str(error))
        return
    answer(versions=contestant.versions())
    run: Run | None = None
    workloads = read_workloads()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "prepare":
            run = None  # frees the last row's memory first
            w = workloads[command["row"]]
            try:
                run = contestant.prepare_row(w, command["dtype"])
                out = contestant.fetch(run())
                rows = [out[row].tolist() for row in sample_rows(w)] if contestant.is_attention else None
                answer(rows=rows, dtype=contestant.reference_dtype or command["dtype"])
            except Unsupported as reason:
                answer(unsupported=str(reason))
        elif run:
            answer(**time_calls(run, command["seconds"]))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
