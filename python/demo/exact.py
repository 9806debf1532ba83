"""The same model in float64, one sentence at a time, written as the textbook has it: what the demo checks against.

It shares nothing with the fast path but the weights: no padding, no packed projections, no own approximations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

_erf = np.frompyfunc(math.erf, 1, 1)


def exact_embedding(
    weights: Mapping[str, np.ndarray], ids: Sequence[int], *, layers: int, heads: int, eps: float
) -> np.ndarray:
    """The unit vector [hidden] of one sentence."""

    def tensor(name: str) -> np.ndarray:
        return weights[name].astype(np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensor(f"{name}.weight").T + tensor(f"{name}.bias")

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return scaled * tensor(f"{name}.weight") + tensor(f"{name}.bias")

    x = weights["embeddings.word_embeddings.weight"][list(ids)].astype(np.float64)
    x = x + tensor("embeddings.position_embeddings.weight")[: len(ids)]
    x = x + tensor("embeddings.token_type_embeddings.weight")[0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        q, k, v = (linear(x, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
        head_dim = q.shape[1] // heads
        results = []
        for head in range(heads):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            scores = q[:, columns] @ k[:, columns].T / math.sqrt(head_dim)
            exp = np.exp(scores - scores.max(axis=1, keepdims=True))
            results.append(exp / exp.sum(axis=1, keepdims=True) @ v[:, columns])
        x = norm(x + linear(np.hstack(results), f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        inner = linear(x, f"{name}.intermediate.dense")
        inner = inner * 0.5 * (1.0 + _erf(inner / math.sqrt(2.0)).astype(np.float64))
        x = norm(x + linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)
