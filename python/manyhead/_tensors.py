"""What a call gets and makes, as NumPy arrays, or PyTorch's tensors as they are.

What a kept plan needs of a tensor is its shape, strides, type and address. PyTorch tells them in 1 us (Intel Xeon,
CPython 3.11); a NumPy array on the same memory takes 3 to make and to ask, in bfloat16 6, for each array of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ._arrays import BF16, CODES, Shape, _address, _from_buffer, address, floats, new, view, wrap, writable

Seen = tuple[Any, tuple, int]  # what to keep while C reads it, its facts, where it begins
Kinds = dict[Any, int]  # type, of NumPy or PyTorch -> bytes of an element - 1


class _NoTensor:
    """The type of PyTorch's tensors where none has been seen."""


_ndarray = np.ndarray
_NOTHING: Seen = None, (), 0
_Tensor: Any = _NoTensor
_types: dict[Any, np.dtype] = {}  # PyTorch's that manyhead computes with -> NumPy's
_grad_enabled: Any = None  # whether PyTorch records what is done to its tensors
_like: Any = None  # maker of a tensor like another one
_empty: dict[int | None, Any] = {}  # mh_dtype -> maker of an uninitialised tensor in host memory


_named: list[tuple[Kinds, tuple[str, ...]]] = []  # what NumPy and PyTorch call the types in each


def _kinds(*names: str) -> Kinds:
    kinds: Kinds = {dtype: dtype.itemsize - 1 for dtype in map(np.dtype, names)}
    _named.append((kinds, names))
    return kinds


# Without NumPy's bfloat16, of which the buffer protocol knows nothing.
FLOATS = _kinds("float32", "float64", "float16")
BOOLEANS = _kinds("bool", "uint8")
MASKS = _kinds("float32", "float64", "float16", "bool", "uint8")
INDICES = _kinds("int32", "int64")
REALS = {np.dtype(name): _kinds(name) for name in ("float32", "float64")}


def see(
    x: Any, name: str, kinds: Kinds = FLOATS, convert: Callable[[Any, str], Any] = floats, vector: bool = False
) -> Seen:
    """An input. Arrays of these kinds are what C reads, vectors where they are contiguous; others are converted, as are
    numbers without a dimension in the place of vectors."""
    kind = type(x)
    if kind is _ndarray:
        dtype = x.dtype
        if dtype in kinds and x.flags.carray and (x.ndim or not vector):  # most are: what address does, without a call
            try:
                return x, (x.shape, x.strides, dtype), _address(_from_buffer(x))  # type: ignore[arg-type]
            except (ValueError, TypeError, BufferError):  # empty, or NumPy warns of writing
                pass
    elif kind is _Tensor:
        if (seen := _see_plain(x, kinds.get(x.dtype))) and (not vector or (x.ndim and x.is_contiguous())):
            return seen
    elif kind is Shape:
        return x, facts(x), 0
    else:
        _meet(kind)
    array = convert(x, name)
    return array, facts(array), address(array)


def see_output(x: Any, name: str) -> Seen:
    """The same of an output that the caller gave: its memory itself, never a copy."""
    if type(x) is _Tensor and (seen := _see_plain(x, FLOATS.get(x.dtype))):
        return seen
    array = writable(x, name)
    return array, facts(array), address(array)


def see_all(q: Any, k: Any, v: Any, out: Any) -> tuple[tuple, tuple, tuple[int, int, int, int]]:
    """What to keep of all four, their facts, where they begin."""
    q, q_facts, q_begin = see(q, "q")
    k, k_facts, k_begin = see(k, "k")
    v, v_facts, v_begin = see(v, "v")
    out, out_facts, out_begin = _NOTHING if out is None else see_output(out, "out")
    return (q, k, v, out), (q_facts, k_facts, v_facts, out_facts), (q_begin, k_begin, v_begin, out_begin)


def facts(x: Any) -> tuple:
    """What a plan depends on, to be compared and to be a key of a dict."""
    return x.shape, x.stride() if type(x) is _Tensor else x.strides, x.dtype


def as_array(x: Any, name: str = "") -> Any:
    """For those who look closer: a NumPy array on the memory of a tensor; what is no tensor as it is."""
    return view(x, name) if type(x) is _Tensor else x


def numpy_type(dtype: Any) -> np.dtype:
    """NumPy's name of a type that manyhead computes with, which may be PyTorch's."""
    return _types.get(dtype, dtype)


def make(shape: tuple[int, ...], dtype: np.dtype, like: Any) -> tuple[Any, int]:
    """Memory for a result, and where it begins."""
    if type(like) is _Tensor:
        # From one of its shape in half the time.
        made = _like(like) if like.shape == shape and _types[like.dtype] is dtype else _empty[CODES[dtype]](shape)
        return made, made.data_ptr()
    array = new(shape, dtype, like)
    return array, address(array)


def wrap_tensor(x: Any, like: Any) -> Any:
    """A result as the kind of array that `like` is."""
    return x if type(like) is _ndarray or type(x) is _Tensor else wrap(x, like)


def _see_plain(x: Any, item: int | None) -> Seen | None:
    """A tensor whose facts are all there is to it. Others go by way of NumPy, are copied or refused in words."""
    try:
        if (
            item is not None
            and x.is_cpu
            and (not x.requires_grad or not _grad_enabled())
            and not x.is_neg()  # the negative of what lies in its memory
            and (begin := x.data_ptr())  # 0 for empty ones
            and not begin & item
            and x.untyped_storage().nbytes()  # 0 where it was freed
        ):
            return x, (x.shape, x.stride(), x.dtype), begin
    except RuntimeError:  # a nested one has no shape, a sparse one and one within torch.vmap no memory of its own
        pass
    return None


def _meet(kind: type) -> None:
    """Looks at PyTorch when the first of its tensors is there. Never imports it."""
    global _Tensor, _like, _grad_enabled
    torch = sys.modules.get("torch")
    if kind is _Tensor or torch is None or kind is not getattr(torch, "Tensor", None):
        return
    cpu = torch.device("cpu")  # not the default device, which may be another one
    for kinds, names in _named:
        kinds.update((getattr(torch, name), np.dtype(name).itemsize - 1) for name in names)
    FLOATS[torch.bfloat16] = MASKS[torch.bfloat16] = 1
    for name, dtype in (
        ("float32", np.dtype(np.float32)),
        ("float64", np.dtype(np.float64)),
        ("float16", np.dtype(np.float16)),
        ("bfloat16", BF16),
    ):
        theirs = getattr(torch, name)
        _types[theirs] = dtype
        _empty[CODES[dtype]] = lambda shape, dtype=theirs, make=torch.empty: make(shape, dtype=dtype, device=cpu)
    _like = partial(torch.empty_like, memory_format=torch.contiguous_format)
    _grad_enabled = torch.is_grad_enabled
    _Tensor = kind  # last, as other threads may be looking
