"""The rows, measured in turn: each one several times over the run, so that a bad moment does not hit one row only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._library import Error
from .cases import Row
from .instruments import Instruments, Workload
from .limits import Limits, Steadiness

SAMPLES = 50  # of a row's times, kept for tests of significance
MOST = 20_000  # runs of a row in a pass
TOGETHER = 1 << 30  # bytes of tensors that are kept between the passes
GUESS = 0.3  # of the limits: what is expected of a row that has not run yet
FILL_RATE = 5e8  # bytes of tensors filled in a second, about
BESIDES = 6  # runs of a row that are not timed: warm-up, phases
LOOKING = 0.03  # seconds spent on the limits and on the machine beside a row


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    seconds: float  # for each row, over all passes
    passes: int
    least: int  # runs of a row in a pass
    longest: float  # seconds a run may take; rows that are expected to take longer are left out
    looks: int  # at each limit, before the rows
    total: float = math.inf  # seconds after which rows get no further pass, and no first one


FULL = Effort(seconds=0.6, passes=3, least=2, longest=60.0, looks=20)
QUICK = Effort(seconds=0.3, passes=2, least=1, longest=0.5, looks=8, total=20.0)
QUICK_TOTAL = 10.0  # seconds for all rows of a quick run, without what it takes to fill their tensors


@dataclass
class Watch:
    """Who is told how far the run is."""

    plan: Callable[[float], None] = lambda seconds: None  # the seconds that it may take
    now: Callable[[str], None] = lambda what: None
    done: Callable[[float], None] = lambda seconds: None  # of those of plan


@dataclass
class Measured:
    """A row with what has been found out about it so far."""

    row: Row
    expected: float = 0.0  # seconds that it takes, about
    why_not: str | None = None
    workload: Workload | None = None  # while its tensors are needed
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[np.ndarray] = field(default_factory=list)
    phases: dict[str, Any] | None = None

    def document(self, limits: Limits) -> dict[str, Any]:
        row, facts = self.row, self.facts
        seconds = np.concatenate(self.samples)
        best = float(seconds.min())
        kept = np.linspace(0, len(seconds) - 1, min(SAMPLES, len(seconds))).round().astype(int)
        fewer = facts["threads"] < row.threads
        return {
            "series": row.case.series,
            "name": row.case.name,
            "what": row.case.what,
            "x": row.x,
            "problem": facts["line"],
            "dtype": row.dtype,
            "isa": row.isa,
            "route": facts["route"],
            "threads": row.threads,
            "seconds": {
                "best": best,
                "median": float(np.median(seconds)),
                "p90": float(np.quantile(seconds, 0.9)),
                "runs": len(seconds),
                "samples": seconds[kept].tolist(),
            },
            "flops": facts["flops"],
            "bytes": facts["bytes"],
            "flops_rate": facts["flops"] / best,
            "bytes_rate": facts["bytes"] / best,
            **limits.of(facts["flops"], facts["bytes"], facts["kept"], row.isa, row.dtype, row.threads, best),
            "phases": self.phases["phases"] if self.phases else None,
            "counters": self.phases["counters"] if self.phases else None,
            "counters_note": self.phases["counters_note"] if self.phases else None,
            "note": f"too small for more than {facts['threads']} of the {row.threads} threads" if fewer else None,
        }

    def skipped(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": row.case.name,
            "problem": row.line,
            "dtype": row.dtype,
            "isa": row.isa,
            "threads": row.threads,
            "why": self.why_not,
        }


def too_large(row: Row, available: int) -> str | None:
    if row.size <= available // 2:
        return None
    return f"its tensors take {row.size / 2**30:.1f} GiB, more than half of the memory that is free"


class Sweep:
    """Measures rows. What is done can be read at any time, also after an interrupt in the middle of `run`."""

    def __init__(
        self,
        rows: Sequence[Row],
        tools: Instruments,
        limits: Limits,
        steadiness: Steadiness,
        effort: Effort,
        *,
        available: int,
        phases: bool,
    ) -> None:
        self.rows = [Measured(row) for row in rows]
        self.tools = tools
        self.limits = limits
        self.steadiness = steadiness
        self.effort = effort
        self.available = available  # bytes of memory
        self.phases = phases

    def run(self, watch: Watch) -> None:
        passes = self.effort.passes
        end = time.monotonic() + self.effort.total
        for measured in self.rows:
            measured.expected = self.expected(measured.row)
        watch.plan(sum(measured.expected for measured in self.rows))
        for group in self._groups():
            for turn in range(passes):
                for measured in group:
                    in_time = time.monotonic() <= end
                    if in_time and not measured.why_not:
                        watch.now(str(measured.row))
                        self._measure(measured, turn)
                    elif not measured.samples:
                        measured.why_not = measured.why_not or "there was no time left"
                    watch.done(measured.expected / passes)
            for measured in group:
                measured.workload = None

    def expected(self, row: Row) -> float:
        """Seconds that a row takes, about."""
        if self._why_not(row):
            return 0.0
        effort, once = self.effort, self._once(row)
        runs = max(effort.seconds, effort.passes * effort.least * once) + BESIDES * once
        return runs + effort.passes * LOOKING + row.size / FILL_RATE

    def document(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows that were measured, and those that were left out."""
        done = [measured.document(self.limits) for measured in self.rows if measured.samples]
        return done, [measured.skipped() for measured in self.rows if measured.why_not]

    def _measure(self, measured: Measured, turn: int) -> None:
        if turn == 0:
            self._start(measured)
        workload = measured.workload
        if workload is None:
            return
        effort = self.effort
        seconds = workload.measure(effort.seconds / effort.passes, MOST)
        while len(seconds) < effort.least:
            seconds = np.append(seconds, workload.measure(0.0))
        measured.samples.append(seconds)
        row = measured.row
        self.limits.look(row.isa, row.dtype, row.threads, measured.facts["kept"])
        self.steadiness.look()
        if self.phases and turn == effort.passes - 1:
            measured.phases = workload.phases()

    def _start(self, measured: Measured) -> None:
        row = measured.row
        measured.why_not = self._why_not(row)
        if measured.why_not:
            return
        try:
            workload = self.tools.Workload(row.line, isa=row.isa, threads=row.threads)
            workload.run()  # brings code and data close
        except (Error, ValueError, MemoryError) as error:
            measured.why_not = str(error) or "not enough memory"
            return
        measured.workload = workload
        measured.facts = {
            "line": workload.line,
            "route": workload.route,
            "threads": workload.threads,
            "flops": workload.flops,
            "bytes": workload.bytes,
            "kept": workload.arrays["k"].nbytes + workload.arrays["v"].nbytes,
        }

    def _why_not(self, row: Row) -> str | None:
        if why_not := too_large(row, self.available):
            return why_not
        if self._once(row) > self.effort.longest:
            return f"one run is expected to take more than {self.effort.longest:g} s"
        return None

    def _once(self, row: Row) -> float:
        """Seconds that a run takes, about."""
        return row.flops / (GUESS * self.limits.arithmetic(row.isa, row.dtype, row.threads))

    def _groups(self) -> Iterator[list[Measured]]:
        """Neighbours whose tensors fit in memory together."""
        group: list[Measured] = []
        size = 0
        for measured in self.rows:
            if group and size + measured.row.size > min(TOGETHER, self.available // 2):
                yield group
                group, size = [], 0
            group.append(measured)
            size += measured.row.size
        if group:
            yield group
