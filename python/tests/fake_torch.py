"""As much of PyTorch as manyhead asks for, on NumPy arrays: for tests where PyTorch is not installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class DType:  # equal to no type of NumPy's
    def __init__(self, name: str) -> None:
        self.name = name
        self.memory = np.dtype("int16" if name == "bfloat16" else name)


TYPES = {
    name: DType(name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "bool")
}


class Tensor:
    is_cpu, device = True, "cpu"

    def __init__(self, array: np.ndarray, dtype: str = "", **facts: Any) -> None:
        self.array, self.dtype = array, TYPES[dtype or array.dtype.name]
        self.requires_grad = facts.pop("requires_grad", False)
        self.negative = facts.pop("negative", False)
        self.bytes_left = facts.pop("bytes_left", 2**40)
        self.seen_by_numpy = 0
        for name, value in facts.items():
            setattr(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def data_ptr(self) -> int:
        return self.array.__array_interface__["data"][0] if self.array.size else 0

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: self.bytes_left)

    def detach(self) -> Tensor:
        return Tensor(self.array, self.dtype.name)

    def is_neg(self) -> bool:
        return self.negative

    def view(self, dtype: DType) -> Tensor:
        self.seen_by_numpy += 1
        return Tensor(self.array.view(dtype.memory), dtype.name)

    def numpy(self) -> np.ndarray:
        self.seen_by_numpy += 1
        if self.negative:
            raise RuntimeError("negative bit set")
        return self.array


def empty(shape: tuple[int, ...], *, dtype: DType, device: str) -> Tensor:
    assert device == "cpu"
    return Tensor(np.empty(shape, dtype.memory), dtype.name)


def empty_like(x: Tensor, *, memory_format: str) -> Tensor:
    assert memory_format == "contiguous"
    return Tensor(np.empty(x.shape, x.dtype.memory), x.dtype.name)


def module(openmp: bool = False) -> Any:
    return SimpleNamespace(
        Tensor=Tensor,
        from_numpy=Tensor,
        empty=empty,
        empty_like=empty_like,
        contiguous_format="contiguous",
        device=str,
        is_grad_enabled=lambda: True,
        backends=SimpleNamespace(openmp=SimpleNamespace(is_available=lambda: openmp)),
        **TYPES,
    )
