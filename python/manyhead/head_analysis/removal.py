"""What a layer's output loses when one head is set to zero."""

from __future__ import annotations

import numpy as np


def output_change(out: np.ndarray, w_o: np.ndarray | None) -> np.ndarray:
    """[heads]: the norm of the change as a share of the norm of the layer's output.

    out [heads, len, v_dim]; w_o [hidden, heads * v_dim], as torch.nn.Linear has it. Without w_o the output is the
    concatenation of the heads, and the squares of the shares add up to 1. With it heads may cancel: more than 1 means
    that the others take back what this one adds.
    """
    heads, _, v_dim = out.shape
    if w_o is None:
        parts = np.array([np.linalg.norm(head.astype(np.float64)) for head in out])
        return parts / max(float(np.linalg.norm(parts)), np.finfo(np.float64).tiny)
    projected = (out[h].astype(w_o.dtype) @ w_o[:, h * v_dim : (h + 1) * v_dim].T for h in range(heads))
    total = np.zeros((out.shape[1], w_o.shape[0]))
    parts = np.zeros(heads)
    for head, part in enumerate(projected):
        total += part
        parts[head] = np.linalg.norm(part)
    return parts / max(float(np.linalg.norm(total)), np.finfo(np.float64).tiny)
