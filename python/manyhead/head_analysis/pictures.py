"""The report's pictures, as PNG files in memory.

0 is white in all of them: the page inverts them in dark mode, where 0 becomes the dark background.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._heads import show_heads
from ..report.units import plural
from .letters import fonts_for, in_pictures
from .report import LayerReport, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MAP = "Blues"
_DPI = 120
_WIDTH = 8.0  # inches
_ACROSS = 3  # heat maps of heads side by side
_LABELLED = 24  # up to so many tokens have their names at the axes
_NUMBERED = 16  # up to so many columns have their numbers in the cells
_LEAST_TOP = 0.1  # of the colours of shares: small ones, which differ by little, look alike


class Picture(NamedTuple):
    """A file of the report."""

    name: str
    layer: int | None  # None: of all layers
    caption: str
    png: bytes


def draw(report: Report, warn: Callable[[str], None]) -> Iterator[Picture]:
    """All pictures, in the order of the page. `warn` is told of letters that no font has."""
    families, boxes = fonts_for(report.recording.tokens or [])
    if boxes:
        warn(
            f"no font here has {plural(len(boxes), 'letter')} of the tokens, such as {boxes[0]}: "
            "boxes in the pictures. Install a font with them, such as one of the Noto fonts."
        )
    yield _finish(
        families, "overview.png", None, "One cell a head: layers down, heads across.", lambda: _overview(report)
    )
    for layer in report.layers:
        for name, caption, draw_layer in _OF_A_LAYER:
            yield _finish(
                families,
                f"layer{layer.number}-{name}.png",
                layer.number,
                caption,
                partial(draw_layer, report, layer),
            )


def _finish(families: list[str], name: str, layer: int | None, caption: str, make: Callable[[], Figure]) -> Picture:
    """`families`: of fonts for letters that the usual one lacks."""
    from matplotlib import rc_context, rcParams

    file = io.BytesIO()
    with rc_context({"font.family": [*rcParams["font.family"], *families]}):
        save_png(make(), file)
    return Picture(name, layer, caption, file.getvalue())


def save_png(figure: Figure, file: Path | io.BytesIO) -> None:
    with warnings.catch_warnings():
        # A letter that no font has is drawn as a box; a line for each of them would help nobody.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="png", dpi=_DPI)


def _new_figure(height: float, *, arranged: bool = True) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained" if arranged else None)
    FigureCanvasAgg(figure)
    return figure


def _overview(report: Report) -> Figure:
    stack = report.layers
    panels = [
        ("entropy, share of the largest", [layer.statistics.entropy_share for layer in stack], "{:.0%}"),
        ("mean distance, tokens", [layer.statistics.distance for layer in stack], "{:.1f}"),
        ("weight on the first key", [layer.statistics.received[:, 0] for layer in stack], "{:.0%}"),
        ("change of the layer's output without the head", [layer.output_change for layer in stack], "{:.0%}"),
    ]
    changes = [layer.embedding_change for layer in stack if layer.embedding_change is not None]
    if changes:
        panels.append(("change of the embedding without the head (cosine distance)", changes, "{:.2g}"))
    figure = _new_figure(len(panels) * (0.85 + 0.22 * len(stack)))
    figure.supxlabel("head", fontsize=8)
    for ax, (title, rows, form) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        grid = np.array(rows)
        largest = float(grid.max())
        shares = form.endswith("%}")
        if shares and largest < _LEAST_TOP:
            form = "{:.1%}"
        _grid(figure, ax, grid, form, top=max(largest, _LEAST_TOP) if shares else largest)
        ax.set_title(title, fontsize=9)
        ax.set_yticks(range(len(stack)), [f"layer {layer.number}" for layer in stack], fontsize=7)
    return figure


def _grid(figure: Figure, ax: Axes, grid: np.ndarray, form: str, *, top: float) -> None:
    """Numbers as colours, and as numbers too where there is room."""
    image = ax.imshow(grid, cmap=_MAP, vmin=0, vmax=max(top, 1e-12), aspect="auto", interpolation="nearest")
    ax.tick_params(labelsize=7, length=2)
    if grid.shape[1] > _NUMBERED:
        _whole_ticks(ax.xaxis)
        figure.colorbar(image, ax=ax, fraction=0.03, pad=0.01).ax.tick_params(labelsize=7)
        return
    ax.set_xticks(range(grid.shape[1]))
    for (row, column), value in np.ndenumerate(grid):
        colour = "white" if value > 0.6 * top else "black"
        ax.text(column, row, form.format(value), ha="center", va="center", fontsize=6.5, color=colour)


def _whole_ticks(axis: Axis, most: int = 10) -> None:
    """Tokens and heads have no halves."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True))


def _weights(report: Report, layer: LayerReport) -> Figure:
    statistics, tokens = layer.statistics, report.recording.tokens
    heads, rows, columns = statistics.heat.shape
    titles = [in_pictures(f"head {head}: {layer.habits[head]}") for head in range(heads)]
    if tokens and len(tokens) == columns and columns <= _LABELLED:
        queries, keys = tokens[-rows:], tokens
        return show_heads(
            statistics.heat, queries, key_tokens=keys, titles=titles, max_tokens=columns, columns=_ACROSS, cmap=_MAP
        )
    return _many_maps(statistics.heat, titles, (0, statistics.key_edges[-1], statistics.query_edges[-1], 0))


def _many_maps(heat: np.ndarray, titles: list[str], extent: tuple[int, int, int, int]) -> Figure:
    """Small heat maps at places counted out in inches: finding them by layout takes seconds for 32 heads."""
    from matplotlib.colors import PowerNorm

    heads = len(heat)
    across = min(_ACROSS, heads)
    down = -(-heads // across)
    left, right, bottom, over, gap = 0.65, 0.9, 0.45, 0.3, 0.15
    side = min(3.0, (_WIDTH - left - right - (across - 1) * gap) / across)
    height = bottom + down * (side + over)
    figure = _new_figure(height, arranged=False)

    def place(x: float, y: float, width: float) -> Axes:
        return figure.add_axes((x / _WIDTH, y / height, width / _WIDTH, side / height))

    norm = PowerNorm(0.5, 0, max(float(heat.max()), 1e-12))
    for head, title in enumerate(titles):
        row, column = divmod(head, across)
        ax = place(left + column * (side + gap), bottom + (down - 1 - row) * (side + over), side)
        image = ax.imshow(heat[head], cmap=_MAP, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
        ax.set_title(_clip(title, 34), fontsize=7, pad=5, parse_math=False)
        ax.tick_params(labelsize=6, length=2, labelbottom=head + across >= heads, labelleft=column == 0)
        for axis in (ax.xaxis, ax.yaxis):
            _whole_ticks(axis, 4)
        for spine in ax.spines.values():  # which would hide a line of cells at the border, such as a first key
            spine.set_position(("outward", 2))
        if column == 0:
            ax.set_ylabel("query", fontsize=7)
        if head + across >= heads:
            ax.set_xlabel("key", fontsize=7)
    bar = figure.colorbar(image, cax=place(left + across * (side + gap), bottom + (down - 1) * (side + over), 0.12))
    bar.ax.tick_params(labelsize=6)
    bar.set_label("share of the query's weight in the cell", fontsize=7)
    return figure


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _keys(report: Report, layer: LayerReport) -> Figure:
    """Which keys each head's weight goes to."""
    edges = layer.statistics.key_edges
    received = np.add.reduceat(layer.statistics.received, edges[:-1], axis=1)
    # The root shows small shares beside a key that takes nearly all.
    return _along(report, received, edges, "key", "share of weight", power=0.5, top=max(float(received.max()), 1e-12))


def _entropy(report: Report, layer: LayerReport) -> Figure:
    """Where in the text a head looks around, and where it knows."""
    statistics = layer.statistics
    edges = statistics.query_edges
    return _along(report, statistics.entropy_profile, edges, "query", "share of largest", power=1, top=1)


def _along(
    report: Report, grid: np.ndarray, edges: np.ndarray, axis: str, label: str, *, power: float, top: float
) -> Figure:
    """Heads down, the text across."""
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    heads, columns = grid.shape
    figure = _new_figure(0.9 + 0.17 * heads + 0.5 * bool(report.recording.tokens))
    ax = figure.subplots()
    norm = PowerNorm(power, 0, top)
    colours = colormaps[_MAP].with_extremes(bad="lightgrey")
    tokens = report.recording.tokens
    named = tokens is not None and edges[-1] == columns <= 3 * _LABELLED
    extent = (-0.5, columns - 0.5) if named else (0, int(edges[-1]))
    image = ax.imshow(
        grid, cmap=colours, norm=norm, extent=(*extent, heads - 0.5, -0.5), aspect="auto", interpolation="nearest"
    )
    if named and tokens:
        ax.set_xticks(range(columns), [_clip(token, 12) for token in tokens[-columns:]], rotation=90, parse_math=False)
    else:
        _whole_ticks(ax.xaxis)
        ax.set_xlabel(axis, fontsize=7)
    _name_heads(ax, heads)
    ax.tick_params(labelsize=7 if columns <= 2 * _LABELLED else 5.5, length=2)
    bar = figure.colorbar(image, ax=ax, fraction=0.03, pad=0.01)
    bar.ax.tick_params(labelsize=6)
    bar.set_label(label, fontsize=7)
    return figure


def _name_heads(ax: Axes, heads: int) -> None:
    ax.set_ylabel("head", fontsize=7)
    ax.set_yticks(range(0, heads, 1 if heads <= 2 * _NUMBERED else 4))


def _distances(report: Report, layer: LayerReport) -> Figure:
    """The weight by distance, in classes that double."""
    statistics = layer.statistics
    offsets = statistics.first_offset + np.arange(statistics.by_offset.shape[1])
    classes = np.frexp(np.abs(offsets))[1]  # 0, 1, 2..3, 4..7, ...
    grid = np.stack([np.bincount(classes, head) for head in statistics.by_offset])
    figure = _new_figure(0.8 + 0.2 * len(grid))
    ax = figure.subplots()
    _grid(figure, ax, grid, "{:.0%}", top=float(grid.max()))
    names = ["0", "1", *(f"{1 << c - 1}-{(1 << c) - 1}" for c in range(2, grid.shape[1]))]
    names = names[: grid.shape[1]]  # a single token has no distance 1
    ax.set_xticks(range(len(names)), names, rotation=30 if len(names) > 10 else 0)
    ax.set_xlabel("distance in tokens", fontsize=7)
    _name_heads(ax, len(layer.habits))
    return figure


def _similarity(report: Report, layer: LayerReport) -> Figure:
    figure = _new_figure(min(_WIDTH, 1 + 0.4 * len(layer.habits)))
    ax = figure.subplots()
    _grid(figure, ax, layer.statistics.similarity, "{:.2f}", top=1)
    ax.set_aspect("equal")
    ax.set_xlabel("head", fontsize=7)
    _name_heads(ax, len(layer.habits))
    return figure


_OF_A_LAYER = (
    ("weights", "Weights: queries down, keys across.", _weights),
    ("keys", "Which keys attract: the share of each head's weight.", _keys),
    ("distance", "How far the weight goes.", _distances),
    ("entropy", "Entropy along the text: 0 looks at one key, 1 at all alike.", _entropy),
    ("similarity", "Similarity of the heads: cosine of their weights; 1 is the same head twice.", _similarity),
)
