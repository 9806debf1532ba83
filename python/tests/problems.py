"""Random problems for manyhead.attention: shapes, options, memory layouts and the comparison with the reference."""

from __future__ import annotations

from typing import Any

import manyhead
import ml_dtypes
import numpy as np
import reference

DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# (rtol = atol of outputs, atol of log-sum-exps); the rounding of the inputs is in the reference too.
TOLERANCE = {"f32": (2e-5, 2e-5), "f64": (1e-10, 1e-10), "f16": (2e-3, 2e-4), "bf16": (1.6e-2, 2e-4)}


def relayout(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """The same values in other memory: any order of dimensions, gaps, steps, some dimensions backwards."""
    if array.ndim == 0:
        return np.array(array)
    order = rng.permutation(array.ndim)
    steps = rng.choice([1, 1, 2, 3], array.ndim)
    sizes = [array.shape[axis] * steps[axis] + rng.integers(0, 3) for axis in order]
    memory = np.full(sizes, 99, array.dtype)
    view = memory.transpose(np.argsort(order))
    view = view[tuple(slice(0, size * step, step) for size, step in zip(array.shape, steps, strict=True))]
    view = view[tuple(slice(None, None, rng.choice([1, 1, -1])) for _ in range(array.ndim))]
    view[...] = array
    return view


def random_tensors(rng: np.random.Generator, dtype: str, **fixed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sizes = {
        "batch": rng.choice([1, 1, 2, 3]),
        "kv_heads": rng.choice([1, 2, 3]),
        "group": rng.choice([1, 1, 2, 4]),
        "q_len": rng.choice([1, 2, 5, 17, 40]),
        "kv_len": rng.choice([1, 3, 16, 37, 130]),
        "head_dim": rng.choice([1, 5, 8, 33, 64]),
        "v_dim": rng.choice([1, 7, 8, 32, 66]),
    } | fixed
    b, hk, sq, sk = (sizes[name] for name in ("batch", "kv_heads", "q_len", "kv_len"))
    shapes = (
        (b, hk * sizes["group"], sq, sizes["head_dim"]),
        (b, hk, sk, sizes["head_dim"]),
        (b, hk, sk, sizes["v_dim"]),
    )
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    return q, k, v


def broadcastable(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of any rank 1..4 that broadcasts to this one."""
    return tuple(1 if rng.random() < 0.4 else size for size in shape)[rng.integers(0, len(shape)) :]


OPTIONS = ("scale", "causal", "q_offset", "q_offsets", "window", "softcap", "mask", "bias", "key_mask", "seqused_k",
           "alibi", "sinks")  # fmt: skip


def random_options(rng: np.random.Generator, names: Any, q: np.ndarray, k: np.ndarray) -> dict[str, Any]:
    """Values for the named options."""
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    shape = (batch, heads, q_len, kv_len)
    options: dict[str, Any] = {}
    if "scale" in names:
        options["scale"] = float(rng.choice([0.3, 0.0, -0.2]))
    if "causal" in names:
        options["causal"] = True
    if "q_offset" in names:
        options["q_offset"] = int(rng.integers(-q_len, kv_len + 1))
    if "q_offsets" in names:
        options["q_offset"] = rng.integers(-q_len, kv_len + 1, batch).astype(rng.choice([np.int32, np.int64]))
    if "window" in names:
        options["window"] = (int(rng.integers(-1, kv_len + 1)), int(rng.integers(-1, kv_len + 1)))
    if "softcap" in names:
        options["softcap"] = float(rng.choice([0.5, 3.0, 30.0]))
    if "mask" in names:
        mask = rng.random(broadcastable(rng, shape)) < 0.7
        options["attn_mask"] = mask if rng.random() < 0.7 else mask.astype(np.uint8) * 2
    if "bias" in names:
        bias = rng.standard_normal(broadcastable(rng, shape))
        bias[rng.random(bias.shape) < 0.2] = -np.inf
        options["attn_bias"] = bias.astype(DTYPES[str(rng.choice(list(DTYPES)))])
    if "key_mask" in names:
        options["key_mask"] = rng.random((batch, kv_len)) < 0.7
    if "seqused_k" in names:
        options["seqused_k"] = rng.integers(0, kv_len + 1, batch).astype(rng.choice([np.int32, np.int64]))
    if "alibi" in names:
        options["alibi_slopes"] = rng.random((batch, heads) if rng.random() < 0.5 else heads)
        options["alibi_mode"] = str(rng.choice(["abs", "signed"]))
    if "sinks" in names:
        options["sinks"] = rng.standard_normal(heads)
    if isinstance(options.get("q_offset"), np.ndarray) and "seqused_k" in options:
        options["seqused_k"] = options["seqused_k"].astype(options["q_offset"].dtype)
    if {"causal", "window", "alibi"} & set(names) and "q_offset" not in options:
        options["align"] = str(rng.choice(["top_left", "bottom_right"]))
    return options


def in_memory(rng: np.random.Generator, options: dict[str, Any]) -> dict[str, Any]:
    """The options with their arrays laid out in other ways."""
    return {name: relayout(rng, x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def close(result: Any, expected: np.ndarray, dtype: str, what: str = "out") -> None:
    rtol, lse_atol = TOLERANCE[dtype]
    loose = dtype in ("f16", "bf16") and what in ("weights", "column_sums", "scores", "lse")
    if what == "lse":
        rtol, atol = min(rtol, 2e-6), lse_atol
    else:  # the other results are f32 whatever the inputs are
        atol = rtol = TOLERANCE["f32"][0] if loose else rtol
    if what == "column_sums":
        atol *= 10
    assert result.shape == expected.shape, what
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol, atol, err_msg=what)


def check(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str, changed: Any = None, **options: Any) -> None:
    """All results of one call against the reference. `changed`: the same arrays and options in other memory."""
    expected = reference.attention(q, k, v, **options)
    (q_, k_, v_), given = changed if changed is not None else ((q, k, v), options)
    result = manyhead.attention(q_, k_, v_, return_lse=True, return_weights=True, return_column_sums=True,
                                return_scores="biased", **given)  # fmt: skip
    assert result.out.dtype == q.dtype
    close(result.out, expected.out, dtype)
    close(result.lse, expected.lse, dtype, "lse")
    close(result.weights, expected.weights, dtype, "weights")
    close(result.column_sums, expected.column_sums, dtype, "column_sums")
    close(result.scores, expected.biased, dtype, "scores")
