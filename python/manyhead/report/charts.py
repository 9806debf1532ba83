"""The charts of the pages, as plotly figures; the roofline is in roofline.py.

Colours are the page's CSS variables: page.js fills them in, so that a chart follows the reader's light or dark scheme.
What the colours tell is also told by symbols, dashes or hatching, and each palette is Okabe and Ito's for the colour
blind. Names come from the user's files: plotly reads a little HTML in texts, so each passes through `plain`.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

from .._user import need
from . import units
from .phases import PHASES, Phase
from .rows import Row, best, curves, labels

Figure = Any  # plotly has no types

INK, FAINT, GRID, SURFACE = "var(--ink)", "var(--faint)", "var(--grid)", "var(--surface)"
HUES = [f"var(--hue-{name})" for name in ("blue", "vermilion", "green", "purple", "orange", "sky")]
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
LONGEST_NAME, LONGEST_LABEL = 20, 18  # letters
RATIO_MARKS = ((0.8, 0.9, 1, 1.1, 1.25), (0.5, 0.7, 1, 1.4, 2), (0.125, 0.25, 0.5, 1, 2, 4, 8), (0.01, 0.1, 1, 10, 100))
TICKS = 8  # at most, where each point's place on the axis is named: as many as a phone has room for


def plain(text: str) -> str:
    return html.escape(text, quote=False)


def _short(label: str) -> str:
    return plain(label if len(label) <= LONGEST_NAME else label[: LONGEST_NAME - 3] + "...")


def details(row: Row) -> str:
    """All that is known of a row, for the text that appears over its point."""
    seconds = row["seconds"]
    lines = [
        f"<b>{_short(row['name'])}</b>",
        plain(row.get("what") or ""),
        *(plain(line) for line in textwrap.wrap(row["problem"], 40)),
        plain(f"{row['isa']}, {row['route']}, {units.plural(row['threads'], 'thread')}"),
        f"best {units.duration(seconds['best'])} of {units.plural(seconds['runs'], 'run')}",
        f"median {units.duration(seconds['median'])}, p90 {units.duration(seconds['p90'])}",
        f"{units.rate(row['flops_rate'], 'FLOP/s')}, {units.rate(row['bytes_rate'], 'B/s')}",
        plain(f"{units.percent(row.get('share'))} of the limit: {row.get('limit') or 'unknown'}"),
        *(plain(line) for line in textwrap.wrap(row.get("note") or "", 40)),
    ]
    return "<br>".join(line for line in lines if line)


def figure(traces: Iterable[Any], x: dict[str, Any], y: dict[str, Any], height: int = 420, **layout: Any) -> Figure:
    """A figure in the pages' one style. No dragging and no zoom: a finger on a chart scrolls the page."""
    go = need("plotly.graph_objects", "the HTML page")
    axis = {
        "fixedrange": True,
        "automargin": True,
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "ticks": "",
        "minor": {"showgrid": False},
        "exponentformat": "none",
        "separatethousands": True,
    }
    drawn = go.Figure(list(traces))
    drawn.update_layout(
        template="none",
        height=height,
        dragmode=False,
        hovermode="closest",
        paper_bgcolor=SURFACE,
        plot_bgcolor=SURFACE,
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        hoverlabel={"bgcolor": SURFACE, "bordercolor": FAINT, "font": {"color": INK, "size": 12}, "align": "left"},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "xref": "container", "x": 0},
        margin={"l": 8, "r": 20, "t": 8, "b": 8},
        xaxis=axis | {"tickangle": 0} | x,
        yaxis=axis | y,
        **layout,
    )
    return drawn


def log_range(values: Iterable[float], below: float, above: float) -> list[float]:
    """In decades, with room on either side."""
    logs = [math.log10(value) for value in values]
    return [min(logs) - below, max(logs) + above]


def log_axis(limits: list[float]) -> dict[str, Any]:
    """An axis between these logarithms, with ticks at 1, 2, 5, 10 ... where that is not too many."""
    low, high = limits
    steps = (1, 2, 5) if high - low < 3 else (1,)
    values = [step * 10.0**power for power in range(math.floor(low), math.floor(high) + 1) for step in steps]
    shown = [value for value in values if low <= math.log10(value) <= high]
    ticks = {"tickmode": "array", "tickvals": shown, "ticktext": [f"{value:,.10g}" for value in shown]}
    return {"type": "log", "range": limits} | ticks


def _curves(groups: dict[str, list[Row]], value: Callable[[Row, list[Row]], float]) -> list[Any]:
    go = need("plotly.graph_objects", "the HTML page")
    return [
        go.Scatter(
            x=[row["x"] for row in group],
            y=[value(row, group) for row in group],
            mode="lines+markers",
            cliponaxis=False,
            line={"color": hue, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 9},
            name=_short(label),
            text=[details(row) for row in group],
            hoverinfo="text",
        )
        for (label, group), hue, dash, symbol in zip(
            groups.items(), cycle(HUES), cycle(DASHES), cycle(SYMBOLS), strict=False
        )
    ]


def _places(rows: list[Row], title: str) -> dict[str, Any]:
    """A logarithmic axis that names the places where something was measured."""
    places = sorted({row["x"] for row in rows})
    named = places[:: -(-len(places) // TICKS)]
    ticks = {"tickmode": "array", "tickvals": named, "ticktext": [f"{place:g}" for place in named]}
    return ticks | {"type": "log", "title": {"text": title}, "range": log_range(places, 0.1, 0.1)}


def sequence(rows: list[Row]) -> Figure:
    """Speed from zero, or over decades where prefill and decode are too far apart for one straight scale."""
    traces = _curves(curves(rows, "sequence"), lambda row, _: row["flops_rate"] / 1e9)
    speeds = [row["flops_rate"] / 1e9 for row in rows]
    wide = max(speeds) > 20 * min(speeds) > 0
    y = log_axis(log_range(speeds, 0.1, 0.1)) if wide else {"rangemode": "tozero"}
    return figure(traces, x=_places(rows, "sequence length"), y=y | {"title": {"text": "GFLOP/s"}})


def threads(rows: list[Row]) -> Figure:
    """How many times as fast as with the fewest threads. Both axes in steps of twice: perfect scaling is a straight."""
    go = need("plotly.graph_objects", "the HTML page")
    traces = _curves(curves(rows, "threads"), lambda row, group: best(group[0]) / best(row))
    fewest, most = rows[0]["x"], rows[-1]["x"]
    ideal = go.Scatter(
        x=[fewest, most],
        y=[1, most / fewest],
        mode="lines",
        line={"color": FAINT, "dash": "dot", "width": 1.5},
        name="perfect",
        hoverinfo="skip",
    )
    reached = [speed for trace in (ideal, *traces) for speed in trace.y]
    marks = [2**power for power in range(math.floor(math.log2(min(reached))), math.ceil(math.log2(max(reached))) + 1)]
    y = {"type": "log", "range": log_range(reached, 0.1, 0.1), "tickmode": "array", "tickvals": marks}
    title = {"text": f"speed-up over {units.plural(fewest, 'thread')}"}
    return figure(
        [ideal, *traces],
        x=_places(rows, "threads"),
        y=y | {"ticktext": [f"{mark:g}x" for mark in marks], "title": title},
    )


def _lines(rows: list[Row]) -> dict[str, Any]:
    """A chart with a line for each row, top down. Long labels take two lines of text: a phone is narrow."""
    names = labels(rows)
    long = any(len(name) + len(more) > LONGEST_LABEL for name, more in names if more)
    texts = [f"{_short(name)}{'<br>' if long else ' '}{plain(more)}" if more else _short(name) for name, more in names]
    ticks = {"tickmode": "array", "tickvals": list(range(len(rows))), "ticktext": texts}
    height = 140 + (36 if long else 26) * len(rows)
    return {"y": ticks | {"range": [len(rows) - 0.5, -0.5], "showgrid": False}, "height": height}


def shown_phases(rows: Iterable[Row]) -> list[str]:
    """The phases that took any time in any of the rows."""
    taken = {name for row in rows for name, seconds in (row["phases"] or {}).items() if seconds}
    return [name for name in PHASES if name in taken] + sorted(taken - PHASES.keys())


def phase_share(row: Row, name: str) -> float:
    """Of the threads' time."""
    return row["phases"].get(name, 0.0) / (sum(row["phases"].values()) or 1.0)


def phase_title(name: str) -> str:
    return PHASES[name].title if name in PHASES else plain(name)


def _phase_look(name: str) -> dict[str, Any]:
    phase = PHASES.get(name, Phase(name, name, "vermilion"))
    pattern = {"shape": phase.hatch, "fgcolor": SURFACE, "size": 6, "solidity": 0.35, "fillmode": "overlay"}
    return {"color": f"var(--hue-{phase.hue})", "line": {"color": SURFACE, "width": 1}, "pattern": pattern}


def _phase_text(row: Row, name: str) -> str:
    spent = row["phases"].get(name, 0.0)
    return (
        f"<b>{phase_title(name)}: {units.percent(phase_share(row, name))}</b>, "
        f"{units.duration(spent)} of the threads' time<br>{details(row)}"
    )


def phases(rows: list[Row]) -> Figure:
    """One bar a row, all of the same length: what the threads' time went into."""
    go = need("plotly.graph_objects", "the HTML page")
    places = list(range(len(rows)))
    traces = [
        go.Bar(
            y=places,
            x=[100 * phase_share(row, name) for row in rows],
            orientation="h",
            marker=_phase_look(name),
            name=phase_title(name),
            text=[_phase_text(row, name) for row in rows],
            textposition="none",
            hoverinfo="text",
        )
        for name in shown_phases(rows)
    ]
    return figure(
        traces,
        x={"range": [0, 100], "dtick": 25, "ticksuffix": "%", "title": {"text": "share of time"}},
        **_lines(rows),
        barmode="stack",
        bargap=0.25,
        legend_traceorder="normal",
    )


def heads(rows: list[Row]) -> Figure:
    """One curve's time over the number of heads, split by phase where that is known, beside the time of one head."""
    go = need("plotly.graph_objects", "the HTML page")
    rows_with = [row for row in rows if row["phases"]]
    rows_without = [row for row in rows if not row["phases"]]
    unit = next((scale for scale in units.SECONDS if max(map(best, rows)) >= scale[0]), units.SECONDS[-1])
    places = {row["x"]: place for place, row in enumerate(rows)}

    def bars(chosen: list[Row], share: Callable[[Row], float], **look: Any) -> Any:
        return go.Bar(
            x=[places[row["x"]] for row in chosen],
            y=[best(row) * share(row) / unit[0] for row in chosen],
            textposition="none",
            hoverinfo="text",
            **look,
        )

    traces = [
        bars(
            rows_with,
            lambda row, name=name: phase_share(row, name),  # type: ignore[misc]
            marker=_phase_look(name),
            name=phase_title(name),
            text=[_phase_text(row, name) for row in rows_with],
        )
        for name in shown_phases(rows_with)
    ]
    if rows_without:
        look = {"color": HUES[0], "line": {"color": SURFACE, "width": 1}}
        text = [details(row) for row in rows_without]
        traces.append(bars(rows_without, lambda row: 1.0, marker=look, name="time", text=text))
    traces.append(
        go.Scatter(
            x=[-0.5, len(places) - 0.5],
            y=[best(rows[0]) / unit[0]] * 2,
            mode="lines",
            line={"color": INK, "dash": "dash", "width": 1.5},
            name=f"time with {units.plural(rows[0]['x'], 'head')}",
            hoverinfo="skip",
        )
    )
    ticks = {"tickmode": "array", "tickvals": list(places.values()), "ticktext": [f"{x:g}" for x in places]}
    return figure(
        traces,
        x=ticks | {"title": {"text": "heads"}, "showgrid": False, "range": [-0.5, len(places) - 0.5]},
        y={"title": {"text": unit[1]}, "rangemode": "tozero"},
        barmode="stack",
        bargap=0.25,
        legend_traceorder="normal",
    )


def ratios(rows: list[Row], names: list[str]) -> Figure:
    """Each row's speed in the later documents as a multiple of the first one's. Hollow: it may be chance."""
    rows = [row for row in rows if any(units.known(ratio) for ratio in row["ratios"][1:])]
    go = need("plotly.graph_objects", "the HTML page")
    traces = []
    for index, name in enumerate(names[1:], 1):
        chosen = [(place, row) for place, row in enumerate(rows) if units.known(row["ratios"][index])]
        if not chosen:
            continue
        symbol, hue = SYMBOLS[(index - 1) % len(SYMBOLS)], HUES[(index - 1) % len(HUES)]
        traces.append(
            go.Scatter(
                x=[row["ratios"][index] for _, row in chosen],
                y=[place for place, _ in chosen],
                mode="markers",
                marker={
                    "color": hue,
                    "symbol": [symbol if row["significant"][index] else f"{symbol}-open" for _, row in chosen],
                    "size": 11,
                    "line": {"color": hue, "width": 2},
                },
                name=_short(name),
                text=[_ratio_text(row, index, names) for _, row in chosen],
                hoverinfo="text",
            )
        )
    known = [ratio for row in rows for ratio in row["ratios"] if units.known(ratio)]
    furthest = max([abs(math.log10(ratio)) for ratio in known], default=0.0) + 0.05
    marks = next((marks for marks in RATIO_MARKS if math.log10(marks[-1]) >= furthest * 0.8), RATIO_MARKS[-1])
    return figure(
        traces,
        x={"type": "log", "range": [-furthest, furthest], "title": {"text": "times as fast"}}
        | {"tickmode": "array", "tickvals": marks, "ticktext": [f"{mark:g}x" for mark in marks]},
        **_lines(rows),
        showlegend=len(names) > 2,
        shapes=[
            {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": INK, "width": 1.5}}
        ],
    )


def _ratio_text(row: Row, index: int, names: list[str]) -> str:
    return "<br>".join(
        [
            f"<b>{_short(row['name'])}</b>: {units.number(row['ratios'][index])}x"
            + ("" if row["significant"][index] else ", within the noise"),
            *(plain(line) for line in textwrap.wrap(row["problem"], 40)),
            plain(f"{row['isa']}, {units.plural(row['threads'], 'thread')}"),
            f"{_short(names[0])}: {units.duration(row['seconds'][0])}",
            f"{_short(names[index])}: {units.duration(row['seconds'][index])}",
        ]
    )
