"""manyhead._measure without the measuring: a machine that does what it is told, in no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import manyhead
import numpy as np
import pytest
from manyhead import _measure
from manyhead.commands import main
from manyhead.profiling import cases, sweep
from manyhead.profiling import run as running

ARITHMETIC, READ, CALL, CLOCK = 1e11, 1e10, 1e-6, 3e9  # FLOP/s and bytes/s of a thread, seconds, Hz


class FakeMeasure:
    """What the modules of manyhead.profiling take for manyhead._measure.

    `slower` multiplies the times, `interrupt` is the number of the call of `measure` in which Ctrl-C comes, `failing` a
    word: no plan can be made of lines that hold it."""

    def __init__(self, *, slower: float = 1.0, interrupt: int = 0, failing: str = "", seed: int = 0) -> None:
        self.slower = slower
        self.interrupt = interrupt
        self.failing = failing
        self.random = np.random.default_rng(seed)
        self.order: list[str] = []  # the lines that were measured

    parse_problem = staticmethod(_measure.parse_problem)
    check_problem = staticmethod(_measure.check_problem)

    def Workload(self, line: str, *, isa: str | None = None, threads: int = 0, seed: int = 0) -> FakeWorkload:
        if self.failing and self.failing in line.split():
            raise ValueError("there is no kernel for this")
        return FakeWorkload(self, line, isa or "avx2", threads)

    def arithmetic_rate(self, isa: str, dtype: str, threads: int, seconds: float) -> float:
        return ARITHMETIC * threads

    def read_rate(self, size: int, threads: int, seconds: float) -> float:
        return READ * threads

    def clock_rate(self, seconds: float) -> float:
        return CLOCK

    def waited(self) -> float:
        return 0.0


class FakeWorkload:
    def __init__(self, machine: FakeMeasure, line: str, isa: str, threads: int) -> None:
        self.machine, self.line, self.isa, self.threads = machine, line, isa, threads
        self.dtype, self.route, self.plan = line.split()[0], "tile", {}
        p = machine.parse_problem(line)
        q_rows, kv_rows = p.batch * p.heads * p.q_len, p.batch * (p.kv_heads or p.heads) * p.kv_len
        dims = p.head_dim + (p.v_dim or p.head_dim)
        self.flops = 2.0 * dims * q_rows * (p.kv_len + 1 if p.causal else 2 * p.kv_len) / 2
        item = cases.ITEM_SIZE[self.dtype]
        self.bytes = float((q_rows + kv_rows) * dims * item)
        self.arrays = {name: np.broadcast_to(np.uint8(0), (kv_rows * p.head_dim * item,)) for name in ("k", "v")}
        self.seconds = (max(self.flops / ARITHMETIC, self.bytes / READ) / threads * 2 + CALL) * machine.slower

    def run(self) -> None:
        pass

    def measure(self, seconds: float, most: int = 1000) -> np.ndarray:
        self.machine.order.append(self.line)
        if len(self.machine.order) == self.machine.interrupt:
            raise KeyboardInterrupt
        runs = min(max(int(seconds / self.seconds), 1), 40)
        return self.seconds * (1 + 0.02 * self.machine.random.random(runs))

    def phases(self) -> dict[str, Any]:
        parts = {"scores": 0.4, "softmax": 0.2, "values": 0.4, "idle": 0.1}
        spent = {name: share * self.seconds * self.threads for name, share in parts.items()}
        return {
            "seconds": self.seconds,
            "threads": self.threads,
            "phases": spent,
            "counters": None,
            "counters_note": "",
        }


# --- profiles made with it --------------------------------------------------------------------------------------------

MACHINE = {
    "version": manyhead.__version__,
    "cpu": "A CPU",
    "isa": "avx2",
    "isas": {"avx2": True, "sse2": True},
    "threads": 4,
    "cpus": 4,
    "l1_bytes": 32 << 10,
    "l2_bytes": 1 << 20,
    "l3_bytes": 32 << 20,
}
EFFORT = sweep.Effort(seconds=0.01, passes=3, least=2, longest=10.0, looks=1)
SHAPES = ["b1 h2 q32 kv32 d16", "b1 h2 q1 kv64 d16", "b1 h2 q64 kv64 d16 causal"]


def make_rows(tools, shapes=SHAPES, dtypes=("f32",), isas=("avx2",), threads=(1,)):
    return cases.make_rows(cases.shape_cases(shapes), dtypes, isas, threads, tools)


def profile(tools, rows=None, effort=EFFORT, available=1 << 30, **options):
    defaults = {"machine": MACHINE, "phases": True, "arguments": [], "watch": sweep.Watch()}
    return running.profile(rows or make_rows(tools), effort, tools=tools, available=available, **defaults | options)


def runner(name: str) -> Callable[..., tuple[int, str, str]]:
    """A command of the command line, as a function: its exit status, what it printed, and what it said went wrong."""

    def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
        status = main([name, *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return command


def is_plain(text: str, width: int = 80) -> bool:
    """Whether it is what a pipe should get."""
    lines = text.splitlines()
    return text.isascii() and "\x1b" not in text and all(len(line) <= width and line == line.rstrip() for line in lines)
