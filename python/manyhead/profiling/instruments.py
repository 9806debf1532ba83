"""What measures. manyhead._measure is the one that is used; tests put one of theirs in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Planned(Protocol):
    plan: dict[str, Any]
    problem: Any
    line: str
    flops: float
    bytes: float
    threads: int
    route: str
    isa: str
    dtype: str


class Workload(Planned, Protocol):
    arrays: Mapping[str, np.ndarray]

    def run(self) -> None: ...

    def measure(self, seconds: float, most: int = 1000) -> np.ndarray: ...

    def phases(self) -> dict[str, Any]: ...


class Instruments(Protocol):
    """manyhead._measure, which says what each of these does."""

    def parse_problem(self, line: str) -> Any: ...

    def check_problem(self, problem: Any) -> None: ...

    def Planned(self, line: str, *, isa: str | None = None, threads: int = 0) -> Any: ...

    def Workload(self, line: str, *, isa: str | None = None, threads: int = 0, seed: int = 0) -> Any: ...

    def arithmetic_rate(self, isa: str, dtype: str, threads: int, seconds: float) -> float: ...

    def read_rate(self, size: int, threads: int, seconds: float) -> float: ...

    def clock_rate(self, seconds: float) -> float: ...

    def waited(self) -> float: ...
