"""The phases of a call in the order of the work: what charts and tables call them, and how charts draw them."""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    title: str  # in charts
    words: str  # where there is room
    hue: str = "grey"  # of those that belong together: the rarer one is hatched
    hatch: str = ""


PHASES = {
    "project": Phase("project", "projections", "sky", "/"),
    "pack": Phase("pack", "Q, K and V into order", "sky"),
    "scores": Phase("QK\u1d40", "scores: Q x K", "blue"),
    "mask": Phase("mask", "masks and biases", "blue", "/"),
    "softmax": Phase("softmax", "softmax", "orange"),
    "values": Phase("PV", "values: weights x V", "green"),
    "store": Phase("store", "results stored", "green", "/"),
    "merge": Phase("merge", "chunks merged", "purple"),
    "weights": Phase("weights", "second pass", "purple", "/"),
    # The next three are of predictions alone.
    "task": Phase("task", "taking tasks"),
    "call": Phase("call", "the call itself"),
    "read": Phase("read", "reading"),
    "idle": Phase("idle", "threads that wait"),
}
