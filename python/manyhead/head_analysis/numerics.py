"""The few functions a BERT encoder needs besides attention, in float32 without temporary float64 arrays, in place."""

from __future__ import annotations

import numpy as np

# P of erfc(z) = exp(-z P(z)), fitted on 0..6 (weighted by z erfc(z)), highest power last. Through it GELU needs one
# polynomial and one exp. Largest error against float64: 8.1e-8 times max(1, |x|), which is float32's own rounding.
_ERFC = np.array(
    [1.1283793, 0.63661611, 0.10279921, -0.019217143, -5.8781542e-05, 0.0015767602, -0.00058795069, 0.00010602666,
     -8.0438231e-06],
    dtype=np.float32,
)  # fmt: skip
_CHUNK = 1 << 16  # floats: a piece and its temporaries stay in the L2 cache, twice as fast as whole arrays


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x) with the exact normal distribution (not the tanh form), in place; x is contiguous float32.

    With z = |x| / sqrt(2) it is max(x, 0) - |x| erfc(z) / 2: nothing cancels on either side of 0.
    """
    flat = x.reshape(-1)
    size = min(_CHUNK, flat.size)
    magnitude, z, power = (np.empty(size, np.float32) for _ in range(3))
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        a, t, p = magnitude[: part.size], z[: part.size], power[: part.size]
        np.abs(part, out=a)
        np.minimum(a, np.float32(6 * np.sqrt(2)), out=a)  # erfc(6) is 2e-17: from there on nothing changes
        np.multiply(a, np.float32(np.sqrt(0.5)), out=t)
        p.fill(_ERFC[-1])
        for coefficient in _ERFC[-2::-1]:
            p *= t
            p += coefficient
        p *= t
        np.negative(p, out=p)
        np.exp(p, out=p)
        p *= a
        p *= np.float32(0.5)
        np.maximum(part, 0, out=part)
        part -= p
    return x


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """Each row of the last dimension to mean 0 and variance 1, then times weight plus bias; in place."""
    x -= x.mean(axis=-1, keepdims=True)
    variance = np.square(x).mean(axis=-1, keepdims=True)
    x /= np.sqrt(variance + x.dtype.type(eps))
    x *= weight
    x += bias
    return x
