"""What each head of one layer attends to, in numbers; the matrix of weights never exists as a whole.

The first pass is one plain call of manyhead.attention, which gives the outputs and, for every row, the logarithm of its
softmax denominator (lse). The second goes over tiles of queries x keys, asks the library for the tile's scores alone,
and forms the weights exp(score - lse). Each tile is added to running sums: O(heads * tile^2 + heads * length) memory.

Most of what is reported comes from one sum for each relative position j - i, the diagonals of the matrix: mean
distance, reach, and the shares of the token itself, the previous and the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .._attention import attention

_TILE_WEIGHTS = 1 << 18  # weights of all heads in a tile: 1 MiB in float32, so that its passes stay in the L2 cache
_REACH = 0.9
_NOTHING = -1e4  # in place of -inf, where a score is masked: exp() of it is 0, and 0 times it is 0


@dataclass(frozen=True)
class HeadStatistics:
    """One layer. Arrays begin with [heads]; shares are of all weight of a head, and add up to 1."""

    entropy: np.ndarray  # mean over the rows, in nats
    entropy_share: np.ndarray  # of log(keys that the row may attend), mean over the rows that may attend two or more
    entropy_profile: np.ndarray  # [heads, query cells] entropy_share along the queries; NaN where there is no such row
    distance: np.ndarray  # mean |i - j|, in tokens
    reach: np.ndarray  # so many tokens to either side hold 90 % of the weight
    by_offset: np.ndarray  # [heads, q_len + kv_len - 1] share of each relative position, the first one first_offset
    first_offset: int
    received: np.ndarray  # [heads, kv_len] share of each key
    heat: np.ndarray  # [heads, query cells, key cells] share of a query's weight that goes to the keys of the cell
    similarity: np.ndarray  # [heads, heads] cosine of the two matrices of weights
    query_edges: np.ndarray  # where the cells begin and end
    key_edges: np.ndarray

    def at_offset(self, offset: int) -> np.ndarray:
        """Share of the keys `offset` after the query (before it, where negative)."""
        index = offset - self.first_offset
        return self.by_offset[:, index] if 0 <= index < self.by_offset.shape[1] else np.zeros(len(self.entropy))

    def top_keys(self, head: int, count: int) -> list[int]:
        """The keys that receive most, the strongest first."""
        return np.argsort(-self.received[head], kind="stable")[:count].tolist()


def head_statistics(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    scale: float | None = None,
    max_cells: int = 128,
    tile: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[HeadStatistics, np.ndarray]:
    """Measures q [heads, q_len, head_dim] against k [kv_heads, kv_len, head_dim] and v [kv_heads, kv_len, v_dim].

    Returns the statistics, and the heads' outputs [heads, q_len, v_dim] as the first pass gave them. The last query
    stands at the last key: position i + kv_len - q_len. `tile` is the side of a tile; results depend on it by rounding
    only. `progress` is told the share of the work that is done.
    """
    heads, q_len, _ = q.shape
    kv_len = k.shape[1]
    tile = tile or max(32, min(512, int((_TILE_WEIGHTS / heads) ** 0.5) // 32 * 32))
    first = attention(q[None], k[None], v[None], causal=causal, align="bottom_right", scale=scale, return_lse=True)
    positions = np.arange(q_len) + kv_len - q_len
    sums = _Sums(heads, positions, kv_len, max_cells)
    lse = np.where(np.isneginf(first.lse[0]), 0, first.lse[0])  # a row without keys: no weight, rather than NaN
    for rows, keys, done in _tiles(q_len, kv_len, tile, kv_len - q_len if causal else None):
        sums.add(_log_weights(q, k, rows, keys, lse, causal, scale, kv_len - q_len), rows, keys)
        progress(done)
    return sums.finish(causal), first.out[0]


def _tiles(q_len: int, kv_len: int, tile: int, offset: int | None) -> Iterator[tuple[slice, slice, float]]:
    """Tiles that hold weights, and the share of the work that is done with each; `offset` where the mask is causal."""
    blocks = []
    for start in range(0, q_len, tile):
        stop = min(start + tile, q_len)
        visible = kv_len if offset is None else min(kv_len, max(0, stop + offset))
        blocks += [(slice(start, stop), slice(key, min(key + tile, kv_len))) for key in range(0, visible, tile)]
    for number, (rows, keys) in enumerate(blocks, 1):
        yield rows, keys, number / len(blocks)


def _log_weights(
    q: np.ndarray,
    k: np.ndarray,
    rows: slice,
    keys: slice,
    lse: np.ndarray,
    causal: bool,
    scale: float | None,
    offset: int,
) -> np.ndarray:
    """The logarithms of the weights of a tile, [heads, rows, keys]."""
    # Where the diagonal does not pass through, the tile needs no mask, and all such tiles share one plan.
    crossed = causal and rows.start + offset < keys.stop - 1
    no_values = np.zeros((1, k.shape[0], keys.stop - keys.start, 1), k.dtype)
    mask = {"causal": True, "q_offset": rows.start + offset - keys.start} if crossed else {}
    scores = attention(
        q[None, :, rows], k[None, :, keys], no_values, scale=scale, return_scores="biased", **mask
    ).scores[0]
    scores -= lse[:, rows, None]
    if crossed:
        np.maximum(scores, _NOTHING, out=scores)
    return scores


class _Sums:
    """Running sums over the tiles, in float64."""

    def __init__(self, heads: int, positions: np.ndarray, kv_len: int, max_cells: int) -> None:
        q_len = len(positions)
        self.positions = positions
        self.query_edges = _edges(q_len, max_cells)
        self.key_edges = _edges(kv_len, max_cells)
        self.entropy = np.zeros((heads, q_len))
        self.received = np.zeros((heads, kv_len))
        self.by_offset = np.zeros((heads, q_len + kv_len - 1))
        self.first_offset = -int(positions[-1])
        self.heat = np.zeros((heads, len(self.query_edges) - 1, len(self.key_edges) - 1))
        self.products = np.zeros((heads, heads))
        self.padded = np.zeros((heads, 0), np.float32)

    def add(self, log_weights: np.ndarray, rows: slice, keys: slice) -> None:
        weights = np.exp(log_weights)
        heads, height, width = weights.shape
        self.entropy[:, rows] -= np.einsum("hij,hij->hi", weights, log_weights)
        self.received[:, keys] += weights.sum(axis=1)
        flat = weights.reshape(heads, -1)
        self.products += flat @ flat.T
        first = int(keys.start - self.positions[rows.stop - 1] - self.first_offset)
        self.by_offset[:, first : first + height + width - 1] += self._diagonals(weights)

        to_row, row_starts = _cells(self.query_edges, rows)
        to_key, key_starts = _cells(self.key_edges, keys)
        heat = np.add.reduceat(np.add.reduceat(weights, key_starts, axis=2), row_starts, axis=1)
        self.heat[:, to_row, to_key] += heat

    def _diagonals(self, weights: np.ndarray) -> np.ndarray:
        """Sums along the diagonals j - i = 1 - rows .. keys - 1 of each head.

        With as many zeros in front of each row as there are rows, reading the same memory in rows that are longer by
        one moves row i to the left by i: diagonals become columns.
        """
        heads, height, width = weights.shape
        line = height + width
        size = height * (line + 1)
        if self.padded.shape[1] != size or self.padded.dtype != weights.dtype:
            self.padded = np.zeros((heads, size), weights.dtype)
        self.padded[:, : height * line].reshape(heads, height, line)[:, :, height:] = weights
        return self.padded.reshape(heads, height, line + 1).sum(axis=1)[:, 1:line]

    def finish(self, causal: bool) -> HeadStatistics:
        kv_len = self.received.shape[1]
        visible = np.clip(self.positions + 1, 0, kv_len) if causal else np.full(len(self.positions), kv_len)
        rows = np.maximum(np.count_nonzero(visible), 1)
        several = visible > 1
        np.maximum(self.entropy, 0, out=self.entropy)  # rounding leaves less where one key has all
        share = np.divide(self.entropy, np.log(np.maximum(visible, 2)), where=several, out=np.zeros_like(self.entropy))
        starts = self.query_edges[:-1]
        in_cell = np.add.reduceat(several, starts, dtype=np.int64)
        profile = np.full((len(share), len(starts)), np.nan)
        np.divide(np.add.reduceat(share, starts, axis=1), in_cell, where=in_cell > 0, out=profile)

        by_offset = self.by_offset / rows
        offsets = np.abs(self.first_offset + np.arange(by_offset.shape[1]))
        by_distance = np.stack([np.bincount(offsets, head) for head in by_offset])
        norms = np.sqrt(np.diagonal(self.products))
        lengths = np.outer(norms, norms)
        queries = np.add.reduceat(visible > 0, starts, dtype=np.int64)
        return HeadStatistics(
            entropy=self.entropy.sum(axis=1) / rows,
            entropy_share=share.sum(axis=1) / max(1, np.count_nonzero(several)),
            entropy_profile=profile,
            distance=by_offset @ offsets,
            # The sums are of rounded weights: without the tolerance 0.9 of ten equal shares would need all ten.
            reach=(np.cumsum(by_distance, axis=1) < _REACH - 1e-5).sum(axis=1),
            by_offset=by_offset,
            first_offset=self.first_offset,
            received=self.received / rows,
            heat=self.heat / np.maximum(queries, 1)[:, None],
            similarity=np.divide(self.products, lengths, where=lengths > 0, out=np.zeros_like(lengths)),
            query_edges=self.query_edges,
            key_edges=self.key_edges,
        )


def _edges(length: int, cells: int) -> np.ndarray:
    """The edges of at most `cells` cells that differ in size by at most one token; each token its own if it can be."""
    cells = min(length, cells)
    return np.arange(cells + 1) * length // cells


def _cells(edges: np.ndarray, part: slice) -> tuple[slice, np.ndarray]:
    """The cells that a part of the tokens touches, and where each begins, counted from the part's first token."""
    first = int(np.searchsorted(edges, part.start, side="right")) - 1
    last = int(np.searchsorted(edges, part.stop, side="left"))
    return slice(first, last), np.maximum(edges[first:last] - part.start, 0)
