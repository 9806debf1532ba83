"""show_heads: attention weights as a picture, one heat map per head.

Independent of the library itself: it takes any array of weights. matplotlib is an optional dependency and imported
inside the function; pyplot and its global state are never touched, so this works without a display.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Sizes in inches and points. A rotated 8 pt label is 0.11 in wide, so a cell of 0.15 in keeps neighbours apart.
_CELL = 0.15
_MIN_SIDE = 1.9
_FONT = 8
_TITLE_FONT = 9
_CHARACTER = 0.0078  # width of a character in inches, per point
_LINE = 0.018  # height of a line in inches, per point
_MAX_LABEL = 16


def show_heads(
    weights: Any,
    tokens: Sequence[str],
    *,
    key_tokens: Sequence[str] | None = None,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    layer: int | None = None,
    batch: int = 0,
    max_tokens: int = 40,
    columns: int | None = None,
    shared_scale: bool = True,
    cmap: str = "viridis",
) -> Figure:
    """Draw attention weights as one heat map per head: queries down, keys across.

    Args:
        weights: ``[heads, q_len, kv_len]``, or ``[batch, heads, q_len, kv_len]`` of which entry ``batch`` is drawn.
            Anything NumPy can read. NaN cells are drawn grey.
        tokens: ``q_len`` labels of the queries, and of the keys unless ``key_tokens`` is given. Labels are shown as
            they are (no math markup); those longer than 16 characters are shortened.
        key_tokens: ``kv_len`` labels of the keys, for cross-attention.
        titles: one title per head; default ``head 0``, ``head 1``, ...
        title: a line over the whole figure, such as the sentence.
        layer: a number to put in front of ``title``.
        batch: which batch entry to draw when ``weights`` has four dimensions.
        max_tokens: draw at most this many queries and keys, the first ones; a line under the figure says so.
        columns: heads per row; default: as square a grid as possible, at most 4 wide.
        shared_scale: one colour scale from 0 to the largest weight drawn, with one colour bar. ``False`` gives each
            head a scale and a bar of its own.
        cmap: name of a matplotlib colour map.

    Returns:
        A ``matplotlib.figure.Figure`` with one axes per head (then those of the colour bars). Save it with
        ``figure.savefig("heads.png")``.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: the weights are not real numbers.
        ValueError: shapes, numbers of labels or titles do not match, or an option is out of range; the text says
            which, what it was and what was expected.
    """
    grid = _pick_weights(weights, batch)
    heads, q_len, kv_len = grid.shape
    q_labels = _check_labels("tokens", tokens, q_len, "q_len")
    if key_tokens is not None:
        k_labels = _check_labels("key_tokens", key_tokens, kv_len, "kv_len")
    elif q_len == kv_len:
        k_labels = q_labels
    else:
        raise ValueError(f"key_tokens is missing: weights has q_len = {q_len} and kv_len = {kv_len}")
    if titles is None:
        titles = [f"head {head}" for head in range(heads)]
    elif isinstance(titles, str) or len(titles) != heads:
        raise ValueError(f"titles has {len(titles)} entries, must have one per head: {heads}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, must be at least 1")
    if columns is None:
        columns = min(4, int(np.ceil(np.sqrt(heads))))
    elif columns < 1:
        raise ValueError(f"columns is {columns}, must be at least 1")
    columns = min(columns, heads)

    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("show_heads needs matplotlib: `pip install matplotlib`") from error
    if cmap not in colormaps:
        raise ValueError(f"cmap is {cmap!r}, must be the name of a matplotlib colour map such as 'viridis'")

    grid = grid[:, :max_tokens, :max_tokens]
    q_labels, k_labels = q_labels[:max_tokens], k_labels[:max_tokens]
    rows = -(-heads // columns)
    side_x = max(_MIN_SIDE, _CELL * len(k_labels))
    side_y = max(_MIN_SIDE, _CELL * len(q_labels))
    # Titles grow with the heat maps: large figures are looked at from further away.
    title_font = _TITLE_FONT * min(1.8, max(1.0, side_x / 3))
    room_x = 0.3 + _CHARACTER * _FONT * max(map(len, q_labels)) + (0.0 if shared_scale else 0.6)
    wrap = max(12, int((side_x + 0.5 * room_x) / (_CHARACTER * title_font)))
    titles = ["\n".join(textwrap.fill(line, wrap) for line in str(text).splitlines()) for text in titles]
    title_lines = 1 + max(text.count("\n") for text in titles)
    room_y = 0.2 + _CHARACTER * _FONT * max(map(len, k_labels)) + _LINE * title_font * title_lines
    width = columns * (side_x + room_x) + (0.8 if shared_scale else 0.2)

    top_font = 1.2 * title_font
    top_lines = _top_lines(title, layer, max(20, int(width / (_CHARACTER * top_font))))
    notes = []
    if q_len > max_tokens:
        notes.append(f"the first {max_tokens} of {q_len} queries")
    if kv_len > max_tokens:
        notes.append(f"the first {max_tokens} of {kv_len} keys")
    height = rows * (side_y + room_y) + _LINE * (top_font * (len(top_lines) + 0.5) + 2 * title_font * bool(notes))

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for empty in axes.flat[heads:]:
        empty.remove()
    colours = colormaps[cmap].with_extremes(bad="lightgrey")
    # A smallest top keeps the scale valid where every weight is 0.
    top = max(float(np.nanmax(grid, initial=0.0)), 1e-6)
    drawn = list(axes.flat[:heads])
    for head, ax in enumerate(drawn):
        head_top = top if shared_scale else max(float(np.nanmax(grid[head], initial=0.0)), 1e-6)
        image = ax.imshow(grid[head], vmin=0.0, vmax=head_top, cmap=colours, aspect="auto", interpolation="nearest")
        ax.set_title(titles[head], fontsize=title_font, parse_math=False)
        ax.set_xticks(range(len(k_labels)), k_labels, rotation=90, fontsize=_FONT, parse_math=False)
        ax.set_yticks(range(len(q_labels)), q_labels, fontsize=_FONT, parse_math=False)
        ax.tick_params(length=2, pad=1.5)
        if not shared_scale:
            figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02).ax.tick_params(labelsize=_FONT)
    if shared_scale:
        bar = figure.colorbar(image, ax=drawn, location="right", fraction=0.04, pad=0.01, shrink=0.6, aspect=30)
        bar.set_label("attention weight", fontsize=title_font)
        bar.ax.tick_params(labelsize=title_font - 1)
    if top_lines:
        figure.suptitle("\n".join(top_lines), fontsize=top_font, parse_math=False)
    if notes:
        figure.supxlabel("Drawn: " + " and ".join(notes) + ".", fontsize=title_font)
    return figure


def _pick_weights(weights: Any, batch: int) -> np.ndarray:
    """The weights to draw as float64 [heads, q_len, kv_len], none of them 0."""
    array = np.asarray(weights)
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.type is not np.void:
        array = array.astype(np.float64)  # a type that NumPy does not know itself, such as bfloat16
    if array.dtype.kind not in "fiub":
        raise TypeError(f"weights holds {array.dtype}, must hold real numbers")
    if array.ndim == 4:
        if not 0 <= batch < array.shape[0]:
            raise ValueError(f"batch is {batch}, must be 0..{array.shape[0] - 1}: weights has shape {array.shape}")
        array = array[batch]
    elif array.ndim != 3:
        raise ValueError(
            f"weights has shape {array.shape}, must be [heads, q_len, kv_len] or [batch, heads, q_len, kv_len]"
        )
    elif batch != 0:
        raise ValueError(f"batch is {batch}, but weights has no batch dimension: its shape is {array.shape}")
    if 0 in array.shape:
        raise ValueError(f"weights has nothing to draw: heads, q_len, kv_len are {array.shape}")
    return array.astype(np.float64)


def _check_labels(name: str, labels: Sequence[str], expected: int, dimension: str) -> list[str]:
    """The labels in a form that stays readable on an axis."""
    if isinstance(labels, (str, bytes)):
        raise ValueError(f"{name} is one string, must be a sequence of {expected} labels")
    if len(labels) != expected:
        raise ValueError(f"{name} has {len(labels)} entries, must have {dimension} of weights = {expected}")
    return [_short(" ".join(str(label).split())) for label in labels]


def _short(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else label[: _MAX_LABEL - 1] + "\u2026"


def _top_lines(title: str | None, layer: int | None, wrap: int) -> list[str]:
    """The lines over the figure: at most two."""
    parts = ([f"layer {layer}"] if layer is not None else []) + ([" ".join(title.split())] if title else [])
    return textwrap.wrap(": ".join(parts), wrap, max_lines=2, placeholder=" ...")
