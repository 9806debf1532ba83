"""Whatever a caller may pass as an array, seen as a NumPy array on the same memory, and results in the caller's kind.

Copies are made in two cases only: an input at an address or with strides that its type does not allow, or in foreign
byte order, is copied once; index, slope and sink vectors are converted to the type that C reads. An output is never
copied.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from math import prod
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ._library import lib

# NumPy has no bfloat16. Arrays of ml_dtypes keep their type; other bfloat16 memory gets this one.
BF16 = np.dtype([("bfloat16", np.uint16)], align=True)

# What the library calls its types.
DTYPE_CODES = {lib.mh_dtype_name(i).decode(): i for i in range(lib.mh_dtype_count())}
DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": BF16,
}
_NUMPY_NAMES = {"f4": "f32", "f8": "f64", "f2": "f16"}


class _Codes(dict):
    """NumPy type -> mh_dtype, None for types that manyhead does not compute with."""

    def __missing__(self, dtype: np.dtype) -> int | None:
        # Not of dtype.name, for which NumPy imports: while Python shuts down nothing can be imported.
        name = "bf16" if dtype == BF16 or dtype.type.__name__ == "bfloat16" else _NUMPY_NAMES.get(dtype.str[1:], "")
        code = DTYPE_CODES.get(name) if dtype.isnative else None
        self[dtype] = code
        return code


CODES = _Codes()
_MASKABLE = ("q", "k", "v", "x_q", "x_k", "x_v")  # the arrays of which a mask says what is attended
_BOOLS = np.dtype(np.bool_), np.dtype(np.uint8)

_Choice = TypeVar("_Choice")

_address = ctypes.addressof
_from_buffer = c_char.from_buffer
_UINT16 = np.dtype(np.uint16)
_FIRST = [(0,) * (ndim - 1) + (slice(1),) * (ndim > 0) for ndim in range(65)]  # an array of the first element alone


class Shape(NamedTuple):
    """A contiguous array that does not exist yet, for plans made from shapes."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        strides = [self.dtype.itemsize] * len(self.shape)
        for axis in range(len(self.shape) - 1, 0, -1):
            strides[axis - 1] = strides[axis] * max(self.shape[axis], 1)
        return tuple(strides)


def is_bf16(dtype: np.dtype) -> bool:
    """Of ours or ml_dtypes."""
    return CODES[dtype] == DTYPE_CODES.get("bf16", -1)


def float_type(x: Any, name: str) -> np.dtype:
    """A type that manyhead computes with: NumPy's, a torch.dtype, or a name."""
    known = x
    if type(x).__module__ == "torch":
        known = str(x).removeprefix("torch.")
    try:
        dtype = BF16 if isinstance(known, str) and known == "bfloat16" else np.dtype(known)
    except TypeError:
        dtype = None
    if dtype is None or CODES[dtype] is None:
        raise TypeError(f"{name} is {x!r}, must be float32, float64, float16 or bfloat16")
    return _known(dtype)


def _known(dtype: np.dtype) -> np.dtype:
    """bfloat16 of ml_dtypes instead of ours, where that is loaded: ours has no arithmetic, and astype() to it cuts off
    what is behind the point.
    """
    return np.dtype(sys.modules["ml_dtypes"].bfloat16) if dtype == BF16 and "ml_dtypes" in sys.modules else dtype


def type_name(dtype: np.dtype) -> str:
    return "bfloat16" if is_bf16(dtype) else dtype.name


def address(array: np.ndarray) -> int:
    """Where the first element lies. The buffer protocol is up to six times cheaper than __array_interface__."""
    flags = array.flags
    if flags.behaved:  # writable, which from_buffer insists on
        try:
            seen = array if flags.carray else array[_FIRST[array.ndim]]  # and on what is contiguous
            if array.dtype.kind == "V":  # bfloat16, whose own type may lack a buffer format: asking costs an exception
                seen = seen.view(_UINT16)
            return _address(_from_buffer(seen))  # type: ignore[arg-type]
        except (ValueError, TypeError, BufferError, IndexError):  # empty, or a type without a buffer format
            pass
    return array.__array_interface__["data"][0]


def floats(x: Any, name: str) -> np.ndarray:
    """An input of a type that manyhead computes with."""
    if type(x) is np.ndarray and CODES[x.dtype] is not None and x.flags.aligned:
        return x
    array = ready(view(x, name))
    if CODES[array.dtype] is None:
        raise TypeError(f"{name} has dtype {array.dtype}, must be float32, float64, float16 or bfloat16")
    return array


def writable(x: Any, name: str) -> np.ndarray:
    """An output that the caller gave: its memory itself, never a copy."""
    if type(x) is np.ndarray and CODES[x.dtype] is not None and x.flags.behaved:  # aligned and writable
        return x
    if is_jax(x):
        raise TypeError(f"{name} is a JAX array, which cannot be written to")
    array = view(x, name)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
    if CODES[array.dtype] is None:
        raise TypeError(f"{name} has dtype {array.dtype}, must be native float32, float64, float16 or bfloat16")
    if not array.flags.aligned:
        raise ValueError(f"{name} is not aligned to its type ({array.dtype})")
    return array


def is_jax(x: Any) -> bool:
    return type(x).__module__.split(".")[0] in ("jax", "jaxlib")


def is_in_place(x: Any, array: np.ndarray) -> bool:
    """Whether an array that was made of x lies in its memory."""
    if isinstance(x, (list, tuple, range)):
        return False
    seen = view(x, "")
    return seen.dtype.itemsize == array.dtype.itemsize and (array.size == 0 or address(seen) == address(array))


def view(x: Any, name: str) -> np.ndarray:
    """A plain ndarray on the memory of x."""
    if isinstance(x, np.ndarray):
        masked = sys.modules.get("numpy.ma")  # which np.ma would import
        if masked is not None and isinstance(x, masked.MaskedArray):
            hint = ", and the mask as attn_mask or key_mask" if name in _MASKABLE else ""
            raise TypeError(f"{name} is a masked array; pass its data{hint}")
        return np.asarray(x)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _view_torch(torch, x, name)
    if hasattr(x, "__dlpack__"):
        return _view_dlpack(x, name)
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    try:
        return np.asarray(memoryview(x))
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array (NumPy, DLPack or buffer protocol), not {type(x).__name__}") from None


def ready(array: np.ndarray) -> np.ndarray:
    """The array, or a copy of it if C could not read it as it is."""
    if array.flags.aligned and array.dtype.isnative:
        return array
    return np.array(array, dtype=array.dtype.newbyteorder("="))


def element_strides(array: Any) -> list[int]:
    size = array.dtype.itemsize
    return [stride // size for stride in array.strides]


def broadcast_strides(array: Any, shape: tuple[int, ...], name: str) -> list[int]:
    """Strides, in elements, with which the array has this shape by NumPy's rule; 0 where it is repeated."""
    lead = len(shape) - array.ndim
    wanted = shape[max(lead, 0) :]
    if lead < 0 or any(size not in (want, 1) for size, want in zip(array.shape, wanted, strict=True)):
        raise ValueError(f"{name} has shape {tuple(array.shape)}, which does not broadcast to {shape}")
    strides = zip(array.shape, wanted, element_strides(array), strict=True)
    return [0] * lead + [stride if size == want else 0 for size, want, stride in strides]


def _listed(x: Any, name: str) -> np.ndarray:
    """Small vectors may also come as plain Python sequences."""
    if not isinstance(x, (list, tuple, range)):
        return view(x, name)
    try:
        return np.asarray(x)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: {error}") from None


def mask(x: Any, name: str) -> np.ndarray:
    """A boolean input: one byte an element."""
    array = _listed(x, name)
    if array.dtype not in _BOOLS:
        raise TypeError(f"{name} has dtype {array.dtype}, must be bool or uint8")
    return array


def any_mask(x: Any, name: str) -> np.ndarray:
    """A boolean input, or floats to add."""
    array = _listed(x, name)
    if array.dtype in _BOOLS:
        return array
    if array.dtype.kind in "iuO":
        raise TypeError(f"{name} has dtype {array.dtype}, must be bool or uint8 (true = attend) or a float type")
    return floats(array, name)


def index_vector(x: Any, name: str) -> np.ndarray:
    """Integers as C reads them: contiguous int32 or int64."""
    array = _listed(x, name)
    if array.dtype.kind == "O" or (array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63):
        raise ValueError(f"{name} holds something that does not fit a 64-bit integer")
    if array.size == 0 and isinstance(x, (list, tuple)):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, must be integers")
    dtype = np.int32 if array.dtype == np.int32 else np.int64
    return np.ascontiguousarray(array, dtype=dtype)


def real_vector(x: Any, name: str, real: np.dtype) -> np.ndarray:
    """Real numbers as C reads them: contiguous, f64 beside f64 tensors and f32 otherwise."""
    return np.ascontiguousarray(reals(x, name, real))


def reals(x: Any, name: str, real: np.dtype) -> np.ndarray:
    """Real numbers, converted to this type."""
    array = ready(_listed(x, name))
    if array.dtype.kind not in "iuf" and CODES[array.dtype] is None:
        raise TypeError(f"{name} has dtype {array.dtype}, must be real numbers")
    return to_real(array, real)


def to_real(array: np.ndarray, real: np.dtype) -> np.ndarray:
    """A float array in a type of NumPy's own; bfloat16 is the upper half of an f32."""
    if is_bf16(array.dtype):
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(real, copy=False)


def to_type(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A float array in any type that manyhead computes with, rounded to nearest even (float64 by way of float32)."""
    if CODES[array.dtype] == CODES[dtype]:
        return array
    if not is_bf16(dtype):
        return to_real(array, dtype)
    wide = to_real(array, np.dtype(np.float32))
    bits = wide.view(np.uint32)
    upper = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(wide), bits >> 16 | 0x40, upper).astype(np.uint16).view(dtype)


def integer(x: Any, name: str) -> int:
    """A Python int that fits C's int64."""
    if type(x) is not int and not isinstance(x, Integral):
        raise TypeError(f"{name} must be an integer, not {type(x).__name__}")
    value = int(x)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {value}, must fit a 64-bit integer")
    return value


def number(x: Any, name: str) -> float:
    """A Python float, from a real number or an array of one that has no dimension."""
    if not isinstance(x, Real) and getattr(x, "ndim", None) == 0:
        array = view(x, name)
        if array.dtype.kind in "iuf" or CODES[array.dtype] is not None:
            x = to_real(array, np.dtype(np.float64)).item()
    if not isinstance(x, Real):
        raise TypeError(f"{name} must be a real number, not {type(x).__name__}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None


def boolean(x: Any, name: str) -> bool:
    if isinstance(x, (bool, np.bool_)) or (isinstance(x, int) and x in (0, 1)):
        return bool(x)
    raise TypeError(f"{name} must be True or False, not {x!r}")


def choice(x: Any, name: str, choices: dict[Any, _Choice]) -> _Choice:
    try:
        return choices[x]
    except (KeyError, TypeError):
        wanted = ", ".join(repr(key) for key in choices)
        raise ValueError(f"{name} is {x!r}, must be one of {wanted}") from None


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array at an address divisible by 64."""
    memory = np.empty(prod(shape) * dtype.itemsize + 64, np.uint8)
    return np.ndarray(shape, dtype, memory, -address(memory) % 64)


def new(shape: tuple[int, ...], dtype: np.dtype, like: Any) -> np.ndarray:
    """Memory for a result. Other array libraries take it over without a copy when it is aligned to a cache line."""
    return np.empty(shape, dtype) if type(like) is np.ndarray else aligned_empty(shape, dtype)


def wrap(array: np.ndarray, like: Any) -> Any:
    """A result as the kind of array that `like` is, on the same memory wherever that library allows it."""
    if isinstance(like, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        if is_bf16(array.dtype):
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    array = array.view(_known(array.dtype))
    if not hasattr(like, "__array_namespace__"):
        return array
    library = like.__array_namespace__()
    try:
        return library.from_dlpack(array)
    except (BufferError, TypeError):  # NumPy exports no bfloat16
        return library.asarray(array)


def _view_torch(torch: Any, x: Any, name: str) -> np.ndarray:
    if not x.is_cpu:
        if str(x.device) == "meta":
            raise TypeError(f"{name} is on device meta, where tensors have no data")
        raise TypeError(f"{name} is on device {x.device}; manyhead computes on the CPU: pass {name}.cpu()")
    if x.requires_grad:
        if torch.is_grad_enabled():
            raise TypeError(f"{name} requires a gradient, which manyhead does not compute: pass {name}.detach()")
        x = x.detach()
    try:
        array = x.view(torch.int16).numpy().view(BF16) if x.dtype is torch.bfloat16 else x.numpy()
    except (RuntimeError, TypeError) as error:  # sparse, conjugated, a type that NumPy lacks
        raise TypeError(f"{name}: {error}") from None
    if array.size:  # a storage may have been made smaller, or freed, since
        last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
        needed = x.storage_offset() * array.itemsize + last + array.itemsize
        if x.untyped_storage().nbytes() < needed:
            raise ValueError(f"{name} has a storage of {x.untyped_storage().nbytes()} bytes, its shape needs {needed}")
    return array


def detached(x: Any) -> Any:
    """Without the wish for a gradient that a parameter of PyTorch has."""
    torch = sys.modules.get("torch")
    return x.detach() if torch is not None and isinstance(x, torch.Tensor) else x


# ---- DLPack, read directly: NumPy's own reader has no bfloat16 and marks some writable memory read-only. ----


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _DLVersioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY = 1  # bit of _DLVersioned.flags
_HOST_DEVICES = (1, 3)  # kDLCPU; kDLCUDAHost, pinned host memory
_DTYPES = {(4, 16): BF16, (6, 8): np.dtype(np.bool_)}  # (code, bits)
_DTYPES |= {(0, bits): np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
_DTYPES |= {(1, bits): np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
_DTYPES |= {(2, bits): np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)}

_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


class _Memory:
    """What NumPy needs to see foreign memory. The capsule stays ours, unused: its destructor gives the memory back."""

    def __init__(self, interface: dict[str, Any], capsule: Any) -> None:
        self.__array_interface__ = interface
        self.capsule = capsule


def _check_jax(x: Any, name: str) -> None:
    """That there is something in it."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced (jax.jit, grad, vmap, ...) and has no data yet: use jax.pure_callback")
    if x.is_deleted():
        raise ValueError(f"{name} was deleted, or its buffer donated: it has no data")


def _view_dlpack(x: Any, name: str) -> np.ndarray:
    if is_jax(x):
        _check_jax(x, name)
    try:
        device = tuple(map(int, x.__dlpack_device__()))
        if device[0] not in _HOST_DEVICES:
            raise TypeError(f"{name} is on another device (DLPack device {device}); manyhead computes on the CPU")
        try:
            capsule = x.__dlpack__(max_version=(1, 0))
        except TypeError:  # a producer from before versions existed
            capsule = x.__dlpack__()
    except (BufferError, RuntimeError, AttributeError) as error:
        raise TypeError(f"{name}: {error}") from None

    read_only = False
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _DLVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise TypeError(f"{name} speaks DLPack {versioned.major}, manyhead speaks DLPack 1")
        read_only = bool(versioned.flags & _READ_ONLY)
        tensor = versioned.tensor
    elif _capsule_is(capsule, b"dltensor"):
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise TypeError(f"{name}: __dlpack__ did not return an unused DLPack capsule")

    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise TypeError(f"{name} has a DLPack type that manyhead does not read: code {tensor.code}, {tensor.bits} bits")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if 0 in shape:  # such tensors may have a null pointer
        return np.empty(shape, dtype)
    interface = {
        "version": 3,
        "typestr": "<u2" if dtype == BF16 else dtype.str,
        "data": ((tensor.data or 0) + tensor.byte_offset, read_only),
        "shape": shape,
        "strides": tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None,
    }
    array = np.asarray(_Memory(interface, capsule))
    return array.view(BF16) if dtype == BF16 else array
