"""The roofline: how fast each row ran, over how much arithmetic it does for each byte, under the machine's limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .._user import need
from .charts import FAINT, HUES, INK, SURFACE, Figure, details, figure, log_axis, log_range, plain
from .rows import Row, commonest_threads, kind

Limit = tuple[str, float]  # name, rate in 1e9 a second
Place = tuple[float, float]  # logarithms

DTYPE_SYMBOLS = {"f32": "circle", "bf16": "diamond", "f16": "square", "f64": "triangle-up"}
KIND_COLOURS = {"prefill": HUES[0], "decode": HUES[1]}


def has_place(row: Row) -> bool:
    """Nothing to compute has no place on logarithmic axes."""
    return row["flops"] > 0 and row["bytes"] > 0


def _place(row: Row) -> Place:
    return math.log10(row["flops"] / row["bytes"]), math.log10(row["flops_rate"] / 1e9)


def _merged(found: list[Limit], within: float) -> list[Limit]:
    """Limits that would be drawn on top of each other become one, with all their names; the highest first."""
    merged: list[Limit] = []
    for name, rate in sorted(found, key=lambda limit: -limit[1]):
        if merged and merged[-1][1] < rate * within:
            merged[-1] = (f"{merged[-1][0]}, {name}", merged[-1][1])
        else:
            merged.append((name, rate))
    return merged


def _line(start: Place, end: Place, name: str, dash: str) -> Any:
    return need("plotly.graph_objects", "the HTML page").Scatter(
        x=[10 ** start[0], 10 ** end[0]],
        y=[10 ** start[1], 10 ** end[1]],
        mode="lines",
        line={"color": FAINT, "width": 1.5, "dash": dash},
        name=plain(name),
        hoverinfo="skip",
        showlegend=False,
    )


def _label(text: str, place: Place, **look: Any) -> dict[str, Any]:
    font = {"size": 11, "color": INK}
    return {"text": plain(text), "x": place[0], "y": place[1], "showarrow": False, "font": font} | look


def _clearest(start: Place, end: Place, taken: list[Place], span: Place) -> Place:
    """The place on a line with the most room around it."""
    steps = [step / 20 for step in range(3, 18)]
    places = [(start[0] + (end[0] - start[0]) * step, start[1] + (end[1] - start[1]) * step) for step in steps]

    def room(place: Place) -> float:
        return min(math.hypot((place[0] - x) / span[0], (place[1] - y) / span[1]) for x, y in taken)

    return max(places, key=room)


def _points(rows: list[Row]) -> Iterator[Any]:
    """A trace for each kind and dtype."""
    go = need("plotly.graph_objects", "the HTML page")
    for of_kind, colour in KIND_COLOURS.items():
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            chosen = [row for row in rows if kind(row) == of_kind and row["dtype"] == dtype]
            if chosen:
                marker = {"color": colour, "symbol": DTYPE_SYMBOLS.get(dtype, "x"), "size": 11}
                yield go.Scatter(
                    x=[10 ** _place(row)[0] for row in chosen],
                    y=[10 ** _place(row)[1] for row in chosen],
                    mode="markers",
                    marker=marker | {"line": {"color": SURFACE, "width": 1}},
                    name=plain(f"{of_kind} {dtype}"),
                    text=[details(row) for row in chosen],
                    hoverinfo="text",
                )


def roofline(rows: list[Row], limits: dict[str, Any]) -> Figure:
    """Under what the machine can do with the threads that most rows used, of the arithmetic that any row used."""
    threads = commonest_threads(rows)
    used = {(row["isa"], row["dtype"]) for row in rows}
    arithmetic = _merged(
        [
            (f"{limit['isa']} {limit['dtype']}", limit["rate"] / 1e9)
            for limit in limits.get("arithmetic", [])
            if limit["threads"] == threads and (limit["isa"], limit["dtype"]) in used
        ],
        1.06,
    )
    reading = _merged(
        [(limit["level"], limit["rate"] / 1e9) for limit in limits.get("read", []) if limit["threads"] == threads], 1.25
    )
    taken = [_place(row) for row in rows]
    left, right = log_range([10**x for x, _ in taken], 0.4, 0.7)
    bottom, top = log_range([*(10**y for _, y in taken), *(rate for _, rate in arithmetic)], 0.4, 0.25)
    ceiling = math.log10(arithmetic[0][1]) if arithmetic else top
    lines, texts = [], []
    for name, rate in reading:
        height = math.log10(rate)
        start, end = max(left, bottom - height), min(right, ceiling - height)
        if start < end:
            ends = (start, start + height), (end, end + height)
            place = _clearest(*ends, taken, (right - left, top - bottom))
            taken.append(place)
            lines.append(_line(*ends, f"read {name}", "dot"))
            texts.append(_label(name, place, name="along"))
    column, above = 0, math.inf
    for name, rate in arithmetic:
        height = math.log10(rate)
        start = max(left, height - math.log10(reading[0][1])) if reading else left
        lines.append(_line((start, height), (right, height), name, "dash"))
        # Labels of lines close to each other stand side by side.
        column = column + 1 if above < rate * 1.7 else 0
        above = rate
        place = (right - column * 0.3 * (right - left), height)
        texts.append(_label(name, place, xanchor="right", yanchor="bottom"))
    return figure(
        [*lines, *_points(rows)],
        x=log_axis([left, right]) | {"title": {"text": "FLOP per byte"}},
        y=log_axis([bottom, top]) | {"title": {"text": "GFLOP/s"}},
        height=480,
        annotations=texts,
    )
