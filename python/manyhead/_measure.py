"""What the command line measures with: problems from lines of text, made real with random numbers, and the probes.

Times are taken in C (mh_plan_measure), so that Python adds nothing to them.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_double, c_int64, c_size_t, c_void_p, sizeof
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from . import _abi
from ._arrays import DTYPE_CODES, DTYPES, aligned_empty, choice, to_type
from ._library import Owner, check, lib, text_of
from ._plan import real_type, result_shapes
from ._profile import profile
from ._runtime import capped, set_isa
from ._runtime import isa as current_isa

_RANDOM = 1 << 20  # random numbers are drawn once for so many elements and then repeated


class ProblemLineError(ValueError):
    """A line that is no problem. `column` is where the word at fault begins, from 0."""

    def __init__(self, text: str, line: str, column: int) -> None:
        super().__init__(text)
        self.line = line
        self.column = column

    def pointed(self) -> str:
        """The line, and under it a mark at the column."""
        before = "".join(c if c == "\t" else " " for c in self.line[: self.column])
        return f"{self.line}\n{before}^"


def parse_problem(line: str) -> _abi.Problem:
    """The problem that a line such as "f32 b1 h8 q128 kv128 d64 causal" stands for. Raises ProblemLineError."""
    if "\0" in line:
        raise ProblemLineError("a problem has no character of code 0", line, line.index("\0"))
    problem, column = _abi.Problem(struct_size=sizeof(_abi.Problem)), c_size_t()
    bytes_of_line = line.encode(errors="surrogateescape")
    if lib.mh_problem_parse(bytes_of_line, byref(problem), byref(column)):
        text = lib.mh_last_error().decode(errors="replace")
        raise ProblemLineError(text, line, len(bytes_of_line[: column.value].decode(errors="surrogateescape")))
    return problem


def check_problem(problem: _abi.Problem) -> None:
    """Raises ValueError, with the reason, where no plan can be made of the problem. Needs no tensors."""
    plan = c_void_p()
    check(lib.mh_plan_create(byref(problem), byref(plan)))
    lib.mh_plan_destroy(plan)


def dtype_name(dtype: int) -> str:
    return lib.mh_dtype_name(dtype).decode()


class Planned(Owner):
    """A problem and what the library plans for it. Nothing runs, and no tensor is made.

    Args:
        line: the problem; `ProblemLineError` where it is none, ValueError where it makes no sense.
        isa: the instruction set of the plan, None = the current one. manyhead.Error where the CPU lacks it.
        threads: most threads of a run, 0 = the default.
    """

    def __init__(self, line: str, *, isa: str | None = None, threads: int = 0) -> None:
        if threads < 0:
            raise ValueError(f"threads is {threads}, must be at least 0")
        self.problem: _abi.Problem = parse_problem(line)
        self._plan = c_void_p()
        before = current_isa() if isa is not None else None
        try:
            if isa is not None:
                set_isa(isa)
            with capped(threads):  # which a description is made for
                check(lib.mh_plan_create(byref(self.problem), byref(self._plan)))
                text = text_of(partial(lib.mh_plan_describe, self._plan, _abi.FORMAT_JSON))
        finally:
            if before is not None:
                set_isa(before)
        self.plan: dict[str, Any] = json.loads(text)
        self.line: str = self.plan["problem"]
        self.flops: float = self.plan["flops"]
        self.bytes: float = self.plan["bytes"]
        self.isa: str = self.plan["isa"]
        self.dtype: str = self.plan["dtype"]
        self.route: str = self.plan["kernel"].split("/")[2].split("@")[0]
        self.threads: int = self.plan["threads"]

    def __del__(self) -> None:
        if getattr(self, "_plan", None):
            lib.mh_plan_destroy(self._plan)


class Workload(Planned):
    """A problem made real: a plan, and arrays of random normal numbers for it, which `seed` decides."""

    def __init__(self, line: str, *, isa: str | None = None, threads: int = 0, seed: int = 0) -> None:
        super().__init__(line, isa=isa, threads=threads)
        self._exec = _abi.Exec(struct_size=sizeof(_abi.Exec), threads=threads)
        self.arrays: dict[str, np.ndarray] = {}
        self._tensors = _abi.Tensors(struct_size=sizeof(_abi.Tensors))
        self._make_arrays(np.random.default_rng(seed))
        self.threads = self._threads_of_a_run()

    def run(self) -> None:
        check(lib.mh_plan_run(self._plan, byref(self._tensors), byref(self._exec)))

    def measure(self, seconds: float, most: int = 1000) -> np.ndarray:
        """The seconds of each of at most `most` runs, one after another, until so many seconds are over."""
        times, runs = np.empty(most), c_int64()
        to = times.ctypes.data_as(ctypes.POINTER(c_double))
        check(lib.mh_plan_measure(self._plan, byref(self._tensors), byref(self._exec), seconds, most, to, byref(runs)))
        return times[: runs.value]

    def phases(self) -> dict[str, Any]:
        """Some profiled runs: their mean seconds, threads, phases in seconds of all threads, and counters."""
        summary = self._profiled(int(np.clip(0.05 / max(self.measure(0.0, 1)[0], 1e-6), 3, 64)))
        calls = [call for call in summary["calls"] if call["phases"] is not None]
        if not calls:  # more threads than a profile has room for
            return {"seconds": None, "threads": None, "phases": None, "counters": None, "counters_note": None}
        best = min(call["seconds"] for call in calls)
        calls = [call for call in calls if call["seconds"] <= 2 * best]  # others were interrupted
        counters: dict[str, float] = {}
        for name in summary["threads"][0]["counters"]:
            values = [thread["counters"][name] for thread in summary["threads"]]
            if None not in values:
                counters[name] = sum(values) / (len(summary["calls"]) + summary["calls_skipped"])
        return {
            "seconds": float(np.mean([call["seconds"] for call in calls])),
            "threads": calls[0]["threads"],
            "phases": {name: float(np.mean([call["phases"][name] for call in calls])) for name in calls[0]["phases"]},
            "counters": counters or None,
            "counters_note": summary["counters_note"],
        }

    def _profiled(self, runs: int) -> dict[str, Any]:
        with profile(calls=runs, counters=True) as recorded:
            for _ in range(runs):
                self.run()
        return recorded.summary

    def _threads_of_a_run(self) -> int:
        return self._profiled(1)["calls"][0]["threads"]

    def _make_arrays(self, rng: np.random.Generator) -> None:
        p = self.problem
        kv_heads, v_dim = p.kv_heads or p.heads, p.v_dim or p.head_dim
        dtype = DTYPES[self.dtype]
        real = real_type(dtype)
        bshd = bool(p.q_strides[3])  # a line gives strides for this layout only
        rows, pairs = (p.batch, p.heads, p.q_len), (p.batch, p.heads, p.q_len, p.kv_len)
        self._add("q", self._normal(rng, dtype, _lay((*rows, p.head_dim), bshd)))
        self._add("k", self._normal(rng, dtype, _lay((p.batch, kv_heads, p.kv_len, p.head_dim), bshd)))
        self._add("v", self._normal(rng, dtype, _lay((p.batch, kv_heads, p.kv_len, v_dim), bshd)))
        self._add("out", self._normal(rng, dtype, _lay((*rows, v_dim), bshd)))
        index = np.int64 if p.index_type == _abi.INDEX_I64 else np.int32
        slopes = 2.0 ** (-8.0 * np.arange(1, p.heads + 1) / p.heads)
        if p.alibi_batch_stride:
            slopes = np.tile(slopes, (p.batch, 1))
        makers: dict[str, Callable[[], np.ndarray]] = {
            "mask": lambda: self._mostly_true(rng, pairs),
            "bias": lambda: self._normal(rng, DTYPES[dtype_name(p.bias_dtype)], pairs),
            "key_mask": lambda: self._mostly_true(rng, (p.batch, p.kv_len)),
            "seqused_k": lambda: np.full(p.batch, p.kv_len, index),
            "q_offset": lambda: np.full(p.batch, max(p.kv_len - p.q_len, 0), index),
            "alibi_slopes": lambda: slopes.astype(real),
            "sinks": lambda: self._normal(rng, real, (p.heads,)),
        }
        for name, bit in _abi.INPUTS.items():
            if p.inputs & bit:
                self._add(name, makers[name]())
        for name, shape in result_shapes(*pairs).items():
            if p.outputs & _abi.OUTPUTS[name]:
                self._add(name, np.zeros(shape, real))

    def _add(self, name: str, array: np.ndarray) -> None:
        self.arrays[name] = array = _aligned(array)
        setattr(self._tensors, name, array.ctypes.data)

    @staticmethod
    def _normal(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        numbers = rng.standard_normal(min(prod(shape), _RANDOM), dtype=np.float32)
        return np.resize(to_type(numbers, dtype), shape)

    @staticmethod
    def _mostly_true(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(rng.random(min(prod(shape), _RANDOM), dtype=np.float32) < 15 / 16, shape)


def _aligned(array: np.ndarray) -> np.ndarray:
    """The same numbers where a cache line begins. NumPy's arrays begin anywhere, and times would change with that: a
    vector that lies in two lines is two loads, and a decode step in cache took up to 1.6 times as long."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _lay(shape: tuple[int, ...], bshd: bool) -> tuple[int, ...]:
    """The shape of the memory of [batch, heads, length, dim]."""
    return (shape[0], shape[2], shape[1], shape[3]) if bshd else shape


def arithmetic_rate(isa: str, dtype: str, threads: int, seconds: float) -> float:
    """FLOP/s of multiply-adds in registers, on the unit that kernels of this dtype use."""
    rate = c_double()
    check(lib.mh_probe_arithmetic(isa.encode(), choice(dtype, "dtype", DTYPE_CODES), threads, seconds, byref(rate)))
    return rate.value


def read_rate(size: int, threads: int, seconds: float) -> float:
    """Bytes/s of reading so many bytes again and again, a part of them on each thread."""
    rate = c_double()
    check(lib.mh_probe_read(None, size, threads, seconds, byref(rate)))
    return rate.value


def clock_rate(seconds: float) -> float:
    """Cycles/s of the core that this runs on now."""
    rate = c_double()
    check(lib.mh_probe_clock(seconds, byref(rate)))
    return rate.value


def waited() -> float:
    """Seconds for which threads of this process could have run but had no CPU, all together so far; 0 where the system
    does not say (Linux does)."""
    nanoseconds = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            nanoseconds += int(thread.read_text().split()[1])
    return nanoseconds * 1e-9
