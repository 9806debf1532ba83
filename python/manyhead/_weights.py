"""Where the weights of a multi-head layer are found: names in a state_dict, and safetensors files."""

from __future__ import annotations

import json
import math
import mmap
import operator
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._arrays import BF16

_PARTS = ("q", "k", "v", "o")

# Families of names: the four projections, each with its ".weight" and ".bias". torch.nn.MultiheadAttention, which has
# one matrix for q, k and v, or three without a module of their own, is handled apart.
_MODULES = (
    ("self.query", "self.key", "self.value", "output.dense"),  # BERT, at "...attention."
    ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),  # one level up
    ("query", "key", "value", "out"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("W_q", "W_k", "W_v", "W_o"),
    ("w_q", "w_k", "w_v", "w_o"),
)


def find(mapping: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The arguments of MultiHeadAttention (w_q, b_q, ..., or in_proj, ...) from a mapping with known names."""

    def get(name: str) -> Any:
        return mapping.get(prefix + name)

    found: dict[str, Any] = {}
    if get("in_proj_weight") is not None or get("q_proj_weight") is not None:
        found["in_proj"] = get("in_proj_weight")
        if found["in_proj"] is None:
            found.update({f"w_{part}": get(f"{part}_proj_weight") for part in "qkv"})
        found["in_proj_bias"] = get("in_proj_bias")
        found["w_o"], found["b_o"] = get("out_proj.weight"), get("out_proj.bias")
        found["bias_k"], found["bias_v"] = get("bias_k"), get("bias_v")
    else:
        for modules in _MODULES:
            weights = [_first(get(f"{module}.weight"), get(module)) for module in modules]
            if all(weight is not None for weight in weights):
                found.update({f"w_{part}": weight for part, weight in zip(_PARTS, weights, strict=True)})
                for part, module in zip(_PARTS, modules, strict=True):
                    found[f"b_{part}"] = _first(get(f"{module}.bias"), get(f"b_{part}"))
                break
    found = {name: value for name, value in found.items() if value is not None}
    needed = {"in_proj", "w_o"} if "in_proj" in found else {f"w_{part}" for part in _PARTS}
    if not needed <= found.keys():
        near = sorted(name for name in mapping if name.startswith(prefix))[:20]
        raise ValueError(
            f"no attention weights under the prefix {prefix!r}: looked for in_proj_weight + out_proj.weight, "
            f"q_proj_weight, ... and {'; '.join(', '.join(modules) for modules in _MODULES)} (each with .weight). "
            f"Names under the prefix: {near or 'none'}"
        )
    return found


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class SafeTensors(Mapping[str, np.ndarray]):
    """A safetensors file as a mapping from names to read-only arrays on the mapped file; nothing is read before use.

    The format: 8 bytes, the length of the header; the header, JSON with type, shape and place of each tensor; the data.
    """

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise ValueError(f"{path} is not a safetensors file: it has {size} bytes")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (length,) = struct.unpack("<Q", self._data[:8])
        if length > size - 8:
            raise ValueError(f"{path} is not a safetensors file, or is cut short: a header of {length} bytes")
        try:
            header = json.loads(self._data[8 : 8 + length])
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object")
        header.pop("__metadata__", None)
        self._path, self._header, self._start = path, header, 8 + length

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._header[name]
        try:
            kind, shape = str(entry["dtype"]), tuple(map(operator.index, entry["shape"]))
            begin, end = map(operator.index, entry["data_offsets"])
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{name} in {self._path}: its entry in the header is not that of a tensor") from None
        dtype = _TYPES.get(kind)
        if dtype is None:
            raise TypeError(f"{name} in {self._path} has type {kind}, must be one of {', '.join(_TYPES)}")
        count = math.prod(shape)
        inside = 0 <= begin <= end <= len(self._data) - self._start
        if not inside or min(shape, default=1) < 0 or end - begin != count * dtype.itemsize:
            raise ValueError(f"{name} in {self._path}: its place in the file does not fit its shape")
        array = np.frombuffer(self._data, dtype, count, self._start + begin).reshape(shape)
        return array.view(BF16) if kind == "BF16" else array

    def __iter__(self) -> Any:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)
