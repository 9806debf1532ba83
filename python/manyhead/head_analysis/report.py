"""The analysis of a recording: statistics of each layer, and what is said about each head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._library import __version__
from .letters import isolated
from .recording import Recording
from .removal import output_change
from .statistics import HeadStatistics, head_statistics

TOP_KEYS = 10
_EVEN = 0.95  # of the largest possible entropy: such a head is called even whatever its strongest habit is
HABIT = 0.25  # a share from which a habit names the head
_NEAR = {0: "itself", -1: "previous token", 1: "next token"}


@dataclass(frozen=True)
class LayerReport:
    number: int
    statistics: HeadStatistics
    output_change: np.ndarray  # [heads], see removal.output_change
    embedding_change: np.ndarray | None  # [heads] cosine distance of the model's result without the head
    habits: list[str]  # of each head, in words

    def closest(self, head: int) -> tuple[int, float] | None:
        """The head of this layer with the most similar weights, and the cosine."""
        others = self.statistics.similarity[head].copy()
        if len(others) == 1:
            return None
        others[head] = -np.inf
        return int(others.argmax()), float(others.max())


@dataclass(frozen=True)
class Report:
    recording: Recording
    projected: bool  # whether output_change is that behind w_o
    layers: list[LayerReport]

    def key_name(self, key: int) -> str:
        tokens = self.recording.tokens
        return tokens[key] if tokens else f"key {key}"


def analyse(recording: Recording, *, max_cells: int, progress: Callable[[float], None]) -> Report:
    layers: list[LayerReport] = []
    for number, layer in recording.layers.items():
        statistics, out = head_statistics(
            layer.q,
            layer.k,
            layer.v,
            causal=recording.causal,
            scale=recording.scale,
            max_cells=max_cells,
            progress=lambda share: progress((len(layers) + share) / len(recording.layers)),
        )
        habits = [habit(statistics, head, recording.tokens) for head in range(len(out))]
        change = output_change(out, layer.w_o)
        layers.append(LayerReport(number, statistics, change, recording.embedding_change.get(number), habits))
    return Report(recording, all(layer.w_o is not None for layer in recording.layers.values()), layers)


def habit(statistics: HeadStatistics, head: int, tokens: list[str] | None) -> str:
    """What the head does most: a relative position, a key that draws its weight, or neither."""
    if statistics.entropy_share[head] >= _EVEN:
        return "even"
    index = int(statistics.by_offset[head].argmax())
    offset, share = index + statistics.first_offset, float(statistics.by_offset[head, index])
    name = _NEAR.get(offset, f"{abs(offset)} {'ahead' if offset > 0 else 'back'}")
    (key,) = statistics.top_keys(head, 1)
    if statistics.received[head, key] > share:
        share = float(statistics.received[head, key])
        name = isolated(repr(tokens[key])) if tokens else f"key {key}"
    return f"{name} {share:.0%}" if share >= HABIT else f"90% within {statistics.reach[head]}"


def head_rows(report: Report) -> list[dict[str, Any]]:
    """One dict a head: the numbers as the JSON file and the tables have them."""
    rows = []
    for layer in report.layers:
        s = layer.statistics
        for head in range(len(layer.habits)):
            keys = s.top_keys(head, TOP_KEYS)
            closest = layer.closest(head)
            rows.append({
                "layer": layer.number,
                "head": head,
                "habit": layer.habits[head],
                "entropy": float(s.entropy[head]),
                "entropy_share": float(s.entropy_share[head]),
                "distance": float(s.distance[head]),
                "reach": int(s.reach[head]),
                "first_key": float(s.received[head, 0]),
                "top_key": float(s.received[head, keys[0]]),
                "self": float(s.at_offset(0)[head]),
                "previous": float(s.at_offset(-1)[head]),
                "next": float(s.at_offset(1)[head]),
                "top_keys": [
                    {"key": key, "token": report.key_name(key), "share": float(s.received[head, key])} for key in keys
                ],
                "closest_head": closest and closest[0],
                "similarity": closest and closest[1],
                "output_change": float(layer.output_change[head]),
                "embedding_change": None if layer.embedding_change is None else float(layer.embedding_change[head]),
            })  # fmt: skip
    return rows


def two_digits(share: float) -> str:
    """0.5 -> 50%, 0.0123 -> 1.2%, 0.000123 -> 0.012%."""
    return f"{share:.0%}" if share >= 0.0995 else f"{100 * share:.2g}%"


def notable(report: Report, count: int = 5) -> dict[str, list[str]]:
    """The heads to look at first, of all layers."""
    rows = head_rows(report)
    change = "embedding_change" if report.recording.embedding_change else "output_change"

    def best(key: str, form: Callable[[float], str], *, largest: bool = True) -> list[str]:
        chosen = sorted(rows, key=lambda row: -row[key] if largest else row[key])[:count]
        return [f"layer {row['layer']} head {row['head']}: {form(row[key])}" for row in chosen]

    pairs = [
        (float(layer.statistics.similarity[a, b]), layer.number, a, b)
        for layer in report.layers
        for a, b in zip(*np.triu_indices(len(layer.habits), 1), strict=True)
    ]
    pairs.sort(key=lambda pair: -pair[0])
    form = "{:.2g}".format if change == "embedding_change" else two_digits
    found = {
        "Most weight on one key": best("top_key", two_digits),
        "Removing it changes most": best(change, form),
        "Removing it changes least": best(change, form, largest=False),
        "Most alike": [f"layer {number} heads {a} and {b}: {value:.2f}" for value, number, a, b in pairs[:count]],
    }
    return {what: entries for what, entries in found.items() if entries}


def to_json(report: Report) -> dict[str, Any]:
    recording = report.recording
    heads, q_len, kv_len = recording.sizes
    return {
        "format": "manyhead-heads",
        "format_version": 1,
        "manyhead": __version__,
        "source": recording.title,
        "heads": heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "causal": recording.causal,
        "tokens": recording.tokens,
        "projected": report.projected,
        "rows": head_rows(report),
        "layers": [
            {
                "layer": layer.number,
                "similarity": layer.statistics.similarity.tolist(),
                "query_edges": layer.statistics.query_edges.tolist(),
                "entropy_profile": [
                    [None if math.isnan(share) else share for share in head]
                    for head in layer.statistics.entropy_profile.tolist()
                ],
            }
            for layer in report.layers
        ],
    }
