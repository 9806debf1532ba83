"""From arrays and options to a plan of the C library, kept for the next call that looks the same."""

from __future__ import annotations

import ctypes
import threading
from collections import namedtuple
from collections.abc import Callable, Mapping
from ctypes import byref
from functools import cache
from numbers import Integral, Real
from struct import Struct
from typing import Any, NamedTuple, SupportsFloat, TypedDict

import numpy as np

from . import _abi
from ._arrays import (
    CODES,
    Shape,
    address,
    any_mask,
    boolean,
    broadcast_strides,
    choice,
    element_strides,
    index_vector,
    integer,
    mask,
    number,
    real_vector,
    view,
)
from ._exec import make_exec
from ._library import Immutable, check, lib, raise_for, text_of
from ._tensors import BOOLEANS, INDICES, MASKS, REALS, Seen, as_array, make, numpy_type, see, wrap_tensor

_F64 = CODES[np.dtype(np.float64)]
_run = lib.mh_plan_run

ALIGN = {
    None: _abi.ALIGN_UNSET,
    "top_left": _abi.ALIGN_TOP_LEFT,
    "bottom_right": _abi.ALIGN_BOTTOM_RIGHT,
    "none": _abi.ALIGN_UNSET,
}
LSE_BASE = {"e": _abi.LSE_NATURAL, "2": _abi.LSE_BASE2}
_ALIBI = {"abs": _abi.ALIBI_ABS, "signed": _abi.ALIBI_SIGNED}
_STAGE = {"raw": _abi.SCORES_RAW, "capped": _abi.SCORES_CAPPED, "biased": _abi.SCORES_BIASED}
LAYOUT = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}  # axes of batch, heads, length, dim
_WEIGHTS = {False: 0, True: _abi.OUTPUT_WEIGHTS, "mean": _abi.OUTPUT_MEAN_WEIGHTS}

# Fields of mh_tensors with other names in Python.
NAMES = {"mask": "attn_mask", "bias": "attn_bias (or a float attn_mask)"}

Inputs = dict[str, Seen]  # by field of mh_tensors
NO_INPUTS: Inputs = {}


class Options(NamedTuple):
    """What a call asks for besides its arrays. All values can be keys of a dict, and none can change behind it."""

    scale: SupportsFloat | None = None
    causal: bool = False
    align: str | None = None
    q_offset: int | None = None
    window: tuple[int, int] | None = None
    softcap: SupportsFloat = 0.0
    fast_exp: bool = False
    alibi_mode: str = "abs"
    layout: str = "bhsd"
    return_lse: bool = False
    lse_base: str = "e"
    return_weights: bool | str = False
    return_column_sums: bool = False
    return_scores: str | None = None


class PlanOptions(TypedDict, total=False):
    """Those of Options that manyhead.plan takes as they are."""

    scale: SupportsFloat | None
    causal: bool
    align: str | None
    softcap: SupportsFloat
    fast_exp: bool
    alibi_mode: str
    layout: str
    return_lse: bool
    lse_base: str
    return_weights: bool | str
    return_column_sums: bool
    return_scores: str | None


def real_type(dtype: np.dtype) -> np.dtype:
    """The type of lse, weights, slopes and sinks beside tensors of this type."""
    return np.dtype(np.float64 if CODES[dtype] == _F64 else np.float32)


@cache
def result_type(fields: tuple[str, ...]) -> Callable[..., tuple]:
    """A named tuple of what was asked for: `out, lse = ...` and `result.lse` both work."""
    names = {"__slots__": (), "__module__": "manyhead", "__reduce__": _reduce_result}
    return type("Result", (namedtuple("Result", fields),), names)


def _reduce_result(result: Any) -> tuple:
    """For copies and pickles, which look for a class by its name: all of these have one name."""
    return _make_result, (result._fields, tuple(result))


def _make_result(fields: tuple[str, ...], values: tuple) -> tuple:
    return result_type(fields)(*values)


def gather(
    dtype: Any,
    attn_mask: Any = None,
    attn_bias: Any = None,
    key_mask: Any = None,
    seqused_k: Any = None,
    q_offset: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> Inputs:
    """The optional inputs of tensors of this type, NumPy's or PyTorch's, under the names that mh_tensors has for them.
    Spelled out: with a loop over a table a small call with a mask took 1.1 times as long."""
    if (
        attn_mask is None
        and attn_bias is None
        and key_mask is None
        and seqused_k is None
        and q_offset is None
        and alibi_slopes is None
        and sinks is None
    ):
        return NO_INPUTS
    inputs: Inputs = {}
    if attn_mask is not None:
        seen = see(attn_mask, "attn_mask", MASKS, any_mask)
        if seen[0].dtype in BOOLEANS:
            inputs["mask"] = seen
        elif attn_bias is not None:
            raise ValueError("attn_mask is additive and attn_bias is given too: add them up and pass one")
        else:
            inputs["bias"] = seen
    if attn_bias is not None:
        inputs["bias"] = see(attn_bias, "attn_bias")
    if key_mask is not None:
        inputs["key_mask"] = see(key_mask, "key_mask", BOOLEANS, mask)
    if seqused_k is not None:
        inputs["seqused_k"] = see(seqused_k, "seqused_k", INDICES, index_vector, True)
    if q_offset is not None:
        inputs["q_offset"] = see(q_offset, "q_offset", INDICES, index_vector, True)
    if alibi_slopes is not None:
        inputs["alibi_slopes"] = _see_reals(alibi_slopes, "alibi_slopes", dtype)
    if sinks is not None:
        inputs["sinks"] = _see_reals(sinks, "sinks", dtype)
    if seqused_k is not None and q_offset is not None:
        _widen(inputs)
    return inputs


def _widen(inputs: Inputs) -> None:
    """C reads lengths and offsets of one type: beside int64 those of int32 are copied."""
    names = "seqused_k", "q_offset"
    if inputs[names[0]][0].dtype == inputs[names[1]][0].dtype:
        return
    arrays = [as_array(inputs[name][0]) for name in names]
    if arrays[0].dtype != arrays[1].dtype:
        for name, array in zip(names, arrays, strict=True):
            if array.dtype == np.int32:
                inputs[name] = see(array.astype(np.int64), name, INDICES)


def _see_reals(x: Any, name: str, dtype: Any) -> Seen:
    real = real_type(numpy_type(dtype))
    return see(x, name, REALS[real], lambda x, name: real_vector(x, name, real), True)


def as_arrays(inputs: Mapping[str, Any]) -> Inputs:
    """The arrays themselves, for those who look closer."""
    return {name: as_array(x, NAMES.get(name, name)) for name, (x, _, _) in inputs.items()}


def make_window(window: Any, left: Any, right: Any) -> tuple[int, int] | None:
    """The window from its pair, or from its two sides, where one that is None has no bound."""
    if left is not None or right is not None:
        if window is not None:
            raise ValueError("give window or window_left and window_right, not both")
        window = -1 if left is None else left, -1 if right is None else right
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right), not {window!r}")
    left, right = window
    if type(left) is not int:
        left = integer(left, "window_left")
    if type(right) is not int:
        right = integer(right, "window_right")
    return left, right


def split_offset(x: Any) -> tuple[int | None, Any]:
    """q_offset as the integer of all batch entries, or as the array of each one's; None in the place of the other."""
    ndim = getattr(x, "ndim", None)
    if ndim:
        return None, x
    if isinstance(x, Integral):
        return integer(x, "q_offset"), None
    if isinstance(x, Real):
        raise TypeError(f"q_offset must be an integer or an array of integers, not {type(x).__name__}")
    if ndim == 0 and (array := view(x, "q_offset")).dtype.kind in "iu":
        return integer(array.item(), "q_offset"), None
    return None, x


def place(target: Any, options: Any, inputs: Mapping[str, Any]) -> None:
    """Writes where the queries stand, window, softcap and fast_exp into an mh_problem or an mh_mha_call."""
    target.causal = boolean(options.causal, "causal")
    target.align = choice(options.align, "align", ALIGN)
    if options.q_offset is not None:
        target.q_offset = integer(options.q_offset, "q_offset")
    if options.q_offset is not None or "q_offset" in inputs:
        target.align = _abi.ALIGN_OFFSET
    target.softcap = number(options.softcap, "softcap")
    if boolean(options.fast_exp, "fast_exp"):
        target.flags |= _abi.FLAG_FAST_EXP
    if options.window is not None:
        target.flags |= _abi.FLAG_WINDOW
        target.window_left = integer(options.window[0], "window_left")
        target.window_right = integer(options.window[1], "window_right")
    if any(inputs[name].dtype == np.int64 for name in ("seqused_k", "q_offset") if name in inputs):
        target.index_type = _abi.INDEX_I64


def spread(target: Any, inputs: Mapping[str, Any], scores: tuple[int, int, int, int]) -> None:
    """Writes the strides of the masks into an mh_problem or an mh_mha_call; checks the vectors' lengths."""
    batch, _, _, kv_len = scores
    if "mask" in inputs:
        target.mask_strides[:] = broadcast_strides(inputs["mask"], scores, NAMES["mask"])
    if "bias" in inputs:
        target.bias_strides[:] = broadcast_strides(inputs["bias"], scores, NAMES["bias"])
        target.bias_dtype = CODES[inputs["bias"].dtype]
    if "key_mask" in inputs:
        target.key_mask_strides[:] = broadcast_strides(inputs["key_mask"], (batch, kv_len), "key_mask")
    for name in ("seqused_k", "q_offset"):
        if name in inputs and inputs[name].shape != (batch,):
            raise ValueError(f"{name} has shape {inputs[name].shape}, must be (batch,) = {(batch,)}")


def result_shapes(batch: int, heads: int, q_len: int, kv_len: int) -> dict[str, tuple[int, ...]]:
    """Of the outputs besides out, by field of mh_tensors."""
    return {
        "lse": (batch, heads, q_len),
        "weights": (batch, heads, q_len, kv_len),
        "mean_weights": (batch, q_len, kv_len),
        "column_sums": (batch, heads, kv_len),
        "scores": (batch, heads, q_len, kv_len),
    }


class CPlan(Immutable):
    """An mh_plan with what Python must know to run it. Immutable; any number of threads may run it at once."""

    def __init__(self, q: Any, k: Any, v: Any, out: Any, inputs: Mapping[str, Any], options: Options) -> None:
        self.handle: int | None = None
        self.unseen: np.ndarray | None = None
        axes = choice(options.layout, "layout", LAYOUT)
        _check_shapes(q, k, v, axes)
        batch, heads, q_len, head_dim = (q.shape[axis] for axis in axes)
        kv_heads, kv_len, v_dim = (v.shape[axis] for axis in axes[1:])
        self.dtype = q.dtype
        self.real = real_type(q.dtype)
        self.out_shape = tuple((batch, heads, q_len, v_dim)[axis] for axis in axes)
        if out is None:
            out = self.empty_out()
        if tuple(out.shape) != self.out_shape:
            raise ValueError(f"out has shape {out.shape}, must be {self.out_shape}")
        if CODES[out.dtype] != CODES[q.dtype]:
            raise TypeError(f"out has dtype {out.dtype}, must be that of q: {q.dtype}")
        scores = (batch, heads, q_len, kv_len)

        problem = _abi.Problem(ctypes.sizeof(_abi.Problem), batch, heads, kv_heads, q_len, kv_len, head_dim, v_dim)
        problem.dtype = CODES[q.dtype]
        problem.flags = _abi.FLAG_STRIDES
        for field, array in (("q", q), ("k", k), ("v", v), ("out", out)):
            strides = element_strides(array)
            getattr(problem, field + "_strides")[:] = [strides[axis] for axis in axes]
        if options.scale is not None:
            problem.flags |= _abi.FLAG_SCALE
            problem.scale = number(options.scale, "scale")
        place(problem, options, inputs)
        spread(problem, inputs, scores)
        problem.inputs = sum(_abi.INPUTS[field] for field in inputs)
        self._vectors(problem, inputs, batch, heads)
        problem.alibi_mode = choice(options.alibi_mode, "alibi_mode", _ALIBI)
        problem.lse_base = choice(options.lse_base, "lse_base", LSE_BASE)
        self.results = self._results(problem, options, scores)
        self.make_result = result_type(("out", *(name for name, _, _ in self.results))) if self.results else None

        if heads and kv_heads == 0:
            raise ValueError(f"k.shape[{axes[1]}] is 0, must be at least 1")
        if heads == 0 or (v_dim == 0 and not self.results):  # there is nothing to compute
            return
        if v_dim == 0:  # which C takes for "as many as": it gets one value for all keys, and room for what comes of it
            self.unseen = np.empty((*scores[:3], 1), self.dtype)
            problem.v_dim, problem.v_strides[:] = 1, [0] * 4
            problem.out_strides[:] = element_strides(self.unseen)
        handle = ctypes.c_void_p()
        check(lib.mh_plan_create(byref(problem), byref(handle)))
        self.handle = handle.value

    def __del__(self, destroy: Any = lib.mh_plan_destroy) -> None:
        if getattr(self, "handle", None):
            destroy(self.handle)

    @staticmethod
    def _vectors(problem: _abi.Problem, inputs: Mapping[str, Any], batch: int, heads: int) -> None:
        if "alibi_slopes" in inputs:
            shape = tuple(inputs["alibi_slopes"].shape)
            if shape not in ((heads,), (batch, heads)):
                raise ValueError(f"alibi_slopes has shape {shape}, must be {(heads,)} or {(batch, heads)}")
            problem.alibi_batch_stride = heads if len(shape) == 2 else 0
        if "sinks" in inputs and tuple(inputs["sinks"].shape) != (heads,):
            raise ValueError(f"sinks has shape {inputs['sinks'].shape}, must be (heads,) = {(heads,)}")

    def _results(
        self, problem: _abi.Problem, options: Options, scores: tuple[int, int, int, int]
    ) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """(name in the result, field of mh_tensors, shape) of the outputs besides out; also writes their strides."""
        bits = choice(options.return_weights, "return_weights", _WEIGHTS)
        if boolean(options.return_lse, "return_lse"):
            bits |= _abi.OUTPUT_LSE
        if boolean(options.return_column_sums, "return_column_sums"):
            bits |= _abi.OUTPUT_COLUMN_SUMS
        if options.return_scores is not None:
            bits |= _abi.OUTPUT_SCORES
            problem.scores_stage = choice(options.return_scores, "return_scores", _STAGE)
        problem.outputs = bits
        results = tuple(
            ("weights" if field == "mean_weights" else field, field, shape)
            for field, shape in result_shapes(*scores).items()
            if bits & _abi.OUTPUTS[field]
        )
        for _, field, shape in results:
            getattr(problem, field + "_strides")[:] = element_strides(Shape(shape, self.real))
        return results

    def run(
        self,
        like: Any,
        begins: tuple[int, int, int, int],
        out: Any,
        inputs: Inputs,
        threads: int | None,
        workspace: Any,
    ) -> Any:
        """Runs the plan on tensors that have its shapes and strides: q, k, v and out begin at `begins`. `out` is the
        caller's object or None, to make it; other results are of the kind of `like`."""
        out_array = None
        if out is None:
            out_array, begin = make(self.out_shape, self.dtype, like)
            begins = (*begins[:3], begin)
        tensors, extra = self.tensors(like, begins, inputs)
        if self.handle is not None:
            status = _run(self.handle, tensors, make_exec(like, threads, workspace))
            if status:
                raise_for(status)
        return self.result(like, out, out_array, extra)  # not earlier: a library may copy what it takes over

    def result(self, like: Any, out: Any, out_array: Any, extra: list[Any]) -> Any:
        """What a call returns: `out`, or its memory as the kind of `like`, and with it the other results."""
        if out is None:
            out = wrap_tensor(out_array, like)
        if self.make_result is None:
            return out
        return self.make_result(out, *(wrap_tensor(array, like) for array in extra))

    def empty_out(self) -> Shape:
        """Results as run makes them."""
        return Shape(self.out_shape, self.dtype)

    def tensors(self, like: Any, begins: tuple[int, int, int, int], inputs: Inputs) -> tuple[bytes, list[Any]]:
        """Where everything lies, as an mh_tensors, and the results besides out, whose memory is made here."""
        words = [_SIZE, *begins, *_NO_OTHERS]
        if self.unseen is not None:
            words[_WORD["v"]], words[_WORD["out"]] = begins[1], address(self.unseen)  # the value is any number of k
        for field, seen in inputs.items():
            words[_WORD[field]] = seen[2]
        extra = []
        for _, field, shape in self.results:
            array, words[_WORD[field]] = make(shape, self.real, like)
            extra.append(array)
        return _pack(*words), extra

    def describe(self, json: bool) -> str:
        if self.handle is None:
            return "{}" if json else "nothing to compute"
        style = _abi.FORMAT_JSON if json else _abi.FORMAT_LINE
        return text_of(lambda buffer, size, needed: lib.mh_plan_describe(self.handle, style, buffer, size, needed))


# An mh_tensors as its words, a size and pointers: half a microsecond less than a ctypes.Structure takes.
_WORD = {name: i for i, (name, *_) in enumerate(_abi.Tensors._fields_)}
_TENSORS = Struct(f"{len(_WORD)}N")
_SIZE, _pack = _TENSORS.size, _TENSORS.pack
_NO_OTHERS = (0,) * (len(_WORD) - _WORD["out"] - 1)


def _check_shapes(q: Any, k: Any, v: Any, axes: tuple[int, ...]) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            order = "(batch, heads, len, dim)" if axes[1] == 1 else "(batch, len, heads, dim)"
            raise ValueError(f"{name} has shape {tuple(array.shape)}, must have 4 dimensions {order}")
        if CODES[array.dtype] != CODES[q.dtype]:
            raise TypeError(
                f"q, k and v must have one dtype, not q {q.dtype}, k {k.dtype}, v {v.dtype}: {name} differs from q"
            )
    for name, array, other, like, axis in (
        ("k", k, "q", q, 0),
        ("k", k, "q", q, 3),
        ("v", v, "k", k, 0),
        ("v", v, "k", k, 1),
        ("v", v, "k", k, 2),
    ):
        if array.shape[axis] != like.shape[axis]:
            raise ValueError(
                f"{name}.shape[{axis}] is {array.shape[axis]}, must equal {other}.shape[{axis}] = {like.shape[axis]}"
            )


# ---- The plans of earlier calls. Reading a dict is one atomic step; writers take the lock. ----

_LIMIT = 256
_plans: dict[tuple, CPlan] = {}
_lock = threading.Lock()


def forget_plans() -> None:
    with _lock:
        _plans.clear()


def plan_for(tensors: tuple, seen: tuple, inputs: Inputs, options: tuple) -> CPlan:
    """The plan of an earlier call with the same shapes, strides, types and options, or a new one. Of q, k, v and out,
    which may be None."""
    key = seen, (*inputs, *[facts for _, facts, _ in inputs.values()]) if inputs else (), options
    try:
        plan = _plans.get(key)
    except TypeError:  # an option that cannot be a key: CPlan accepts or refuses it
        return _make(tensors, inputs, options)
    if plan is None:
        plan = _make(tensors, inputs, options)
        with _lock:
            while len(_plans) >= _LIMIT:  # the oldest goes: a decoding loop never comes back to a shorter kv_len
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan


def _make(tensors: tuple, inputs: Inputs, options: tuple) -> CPlan:
    q, k, v, out = map(as_array, tensors, ("q", "k", "v", "out"))
    return CPlan(q, k, v, out, as_arrays(inputs), Options(*options))
