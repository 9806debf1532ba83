"""manyhead.merge_state and manyhead.merge_states: one result from partial ones over disjoint sets of keys."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p, cast
from math import prod
from typing import Any

import numpy as np

from . import _abi
from ._arrays import CODES, address, choice, element_strides, floats, new, reals, wrap, writable
from ._exec import make_exec
from ._library import check, lib
from ._plan import LAYOUT, LSE_BASE, real_type, result_type

_RESULT = result_type(("out", "lse"))


def merge_states(
    outs: Any, lses: Any, *, lse_base: str = "e", layout: str = "bhsd", out: Any = None, threads: int | None = None
) -> Any:
    """Merges partial attention results: lse = log(sum exp(lse_s)), out = sum out_s * exp(lse_s - lse).

    A state with lse -inf counts nothing, whatever its out holds; with no state at all the result is out 0, lse -inf.
    States are added in the order of their index, so the same input gives the same bits.

    Args:
        outs: (states, ..., v_dim), any number of dimensions between.
        lses: (states, ...), in the base `lse_base`, "e" or "2". Real numbers, also in a list, which are converted to
            float32, or to float64 beside float64 outs.
        layout: "bshd" when outs are (states, batch, len, heads, v_dim) while lses are (states, batch, heads, len).
        out: where to write the merged out.
        threads: as in attention.

    Returns:
        A named tuple (out, lse); lse in the base `lse_base`.

    Raises:
        ValueError, TypeError: as attention.
    """
    return _merge((outs,), (lses,), lse_base, layout, out, threads)


def merge_state(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    lse_base: str = "e",
    layout: str = "bhsd",
    out: Any = None,
    threads: int | None = None,
) -> Any:
    """Merges two partial results; as merge_states, without the first dimension.

    `out` may be out_a itself: that state is then updated in place (the returned lse is a new array). States that lie
    in memory differently (other strides) are copied first.
    """
    return _merge((out_a, out_b), (lse_a, lse_b), lse_base, layout, out, threads)


def _merge(outs: tuple, lses: tuple, lse_base: str, layout: str, out: Any, threads: int | None) -> Any:
    pair = len(outs) == 2
    names = ("out_a", "out_b") if pair else ("outs",)
    lse_names = ("lse_a", "lse_b") if pair else ("lses",)
    arrays = [floats(x, name) for x, name in zip(outs, names, strict=True)]
    first = arrays[0]
    code, real = CODES[first.dtype], real_type(first.dtype)
    logs = [reals(x, name, real) for x, name in zip(lses, lse_names, strict=True)]
    axes = choice(layout, "layout", LAYOUT)
    lead = 0 if pair else 1  # the dimension that counts states
    if layout == "bshd" and first.ndim != 4 + lead:
        raise ValueError(f'{names[0]} has shape {first.shape}; layout="bshd" needs {4 + lead} dimensions')
    if first.ndim < 1 + lead:
        raise ValueError(f"{names[0]} has shape {first.shape}, must have at least {1 + lead} dimensions")
    for name, array in zip(names, arrays, strict=True):
        if CODES[array.dtype] != code:
            raise TypeError(f"{name} has dtype {array.dtype}, must be that of {names[0]}: {first.dtype}")
        if array.shape != first.shape:
            raise ValueError(f"{name} has shape {array.shape}, must be that of {names[0]}: {first.shape}")
    out_shape = first.shape[lead:]
    rows = tuple(out_shape[axis] for axis in axes[:3]) if layout == "bshd" else out_shape[:-1]
    for name, array in zip(lse_names, logs, strict=True):
        if array.shape != first.shape[:lead] + rows:
            raise ValueError(f"{name} has shape {array.shape}, must be {first.shape[:lead] + rows}")

    like = outs[0]
    out_array = new(out_shape, first.dtype, like) if out is None else writable(out, "out")
    if out_array.shape != out_shape:
        raise ValueError(f"out has shape {out_array.shape}, must be {out_shape}")
    if CODES[out_array.dtype] != code:
        raise TypeError(f"out has dtype {out_array.dtype}, must be that of {names[0]}: {first.dtype}")
    lse_array = new(rows, real, like)
    base = choice(lse_base, "lse_base", LSE_BASE)
    execution = make_exec(like, threads)
    if 0 not in rows:
        order = axes if layout == "bshd" else None
        written = out_array
        if out_shape[-1] == 0:  # C must have values: of one, which nobody sees
            arrays = [np.broadcast_to(np.zeros((), first.dtype), (*first.shape[:-1], 1)) for _ in arrays]
            written = np.empty((*out_shape[:-1], 1), first.dtype)
        arrays = [_rows(array, lead, order) for array in arrays]
        target = _rows(written, 0, order)
        if not np.may_share_memory(target, written):
            raise ValueError("out must be contiguous where it has more than 4 dimensions")
        logs = [_rows(array[..., None], lead)[..., 0] for array in logs]
        _run(arrays, logs, target, _rows(lse_array[..., None], 0)[..., 0], code, base, execution)
    return _RESULT(wrap(out_array, like) if out is None else out, wrap(lse_array, like))


def _rows(array: np.ndarray, lead: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """The array as ([states,] batch, heads, q_len, v_dim): missing dimensions are 1, surplus ones are joined."""
    if order is not None:
        return array.transpose(*range(lead), *(lead + axis for axis in order))
    middle = array.ndim - lead - 1
    if middle > 3:
        joined = prod(array.shape[lead:-3])  # not -1: there may be no states
        return array.reshape(*array.shape[:lead], joined, *array.shape[-3:])
    return np.expand_dims(array, tuple(range(lead, lead + 3 - middle)))


def _run(
    arrays: list[np.ndarray],
    logs: list[np.ndarray],
    out: np.ndarray,
    lse: np.ndarray,
    code: int,
    base: int,
    execution: Any,
) -> None:
    pair = len(arrays) == 2
    if pair:  # C has one set of strides for both states
        arrays, logs = _alike(arrays), _alike(logs)
    merge = _abi.Merge(ctypes.sizeof(_abi.Merge), 2 if pair else arrays[0].shape[0], *out.shape)
    merge.dtype, merge.flags, merge.lse_base = code, _abi.FLAG_STRIDES, base
    merge.out_strides[:] = _strides(out)
    merge.lse_strides[:] = _strides(lse)
    merge.outs_strides[:] = [0, *_strides(arrays[0])] if pair else _strides(arrays[0])
    merge.lses_strides[:] = [0, *_strides(logs[0])] if pair else _strides(logs[0])
    merge.exec = cast(execution, c_void_p)
    inputs = [address(x) for state in zip(arrays, logs, strict=True) for x in state]
    function = lib.mh_merge_state if pair else lib.mh_merge_states
    check(function(byref(merge), *inputs, address(out), address(lse)))


def _alike(states: list[np.ndarray]) -> list[np.ndarray]:
    """The states, or contiguous copies where they lie in memory differently."""
    return states if _strides(states[0]) == _strides(states[1]) else [np.array(x, order="C") for x in states]


def _strides(array: np.ndarray) -> list[int]:
    """In elements; that of a dimension of size 1, which says nothing, is 0."""
    return [stride if size > 1 else 0 for size, stride in zip(array.shape, element_strides(array), strict=True)]
