"""Where the weights of a multi-head layer are found: names in a state_dict, and safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

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


_TYPES = ("F64", "F32", "F16", "BF16")


class SafeTensors(Mapping[str, np.ndarray]):
    """A safetensors file as a mapping from names to arrays; none is read before use."""

    def __init__(self, path: str | Path) -> None:
        package = _need("safetensors")
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a safetensors file")
        try:
            self._file = package.safe_open(path, "numpy")
        except package.SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        except OSError as error:
            raise error if str(path) in str(error) else type(error)(f"{path} cannot be read: {error}") from None
        self._path, self._names = path, self._file.keys()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        kind = self._file.get_slice(name).get_dtype()
        if kind not in _TYPES:
            raise TypeError(f"{name} in {self._path} has type {kind}, must be one of {', '.join(_TYPES)}")
        if kind == "BF16":
            _need("ml_dtypes")  # through which NumPy knows the type
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _need(package: str) -> ModuleType:
    """Imports a package of the extra `safetensors`, or says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"reading this file needs the Python package {package}: pip install {package}, or 'manyhead[safetensors]'",
            name=package,
        ) from error
