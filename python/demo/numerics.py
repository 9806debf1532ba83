"""Attention written plainly in NumPy, without temporary float64 arrays: what the demo times beside manyhead."""

from __future__ import annotations

import numpy as np


def numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention as one writes it in NumPy: two batched matrix products (its BLAS) and a softmax in place.

    q, k, v [batch, len, heads, head_dim], lengths [batch] keys in use (at least 1 each).
    Returns out [batch, len, heads, head_dim] (a view of [batch, heads, len, head_dim]) and the weights
    [batch, heads, len, len]. Rows past a length are computed like the others, as in every padded batch.
    """
    q, k, v = (array.transpose(0, 2, 1, 3) for array in (q, k, v))
    scores = np.matmul(q, k.transpose(0, 1, 3, 2))
    scores *= scores.dtype.type(1.0 / np.sqrt(q.shape[-1]))
    if (lengths < k.shape[2]).any():
        padding = np.arange(k.shape[2]) >= lengths[:, None]
        scores += np.where(padding, scores.dtype.type(-np.inf), scores.dtype.type(0))[:, None, None, :]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.matmul(scores, v).transpose(0, 2, 1, 3), scores


def numpy_attention_one_by_one(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The same for one sentence after the other, each cut to its length: no work on padding, more calls.

    Rows past a length are 0 in the result.
    """
    out = np.zeros(q.shape[:3] + v.shape[3:], q.dtype)
    for entry, length in enumerate(lengths):
        one = slice(entry, entry + 1)
        out[one, :length], _ = numpy_attention(q[one, :length], k[one, :length], v[one, :length], lengths[one])
    return out
