"""What the machine can do at best: multiply-adds and reads. And how steady it is while a profile runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from .instruments import Instruments

LEAST_MEMORY = 256 << 20
EASY = 64 << 20  # bytes that are quickly filled, so that reading them can be looked at often
LOOK = 2e-3  # seconds of a look at a limit
# A buffer of some size is read for so many passes at PASSING bytes/s, because what was just filled comes to lie in L3
# only gradually (134 MB on two threads of the core of docs/performance.md: 32 GB/s in 2 ms, 54 GB/s in 100 ms).
PASSES = 8
PASSING = 2e10
OVERHEAD_SECONDS = 50e-6  # a call that takes less may be mostly the cost of a call ...
OVERHEAD_SHARE = 0.2  # ... and is, where neither limit explains more of its time than this


class Level(NamedTuple):
    """A level of the memory."""

    name: str
    size: int  # bytes in all
    private: bool  # one for each core
    probe: int  # bytes that are read to measure it, for each thread where it is private

    def bytes(self, threads: int) -> int:
        """How much so many threads read to measure it."""
        return self.probe * (threads if self.private else 1)

    def holds(self, size: int, threads: int) -> bool:
        return size <= self.size * (threads if self.private else 1)


def levels(machine: Mapping[str, Any], available: int) -> list[Level]:
    """Those this machine has, fastest first. `available` is the memory that may be used."""
    l1, l2, l3 = (machine.get(f"l{i}_bytes") or 0 for i in (1, 2, 3))
    found = []
    if l1:
        found.append(Level("L1", l1, True, l1 // 2))
    if l2:
        found.append(Level("L2", l2, True, l2 // 2))
    if l3:  # beyond L2, and well within what neighbours on a shared CPU leave of L3
        private = l2 * int(machine.get("cpus") or 1)
        found.append(Level("L3", l3, False, min(max(2 * private, l3 // 16), l3 // 2)))
    probe = min(max(2 * max(l2, l3), LEAST_MEMORY), max(available // 4, 1))
    found.append(Level("memory", 1 << 62, False, probe))
    return found


def reading_rate(tools: Instruments, size: int, threads: int) -> float:
    """Of reading so many bytes again and again."""
    return tools.read_rate(size, threads, max(LOOK, PASSES * size / PASSING))


class Limits:
    """Rates, looked at for a moment again and again while a profile runs: the highest counts, because what else runs on
    a machine can only lower them."""

    def __init__(self, tools: Instruments, machine: Mapping[str, Any], available: int, looks: int) -> None:
        self.tools = tools
        self.looks = looks  # before a rate is known
        self.levels = levels(machine, available)
        self._arithmetic: dict[tuple[str, str, int], float] = {}
        self._read: dict[tuple[str, int], tuple[int, float]] = {}  # bytes read, rate
        self._of_size: dict[tuple[int, int], float] = {}  # rates of reading as much as a row keeps

    def arithmetic(self, isa: str, dtype: str, threads: int) -> float:
        key = isa, dtype, threads
        if key not in self._arithmetic:
            for _ in range(self.looks):
                self.look_at_arithmetic(*key)
        return self._arithmetic[key]

    def read(self, level: Level, threads: int) -> float:
        key = level.name, threads
        if key not in self._read:
            for _ in range(self.looks if level.bytes(threads) <= EASY else 1):
                self._look_at_reading(level, threads)
        return self._read[key][1]

    def look(self, isa: str, dtype: str, threads: int, kept: int) -> None:
        """At the limits of a row, while the machine is as it is for that row."""
        self.look_at_arithmetic(isa, dtype, threads)
        if kept and kept <= EASY:
            self.look_at_size(kept, threads)

    def survey(self, isas: Iterable[str], dtypes: Iterable[str], threads: Iterable[int]) -> None:
        """Looks at all of them, in turn."""
        units = list(product(isas, dtypes, sorted(set(threads))))
        memory = list(product(self.levels, sorted(set(threads))))
        for turn in range(self.looks):
            for level, number in memory:
                if turn == 0 or level.bytes(number) <= EASY:
                    self._look_at_reading(level, number)
            for unit in units:
                self.look_at_arithmetic(*unit)

    def look_at_arithmetic(self, isa: str, dtype: str, threads: int) -> float:
        key = isa, dtype, threads
        rate = self.tools.arithmetic_rate(isa, dtype, threads, LOOK)
        self._arithmetic[key] = max(rate, self._arithmetic.get(key, 0.0))
        return rate

    def look_at_size(self, size: int, threads: int) -> None:
        """At reading just so much: between two levels, one part of it lies in each."""
        rate = reading_rate(self.tools, size, threads)
        self._of_size[size, threads] = max(rate, self.of_size(size, threads))

    def of_size(self, size: int, threads: int) -> float:
        """0 where nobody has looked."""
        return self._of_size.get((size, threads), 0.0)

    def _look_at_reading(self, level: Level, threads: int) -> None:
        size, key = level.bytes(threads), (level.name, threads)
        rate = self.tools.read_rate(size, threads, LOOK)
        self._read[key] = size, max(rate, self._read.get(key, (0, 0.0))[1])

    def of(
        self, flops: float, moved: float, kept: int, isa: str, dtype: str, threads: int, best: float
    ) -> dict[str, Any]:
        """What bounds a call whose fastest run took `best` seconds, and the share of that bound it reaches. It moves
        `moved` bytes; `kept` are those of K and V, which stay in a cache between runs where one is large enough."""
        arithmetic = self.arithmetic(isa, dtype, threads)
        level = self.level(kept, threads)
        read = self.of_size(kept, threads) or self.read(level, threads)
        seconds, limit, rate = max(
            (flops / arithmetic, "arithmetic", arithmetic),
            (moved / read, f"read {level.name}", read),
        )
        share = seconds / best
        if share < OVERHEAD_SHARE and best < OVERHEAD_SECONDS:
            return {"limit": "overhead", "limit_rate": None, "share": share}
        return {"limit": limit, "limit_rate": rate, "share": share}

    def level(self, kept: int, threads: int) -> Level:
        return next(level for level in self.levels if level.holds(kept, threads))

    def document(self) -> dict[str, Any]:
        return {
            "arithmetic": [
                {"isa": isa, "dtype": dtype, "threads": threads, "rate": rate}
                for (isa, dtype, threads), rate in self._arithmetic.items()
            ],
            "read": [
                {"level": name, "bytes": size, "threads": threads, "rate": rate}
                for (name, threads), (size, rate) in self._read.items()
            ],
        }


class Steadiness:
    """The clock and a short loop of known work, looked at again and again: what changes is the machine. And for how
    long threads had to wait for a CPU, which a short loop on fresh threads, whom schedulers favour, does not meet."""

    LOOKS = 10
    SECONDS = 1e-3

    def __init__(self, tools: Instruments, isa: str, threads: int) -> None:
        self.tools = tools
        self.isa = isa
        self.threads = threads
        self.clocks: list[float] = []
        self.loops: list[list[float]] = []  # FLOP/s, slowest first
        self.began = time.monotonic(), tools.waited()

    def look(self) -> None:
        looks = range(self.LOOKS)
        # A thread that loses its core for a moment seems to have a slow clock, never a fast one.
        self.clocks.append(max(self.tools.clock_rate(self.SECONDS / 2) for _ in looks))
        rates = [self.tools.arithmetic_rate(self.isa, "f32", self.threads, self.SECONDS) for _ in looks]
        self.loops.append(sorted(rates))

    def document(self) -> dict[str, Any]:
        """The noise is how much longer than in its best moment the loop takes at a usual one, nine times of ten, or the
        share of the time that threads waited for a CPU, if that is more."""
        clocks = self.clocks
        best = max(rates[-1] for rates in self.loops)
        begin, before = self.began
        waited = (self.tools.waited() - before) / (time.monotonic() - begin)
        return {
            "clock": {"first": clocks[0], "last": clocks[-1], "least": min(clocks), "most": max(clocks)},
            "noise": max(waited, median(best / rates[self.LOOKS // 10] - 1 for rates in self.loops)),
            "waited": waited,
            "drift": clocks[-1] / clocks[0] - 1,
        }
