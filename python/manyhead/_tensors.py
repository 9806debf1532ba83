"""q, k, v, out and masks: NumPy arrays, or PyTorch's tensors as they are.

What a kept plan needs of a tensor is its shape, strides, type and address. PyTorch tells them in 1 us (Intel Xeon,
CPython 3.11); a NumPy array on the same memory takes 3 to make and to ask, in bfloat16 6, four times a call.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ._arrays import BF16, CODES, _address, _from_buffer, address, floats, new, view, wrap, writable


class _NoTensor:
    """The type of PyTorch's tensors where none has been seen."""


_ndarray = np.ndarray
_BF16 = CODES[BF16]
_Tensor: Any = _NoTensor
_layout: Any = None  # of tensors with strides
_item: dict[Any, int] = {}  # type that manyhead computes with -> bytes of an element - 1
_masks: dict[Any, int] = {}  # those of masks
_types: dict[Any, np.dtype] = {}  # PyTorch's -> NumPy's
_empty: dict[int | None, Any] = {}  # mh_dtype -> maker of an uninitialised tensor in host memory


def see(x: Any, name: str) -> tuple[Any, tuple, int]:
    """An input of a type that manyhead computes with: what to keep while C reads it, its facts, where it begins."""
    kind = type(x)
    if kind is _ndarray:
        dtype = x.dtype
        code = CODES[dtype]
        if code is not None:
            flags = x.flags
            if flags.carray and code != _BF16:  # most are: what address does, without a call
                try:
                    return x, (x.shape, x.strides, dtype), _address(_from_buffer(x))  # type: ignore[arg-type]
                except (ValueError, TypeError, BufferError):  # empty, or NumPy warns of writing
                    pass
            if flags.aligned:
                return x, (x.shape, x.strides, dtype), address(x)
    elif kind is _Tensor and (seen := _see_plain(x, _item.get(x.dtype))):
        return seen
    array = floats(x, name)
    if kind is not _ndarray:
        _meet(kind)
    return array, facts(array), address(array)


def see_output(x: Any, name: str) -> tuple[Any, tuple, int]:
    """The same of an output that the caller gave: its memory itself, never a copy. None: nothing yet."""
    if x is None:
        return None, (), 0
    if type(x) is _Tensor and (seen := _see_plain(x, _item.get(x.dtype))):
        return seen
    array = writable(x, name)
    return array, facts(array), address(array)


def see_all(q: Any, k: Any, v: Any, out: Any) -> tuple[tuple, tuple, tuple[int, int, int, int]]:
    """What to keep of all four, their facts, where they begin."""
    q, q_facts, q_begin = see(q, "q")
    k, k_facts, k_begin = see(k, "k")
    v, v_facts, v_begin = see(v, "v")
    out, out_facts, out_begin = see_output(out, "out")
    return (q, k, v, out), (q_facts, k_facts, v_facts, out_facts), (q_begin, k_begin, v_begin, out_begin)


def stays(x: Any) -> bool:
    """Whether a mask, of bool or floats, is a tensor that may stay what it is."""
    return type(x) is _Tensor and _see_plain(x, _masks.get(x.dtype)) is not None


def begin_of(x: Any) -> int:
    """Where the first element lies."""
    return x.data_ptr() if type(x) is _Tensor else address(x)


def facts(x: Any) -> tuple:
    """What a plan depends on, to be compared and to be a key of a dict."""
    return x.shape, x.stride() if type(x) is _Tensor else x.strides, x.dtype


def as_array(x: Any) -> Any:
    """For those who look closer: a NumPy array on the memory of a tensor; what is no tensor as it is."""
    return view(x, "") if type(x) is _Tensor else x


def numpy_type(x: Any) -> np.dtype:
    return _types[x.dtype] if type(x) is _Tensor else x.dtype


def make(shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, int]:
    """Memory for a result, and where it begins."""
    if type(like) is _Tensor:
        made = _empty[CODES[dtype]](shape)
        return made, made.data_ptr()
    array = new(shape, dtype, like)
    return array, address(array)


def wrap_tensor(x: Any, like: Any) -> Any:
    """A result as the kind of array that `like` is."""
    return x if type(like) is _ndarray or type(x) is _Tensor else wrap(x, like)


def _see_plain(x: Any, item: int | None) -> tuple[Any, tuple, int] | None:
    """A tensor whose facts are all there is to it. Others go by way of NumPy, are copied or refused in words."""
    try:
        if (
            item is not None
            and x.is_cpu
            and not x.requires_grad
            and x.layout is _layout
            and not x.is_neg()  # the negative of what lies in its memory
            and not (begin := x.data_ptr()) & item
        ):
            return x, (x.shape, x.stride(), x.dtype), begin
    except RuntimeError:  # a nested one has no shape, one within torch.vmap no memory
        pass
    return None


def _meet(kind: type) -> None:
    """Looks at PyTorch when the first of its tensors has come by way of NumPy. Never imports it."""
    global _Tensor, _layout
    torch = sys.modules.get("torch")
    if kind is _Tensor or torch is None or kind is not getattr(torch, "Tensor", None):
        return
    cpu = torch.device("cpu")  # not the default device, which may be another one
    for name, dtype in (
        ("float32", np.dtype(np.float32)),
        ("float64", np.dtype(np.float64)),
        ("float16", np.dtype(np.float16)),
        ("bfloat16", BF16),
    ):
        theirs = getattr(torch, name)
        _item[theirs] = dtype.itemsize - 1
        _types[theirs] = dtype
        _empty[CODES[dtype]] = lambda shape, dtype=theirs, make=torch.empty: make(shape, dtype=dtype, device=cpu)
    _masks.update(_item)
    _masks[torch.bool], _types[torch.bool] = 0, np.dtype(np.bool_)
    _layout = torch.strided
    _Tensor = kind  # last, as other threads may be looking
