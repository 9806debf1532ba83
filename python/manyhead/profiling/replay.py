"""Logs of calls, as MH_VERBOSE=1 writes them, and their problems run again.

A line is a problem and, behind #, what became of it:

    manyhead: f32 b1 h8 q128 kv128 d64  # 123.40 us, 2 threads, tile@avx512
    manyhead: # layer f32 b8 q128 kv128 embed_dim 768 heads 12: 1234.00 us, at most 2 threads
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from .._user import UserError
from .cases import ITEM_SIZE, make_rows, read_problem, shape_cases
from .instruments import Instruments
from .limits import Limits, Steadiness
from .sweep import Effort, Measured, Sweep, Watch

EFFORT = Effort(seconds=0.3, passes=3, least=2, longest=60.0, looks=5)
PREFIX = "manyhead: "
# At the beginning of a line, or behind what another thread of the program had begun to print.
LOGGED = re.compile(rf"^{PREFIX}|{PREFIX}(?=#|(?:{'|'.join(ITEM_SIZE)}) )")
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
TIME = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?) ?(ns|us|ms|s)\b")
THREADS = re.compile(r"(\d+) threads?\b")
LOST = re.compile(r"(?<!\S)(?:strided|extra=\d+)(?!\S)")  # what is read, and left out where the library writes the line
WAY = re.compile(r"\b(\w+)@(\w+)")


@dataclass
class Calls:
    """The calls of a log that had one problem and as many threads."""

    problem: str
    threads: int | None  # as logged
    count: int = 0
    seconds: list[float] = field(default_factory=list)  # of those that were logged with a time
    isas: set[str] = field(default_factory=set)

    @property
    def total(self) -> float:
        return sum(self.seconds)


@dataclass
class Log:
    calls: list[Calls]  # most time first
    others: Mapping[str, int]  # lines that cannot be replayed: layers, merges
    files: list[str]

    left_out: Sequence[Calls] = ()

    def top(self, number: int) -> Log:
        return replace(self, calls=self.calls[:number], left_out=self.calls[number:])


def read_log(texts: Iterable[tuple[str, str]], tools: Instruments) -> Log:
    """Of the names and contents of files."""
    found: dict[tuple[str, int | None], Calls] = {}
    others: Counter[str] = Counter()
    problems: dict[str, str] = {}  # as they are written -> as the library writes them
    names = []
    for name, text in texts:
        names.append(name)
        for number, line in _lines(text):
            problem, _, comment = (part.strip() for part in line.partition("#"))
            if not problem:
                others[comment.split()[0] if comment else ""] += 1
                continue
            if problem not in problems:
                read_problem(problem, tools, f"{name}:{number}: ")
                problems[problem] = " ".join([tools.Planned(problem).line, *LOST.findall(problem)])
            threads = THREADS.search(comment)
            key = problems[problem], int(threads[1]) if threads else None
            calls = found.setdefault(key, Calls(*key))
            calls.count += 1
            if time := TIME.search(comment):
                calls.seconds.append(float(time[1]) * UNITS[time[2]])
            if way := WAY.search(comment):
                calls.isas.add(way[2])
    if not found:
        layers = f", only {sum(others.values())} lines of layers and merges" if others else ""
        raise UserError(f"{', '.join(names)}: there is no problem line in it{layers}: make one with MH_VERBOSE=1")
    return Log(sorted(found.values(), key=lambda calls: (-calls.total, -calls.count)), others, names)


def _lines(text: str) -> Iterable[tuple[int, str]]:
    """Lines of the library among other output; or all of them, where a file has none of these."""
    lines = list(enumerate(text.splitlines(), 1))
    logged = [(number, line[match.end() :]) for number, line in lines if (match := LOGGED.search(line))]
    if logged:  # what the library says of MH_PROFILE begins in the same way
        return [(number, line) for number, line in logged if not line.startswith("MH_")]
    return [(number, line) for number, line in lines if line.strip() and not line.lstrip().startswith("#")]


class Replay:
    """Runs the problems of a log. What is done can be read at any time, also after an interrupt."""

    def __init__(
        self,
        log: Log,
        tools: Instruments,
        machine: Mapping[str, Any],
        *,
        isa: str,
        threads: int | None,
        effort: Effort,
        available: int,
    ) -> None:
        """`threads`: None = as many as were logged, where there are so many here."""
        self.log = log
        rows = []
        for calls in log.calls:
            number = threads or min(calls.threads or machine["threads"], machine["cpus"])
            rows += make_rows(shape_cases([calls.problem]), ["f32"], [isa], [number], tools)
        self.limits = Limits(tools, machine, available, effort.looks)
        self.steadiness = Steadiness(tools, isa, max(row.threads for row in rows))
        self.sweep = Sweep(rows, tools, self.limits, self.steadiness, effort, available=available, phases=False)

    def run(self, watch: Watch) -> None:
        self.sweep.run(watch)

    def document(self) -> dict[str, Any]:
        total = sum(calls.total for calls in [*self.log.calls, *self.log.left_out])
        rows = [
            self._row(calls, measured, total) for calls, measured in zip(self.log.calls, self.sweep.rows, strict=True)
        ]
        if not total:
            rows.sort(key=lambda row: -row["calls"] * (row["now"]["median"] if row["now"] else 0.0))
        both = [row for row in rows if row["now"] and row["logged"]]
        return {
            "files": self.log.files,
            "calls": sum(calls.count for calls in [*self.log.calls, *self.log.left_out]),
            "logged": total or None,
            # Of the rows that have both times.
            "compared": sum(row["logged"]["total"] for row in both) if both else None,
            "replayed": sum(row["now"]["median"] * row["logged"]["times"] for row in both) if both else None,
            "others": dict(self.log.others),
            "rows": rows,
            "limits": self.steadiness.document() if self.steadiness.clocks else None,
        }

    def _row(self, calls: Calls, measured: Measured, total: float) -> dict[str, Any]:
        now = measured.document(self.limits) if measured.samples else None
        times = now["seconds"] if now else None
        logged = None
        if calls.seconds:
            logged = {
                "best": min(calls.seconds),
                "median": median(calls.seconds),
                "total": calls.total,
                "times": len(calls.seconds),
            }
        return {
            "problem": calls.problem,
            "calls": calls.count,
            "threads": measured.row.threads,
            "logged_threads": calls.threads,
            "isa": measured.row.isa,
            "logged_isas": sorted(calls.isas),
            "logged": logged,
            "now": times and {key: times[key] for key in ("best", "median", "runs")},
            "ratio": logged["median"] / times["median"] if logged and times else None,
            "share": calls.total / total if total else None,
            "notes": _notes(calls, measured),
        }


def _notes(calls: Calls, measured: Measured) -> list[str]:
    words = {word.partition("=")[0] for word in calls.problem.split()}
    said = []
    if "strided" in words:
        said.append("the log does not say how its tensors lay in memory: replayed without gaps")
    if words & {"mask", "bias"}:
        said.append("masks and biases are replayed in full size, although they may have been broadcast")
    if words & {"lens", "offsets"}:
        said.append("lengths and offsets are not in a log: replayed with all keys")
    if words & {"extra"}:
        said.append("learned keys besides those of the sequence are replayed as keys like the others")
    if calls.threads is not None and measured.row.threads < calls.threads:
        said.append(f"logged with {calls.threads} threads")
    if measured.why_not:
        said.append(f"not replayed: {measured.why_not}")
    return said


def isas_differ(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say where the log is from another instruction set."""
    logged = sorted({isa for row in rows for isa in row["logged_isas"]})
    used = rows[0]["isa"]
    if not logged or logged == [used]:
        return None
    return f"Logged on {', '.join(logged)}, replayed on {used}: --isa takes another one."
