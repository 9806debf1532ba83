"""manyhead.attention and manyhead.plan."""

from __future__ import annotations

import json as _json
from math import prod
from typing import Any, SupportsFloat, Unpack

import numpy as np

from ._arrays import (
    CODES,
    Shape,
    address,
    aligned_empty,
    boolean,
    element_strides,
    float_type,
    floats,
    integer,
    is_in_place,
    is_jax,
    number,
    writable,
)
from ._exec import make_exec, thread_limit
from ._library import Immutable, Owner, lib, raise_for
from ._plan import (
    NAMES,
    CPlan,
    Inputs,
    Options,
    PlanOptions,
    as_arrays,
    gather,
    make_window,
    plan_for,
    real_type,
    split_offset,
)
from ._tensors import as_array, facts, make, see_all

_run = lib.mh_plan_run


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: SupportsFloat | None = None,
    causal: bool = False,
    align: str | None = None,
    q_offset: Any = None,
    window: tuple[int, int] | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: SupportsFloat = 0.0,
    fast_exp: bool = False,
    attn_mask: Any = None,
    attn_bias: Any = None,
    key_mask: Any = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    alibi_mode: str = "abs",
    sinks: Any = None,
    layout: str = "bhsd",
    out: Any = None,
    return_lse: bool = False,
    lse_base: str = "e",
    return_weights: bool | str = False,
    return_column_sums: bool = False,
    return_scores: str | None = None,
    threads: int | None = None,
    workspace: Any = None,
) -> Any:
    """Scaled dot-product attention: softmax(mask(softcap(scale * q k^T) + alibi + bias)) v for every head.

    Arrays are NumPy arrays, tensors with ``__dlpack__`` in host memory (PyTorch, JAX, ...) or objects with the buffer
    protocol. They are read in place whatever their strides, negative and 0 included; only memory that is misaligned or
    in foreign byte order is copied first. Results are of the kind of `q` (PyTorch in, PyTorch out). There are no
    gradients: PyTorch's tensors that want one are taken under torch.no_grad() only.

    Shapes, for ``layout="bhsd"``; with ``"bshd"`` the length comes before the heads in q, k, v and out only:
        q: (batch, heads, q_len, head_dim). float32, float64, float16 or bfloat16; k and v have the same type.
        k: (batch, kv_heads, kv_len, head_dim). kv_heads divides heads; query head h reads h // (heads / kv_heads).
        v: (batch, kv_heads, kv_len, v_dim).

    Options:
        scale: factor of the scores; default 1 / sqrt(head_dim). 0 and negative numbers are taken as they are.
        causal: query i at position p attends keys j <= p.
        align: where query i stands among the keys: "top_left", p = i (PyTorch); "bottom_right", p = i + kv_len - q_len
            with the batch entry's own kv_len (FlashAttention). Needed where a position is used and q_len != kv_len;
            None or "none" elsewhere.
        q_offset: p = i + q_offset: an integer or one for each batch entry; may be negative. Takes the place of `align`.
        window: (left, right), p - left <= j <= p + right; -1 is no bound. Or window_left and window_right.
        softcap: scores become softcap * tanh(score / softcap), before anything is added; 0 is off.
        fast_exp: exponentials may be wrong by 2**-13 of themselves, and where a matrix unit multiplies float16 weights
            are rounded to bfloat16, or to float16 if it has that; prompts in float16 are up to 1.3 times as fast.
            Steps of up to 7 rows (query heads of a key head times q_len), float64 and calls with weights, column sums
            or scores stay as exact as without.
        attn_mask: broadcasts to (batch, heads, q_len, kv_len) by NumPy's rule. bool or uint8: True = may attend.
            A float array is added to the scores, -inf = may not attend; nor may a row whose other keys have more than
            the lowest number (np.finfo(np.float32).min; beside float64 q, that of float64) attend those that have it.
        attn_bias: as a float `attn_mask`; for a call that has a boolean mask too. Any of the float types.
        key_mask: (batch, kv_len), True = a real key; (kv_len,) for all batch entries.
        seqused_k: (batch,) integers, the keys in use; later ones are not looked at.
        alibi_slopes: (heads,) or (batch, heads); adds -slope * |p - j|, or slope * (j - p) with alibi_mode="signed".
        sinks: (heads,), one more logit in each softmax's denominator; not scaled, not capped.
        out: where to write the result, an array of the result's shape and type, any strides.
        return_lse: also the logarithm of the softmax denominator, (batch, heads, q_len); base "e", or lse_base="2".
        return_weights: True: the probabilities (batch, heads, q_len, kv_len); "mean": averaged over the heads.
            (need_weights and average_weights of MultiHeadAttention, after PyTorch's layer.)
        return_column_sums: probabilities summed over the queries, (batch, heads, kv_len): what each key received.
        return_scores: "raw", scale * q k^T; "capped", after the softcap; "biased", after everything, masked = -inf.
        threads: most threads for this call, as far as set_threads allows; default manyhead.threads(). PyTorch's tensors
            are computed on PyTorch's threads, at most torch.get_num_threads() of them. Results have the same bits for
            any number.
        workspace: writable memory, 64-byte aligned, see Plan.workspace_size; with it the library allocates nothing.

    The extra results, alibi_slopes and sinks are float32, or float64 beside float64 tensors.

    Returns:
        `out` alone, or, when more was asked for, a named tuple: out, then whichever of lse, weights, column_sums and
        scores were asked for, in this order. A row that may attend no key is 0, with lse -inf (or its sink).

    Raises:
        ValueError: a shape, length, option or array is wrong; outputs have not been touched.
        TypeError: an argument is of a wrong type, or in another device's memory.
        manyhead.Error: this build or machine cannot do it.
        MemoryError: no memory; as manyhead.OutOfMemory where the library asked for it, not NumPy for the results.
    """
    # Kept plans are found by what options are equal to: what is of a wrong type must not get there.
    if scale is not None and not isinstance(scale, (float, int)):
        scale = number(scale, "scale")
    if not isinstance(softcap, (float, int)):
        softcap = number(softcap, "softcap")
    if causal is not False and causal is not True:
        causal = boolean(causal, "causal")
    if fast_exp is not False and fast_exp is not True:
        fast_exp = boolean(fast_exp, "fast_exp")
    if return_lse is not False and return_lse is not True:
        return_lse = boolean(return_lse, "return_lse")
    if return_column_sums is not False and return_column_sums is not True:
        return_column_sums = boolean(return_column_sums, "return_column_sums")
    if window is not None or window_left is not None or window_right is not None:
        window = make_window(window, window_left, window_right)
    offsets = None
    if q_offset is not None and type(q_offset) is not int:
        q_offset, offsets = split_offset(q_offset)
    tensors, seen, begins = see_all(q, k, v, out)
    inputs = gather(tensors[0].dtype, attn_mask, attn_bias, key_mask, seqused_k, offsets, alibi_slopes, sinks)
    plan = plan_for(
        tensors,
        seen,
        inputs,
        (scale, causal, align, q_offset, window, softcap, fast_exp, alibi_mode, layout)
        + (return_lse, lse_base, return_weights, return_column_sums, return_scores),
    )
    return plan.run(q, begins, out, inputs, threads, workspace)


class Plan(Immutable):
    """The decision how to compute one shape of attention; made by manyhead.plan. It never changes, and any number of
    threads may run it at once."""

    def __init__(self, plan: CPlan, tensors: dict[str, Any], inputs: dict[str, Any]) -> None:
        self._plan = plan
        self._tensors = tuple(_Planned(name, tensors[name]) for name in ("q", "k", "v", "out"))
        self._inputs = {name: _Planned(NAMES.get(name, name), x) for name, x in inputs.items()}
        # Results that run makes are contiguous.
        self._makes_out = _same_strides(plan.out_shape, self._tensors[-1].strides, element_strides(plan.empty_out()))

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        attn_mask: Any = None,
        attn_bias: Any = None,
        key_mask: Any = None,
        seqused_k: Any = None,
        q_offset: Any = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        out: Any = None,
        threads: int | None = None,
        workspace: Any = None,
    ) -> Any:
        """Runs the plan. Arrays must have the shapes, strides and types that it was made for, and the same optional
        inputs must be there; otherwise ValueError says which one differs. Arguments and results as in attention."""
        tensors, seen, begins = see_all(q, k, v, out)
        inputs = gather(tensors[0].dtype, attn_mask, attn_bias, key_mask, seqused_k, q_offset, alibi_slopes, sinks)
        self._check(tensors, seen, inputs)
        return self._plan.run(q, begins, out, inputs, threads, workspace)

    def bind(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        attn_mask: Any = None,
        attn_bias: Any = None,
        key_mask: Any = None,
        seqused_k: Any = None,
        q_offset: Any = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        out: Any = None,
        threads: int | None = None,
        workspace: Any = None,
    ) -> BoundPlan:
        """The plan with the arrays of all its runs, which `bound()` reads and writes without looking at them again: a
        small call costs half as much. What arrays hold may change between runs, say a cache and `seqused_k`; so arrays
        that would be copied first, and JAX arrays, which never change, are refused. Arguments as in run."""
        q_array, k_array, v_array = floats(q, "q"), floats(k, "k"), floats(v, "v")
        out_array = None if out is None else writable(out, "out")
        inputs = gather(q_array.dtype, attn_mask, attn_bias, key_mask, seqused_k, q_offset, alibi_slopes, sinks)
        tensors = q_array, k_array, v_array, out_array
        self._check(tensors, tuple(() if x is None else facts(x) for x in tensors), inputs)
        arrays: dict[str, Any] = {"q": q_array, "k": k_array, "v": v_array, **as_arrays(inputs)}
        for name, x, field in (
            ("q", q, "q"),
            ("k", k, "k"),
            ("v", v, "v"),
            ("attn_mask", attn_mask, "mask" if "mask" in inputs else "bias"),
            ("attn_bias", attn_bias, "bias"),
            ("key_mask", key_mask, "key_mask"),
            ("seqused_k", seqused_k, "seqused_k"),
            ("q_offset", q_offset, "q_offset"),
            ("alibi_slopes", alibi_slopes, "alibi_slopes"),
            ("sinks", sinks, "sinks"),
        ):
            if x is None:
                continue
            if is_jax(x):
                raise TypeError(f"{name} is a JAX array, which never changes: bind arrays that do")
            if not is_in_place(x, arrays[field]):
                raise ValueError(
                    f"{name} would be copied, as C cannot read it where it is: later changes would not count"
                )
        return BoundPlan(self._plan, q, q_array, k_array, v_array, out, out_array, inputs, threads, workspace)

    def _check(self, tensors: tuple, seen: tuple, inputs: Inputs) -> None:
        """That arrays, of which `seen` are the facts, are like those that the plan was made for."""
        for planned, x, seen_of_x in zip(self._tensors, tensors, seen, strict=True):
            if x is not None and seen_of_x != planned.facts:
                planned.check(x)
        if inputs.keys() != self._inputs.keys():
            wanted, given = (sorted(NAMES.get(name, name) for name in names) for names in (self._inputs, inputs))
            raise ValueError(f"the plan was made for the inputs {wanted}, not {given}")
        for name, (x, seen_of_x, _) in inputs.items():
            planned = self._inputs[name]
            if seen_of_x != planned.facts:
                planned.check(x)
        if tensors[-1] is None and not self._makes_out:
            strides = self._tensors[-1].strides
            raise ValueError(f"the plan was made for an out with strides {strides} in elements: pass out")

    def workspace_size(self, threads: int | None = None) -> int:
        """Bytes of workspace with which a run on at most `threads` threads allocates nothing."""
        limit = thread_limit(threads)
        return lib.mh_plan_workspace_size(self._plan.handle, limit) if self._plan.handle else 0

    def make_workspace(self, threads: int | None = None) -> np.ndarray:
        """Such a workspace: uint8, 64-byte aligned. For one run at a time."""
        return aligned_empty((self.workspace_size(threads),), np.dtype(np.uint8))

    def describe(self, *, json: bool = False) -> Any:
        """The plan in one line of text, or as a dict: kernel, isa, tile sizes, splits, tasks, FLOPs, bytes, ..."""
        text = self._plan.describe(json)
        return _json.loads(text) if json else text

    def __repr__(self) -> str:
        return f"<manyhead.Plan {self.describe()}>"


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: Any = "float32",
    attn_mask: Any = None,
    attn_bias: Any = None,
    key_mask: Any = None,
    seqused_k: Any = None,
    q_offset: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: Any = None,
    window: tuple[int, int] | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Checks a kind of call once and decides how to compute it, for Plan.run.

    Every array argument is an example array, of which shape, strides and type are taken and nothing is read, or a
    shape (a tuple) for a contiguous one: of type `dtype` for q, k, v, out and attn_bias, bool for attn_mask and
    key_mask, int64 for seqused_k and q_offset. An integer q_offset, also one in an array without a dimension, is part
    of the plan. `options` are those of attention: scale, causal, align, softcap, fast_exp, alibi_mode, layout,
    return_lse, lse_base, return_weights, return_column_sums, return_scores. Raises what attention raises.
    """
    unknown = options.keys() - PlanOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"plan() got an unexpected option {sorted(unknown)[0]!r}")
    window = make_window(window, window_left, window_right)
    offset, q_offset = split_offset(q_offset)
    dtype = float_type(dtype, "dtype")
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if isinstance(x, list):
            raise TypeError(f"{name} is a list, must be an array or, as a shape, a tuple")
    tensors = {name: _example(x, dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    tensors = {name: x if isinstance(x, Shape) else floats(x, name) for name, x in tensors.items()}
    real = real_type(tensors["q"].dtype)
    inputs = gather(
        tensors["q"].dtype,
        _example(attn_mask, np.dtype(np.bool_)),
        _example(attn_bias, dtype),
        _example(key_mask, np.dtype(np.bool_)),
        _example(seqused_k, np.dtype(np.int64)),
        _example(q_offset, np.dtype(np.int64)),
        _example(alibi_slopes, real),
        _example(sinks, real),
    )
    arrays = as_arrays(inputs)
    out = _example(out, dtype)
    if out is not None and not isinstance(out, Shape):
        out = writable(out, "out")
    made = CPlan(
        tensors["q"], tensors["k"], tensors["v"], out, arrays, Options(q_offset=offset, window=window, **options)
    )
    tensors["out"] = out if out is not None else made.empty_out()
    return Plan(made, tensors, arrays)


class BoundPlan(Owner):
    """A plan and the arrays that its runs read and write; made by Plan.bind. It keeps the arrays. Runs write the same
    results, so it is for one thread at a time; several may have one each."""

    def __init__(
        self,
        plan: CPlan,
        like: Any,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: Any,
        out_array: Any,
        inputs: Inputs,
        threads: int | None,
        workspace: Any,
    ) -> None:
        if out_array is None:
            out_array, begin = make(plan.out_shape, plan.dtype, like)
        else:
            begin = address(out_array)
        tensors, extra = plan.tensors(like, (address(q), address(k), address(v), begin), inputs)
        self._arguments = None
        if plan.handle is not None:
            self._arguments = plan.handle, tensors, make_exec(like, threads, workspace)
        self._plan = plan
        self._keeps = q, k, v, out_array, inputs, extra
        self._result = plan.result(like, out, out_array, extra)
        results = self._result if extra else (self._result,)
        if not all(x is array or is_in_place(x, array) for x, array in zip(results, (out_array, *extra), strict=True)):
            raise TypeError(f"results of the kind of q, {type(like).__name__}, would be copies: bind NumPy arrays")

    def __call__(self) -> Any:
        """Runs the plan. Returns what attention returns, the same object every time."""
        if self._arguments is not None:
            status = _run(*self._arguments)
            if status:
                raise_for(status)
        return self._result

    def __repr__(self) -> str:
        return f"<manyhead.BoundPlan {self._plan.describe(False)}>"


class _Planned:
    """What a plan remembers of an array."""

    def __init__(self, name: str, x: Any) -> None:
        self.name, self.shape, self.strides, self.dtype = name, tuple(x.shape), element_strides(x), x.dtype
        self.facts = facts(x)  # of the last array that was like it, which says at a glance that another one is

    def check(self, x: Any) -> None:
        """That an array is like it."""
        name, array = self.name, as_array(x)
        if array.shape != self.shape:
            raise ValueError(f"{name} has shape {array.shape}, the plan was made for {self.shape}")
        if _kind(array.dtype) != _kind(self.dtype):
            raise ValueError(f"{name} has dtype {array.dtype}, the plan was made for {self.dtype}")
        strides = element_strides(array)
        if not _same_strides(self.shape, strides, self.strides):
            raise ValueError(f"{name} has strides {strides} in elements, the plan was made for {self.strides}")
        self.facts = facts(x)


def _example(x: Any, dtype: np.dtype) -> Any:
    """A tuple of sizes as a contiguous array that does not exist; anything else as it is."""
    if not isinstance(x, tuple):
        return x
    shape = tuple(integer(size, "a size of a shape") for size in x)
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {shape} has a size below 0")
    if prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"the shape {shape} is too large for memory")
    return Shape(shape, dtype)


def _kind(dtype: np.dtype) -> Any:
    """Types with the same kind are the same to C: bool and uint8, the two ways to write bfloat16."""
    if dtype in (np.bool_, np.uint8):
        return np.bool_
    return dtype if CODES[dtype] is None else CODES[dtype]


def _same_strides(shape: tuple[int, ...], a: list[int], b: list[int]) -> bool:
    """Those of dimensions of size 1 say nothing, nor do any where there are no elements."""
    return 0 in shape or all(x == y for size, x, y in zip(shape, a, b, strict=True) if size > 1)
