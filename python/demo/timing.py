"""Attention of manyhead beside the same attention in NumPy, on the tensors that the encoder really produced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# One layer's call: q, k, v [batch, len, heads, head_dim] and the lengths.
Call = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Contestant = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]

_TURN = 0.04  # seconds a turn lasts at least: the first pass wakes the threads, the later ones are undisturbed
_PAUSE = 0.05  # seconds between turns: a BLAS keeps its threads spinning for some 30 ms after its last call


@dataclass(frozen=True)
class Timing:
    name: str
    seconds: float  # least time for all calls
    difference: float  # largest difference from the first contestant's results


def compare(contestants: dict[str, Contestant], calls: Sequence[Call], rounds: int) -> list[Timing]:
    """Checks that all agree, then times them in alternating rounds and keeps each one's least time."""
    first, *_ = contestants.values()
    expected = [_real_rows(first, call) for call in calls]
    differences = {
        name: max(float(np.abs(_real_rows(run, call) - good).max()) for call, good in zip(calls, expected, strict=True))
        for name, run in contestants.items()
    }
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, run in contestants.items():
            time.sleep(_PAUSE)
            end = time.perf_counter() + _TURN
            while True:
                start = time.perf_counter()
                for call in calls:
                    run(*call)
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
                if now >= end:
                    break
    return [Timing(name, best[name], differences[name]) for name in contestants]


def _real_rows(run: Contestant, call: Call) -> np.ndarray:
    """The results of the rows that are not padding, [rows, heads, head_dim]."""
    q, _, _, lengths = call
    return run(*call)[np.arange(q.shape[1]) < lengths[:, None]]
