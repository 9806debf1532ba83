"""Reads the stored cases; tests/cases/README.md describes the format."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_FOLDERS = [Path(__file__).parent.parent / "cases"]
if os.environ.get("MANYHEAD_CASES"):
    _FOLDERS.append(Path(os.environ["MANYHEAD_CASES"]))

_TYPES = {"bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Call:
    function: str
    arguments: tuple[np.ndarray, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Check:
    name: str
    expected: np.ndarray
    atol: float
    rtol: float


@dataclass(frozen=True)
class Case:
    id: str
    calls: tuple[Call, ...]
    checks: tuple[Check, ...]


def files() -> list[Path]:
    """Each case once, from the first folder that has it."""
    found: dict[str, Path] = {}
    for folder in _FOLDERS:
        for path in sorted(folder.glob("*.npz")):
            found.setdefault(path.name, path)
    return list(found.values())


def read(path: Path) -> Case:
    with np.load(path, allow_pickle=False) as stored:
        meta = json.loads(str(stored["meta"]))
        arrays = {name: stored[name] for name in stored.files if name != "meta"}
    for name, type_name in meta["dtypes"].items():
        arrays[name] = arrays[name].view(_TYPES[type_name])
    for name, same in meta["same_as"].items():
        arrays[name] = arrays[same]

    calls = []
    for index, call in enumerate(meta["calls"]):
        prefix = f"call{index}."
        mine = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        arguments = tuple(mine.pop(f"arg{i}") for i in range(sum(name.startswith("arg") for name in mine)))
        calls.append(Call(call["function"], arguments, {**call["options"], **mine}))
    checks = tuple(
        Check(check["name"], arrays[f"expected{check['expected']}"], check["atol"], check["rtol"])
        for check in meta["checks"]
    )
    return Case(meta["id"], tuple(calls), checks)
