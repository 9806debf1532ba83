"""manyhead.merge_state and merge_states: parts of attention over disjoint keys make the whole."""

from __future__ import annotations

import manyhead
import ml_dtypes
import numpy as np
import pytest
import reference
from problems import DTYPES, TOLERANCE, random_tensors, relayout


def parts(dtype="f32", base="e", cuts=(0, 3, 3, 20, 37), **options):
    rng = np.random.default_rng(0)
    q, k, v = random_tensors(rng, dtype, batch=2, kv_heads=2, group=2, q_len=5, kv_len=37, head_dim=8, v_dim=7)
    done = [
        manyhead.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, lse_base=base, **options)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    whole = manyhead.attention(q, k, v, return_lse=True, lse_base=base, **options)
    return np.stack([x.out for x in done]), np.stack([x.lse for x in done]), whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", ["e", "2"])
def test_parts_make_the_whole(dtype, base):
    outs, lses, whole = parts(dtype, base)
    merged = manyhead.merge_states(outs, lses, lse_base=base)
    assert merged._fields == ("out", "lse") and merged.out.dtype == DTYPES[dtype]
    tolerance = TOLERANCE[dtype][0]
    np.testing.assert_allclose(merged.out.astype(float), whole.out.astype(float), tolerance, tolerance)
    np.testing.assert_allclose(merged.lse, whole.lse, 2e-6, 2e-5)
    out, lse = outs[0], lses[0]
    for i in range(1, len(outs)):
        out, lse = manyhead.merge_state(out, lse, outs[i], lses[i], lse_base=base)
    np.testing.assert_allclose(out.astype(float), whole.out.astype(float), 2 * tolerance, 2 * tolerance)
    np.testing.assert_allclose(lse, whole.lse, 2e-6, 2e-5)


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3), (4, 2, 5, 3), (4, 2, 3, 5, 3), (4, 2, 2, 3, 2, 3)], ids=str)
def test_any_number_of_dimensions_and_strides(shape):
    rng = np.random.default_rng(1)
    outs, lses = rng.standard_normal(shape), 5 * rng.standard_normal(shape[:-1])
    lses.reshape(4, -1)[2:, 0] = -np.inf
    lses[1] = -np.inf
    outs[1] = np.nan
    expected = reference.merge(outs, lses)
    out = relayout(rng, np.zeros(shape[1:])) if len(shape) <= 5 else np.zeros(shape[1:])
    result = manyhead.merge_states(relayout(rng, outs), relayout(rng, lses), out=out)
    assert result.out is out
    np.testing.assert_allclose(out, expected[0], 1e-12, 1e-12)
    np.testing.assert_allclose(result.lse, expected[1], 1e-12, 1e-12)
    pair = manyhead.merge_state(relayout(rng, outs[0]), relayout(rng, lses[0]), outs[2], lses[2])
    expected = reference.merge(outs[[0, 2]], lses[[0, 2]])
    np.testing.assert_allclose(pair.out, expected[0], 1e-12, 1e-12)
    np.testing.assert_allclose(pair.lse, expected[1], 1e-12, 1e-12)


def test_layout_bshd():
    outs, lses, _ = parts()
    expected = manyhead.merge_states(outs, lses)
    swapped = np.ascontiguousarray(outs.swapaxes(2, 3))
    result = manyhead.merge_states(swapped, lses, layout="bshd")
    np.testing.assert_array_equal(result.out.swapaxes(1, 2), expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)
    pair = manyhead.merge_state(swapped[0], lses[0], swapped[2], lses[2], layout="bshd")
    expected = manyhead.merge_state(outs[0], lses[0], outs[2], lses[2])
    np.testing.assert_array_equal(pair.out.swapaxes(1, 2), expected.out)


def test_states_that_count_nothing():
    outs = np.full((3, 1, 2, 4, 5), np.nan, np.float32)
    lses = np.full((3, 1, 2, 4), -np.inf, np.float32)
    out, lse = manyhead.merge_states(outs, lses)
    assert (out == 0).all() and (lse == -np.inf).all()
    out, lse = manyhead.merge_states(outs[:0], lses[:0])
    assert out.shape == (1, 2, 4, 5) and (out == 0).all() and (lse == -np.inf).all()
    out, lse = manyhead.merge_states(np.zeros((0, 1, 2, 3, 4, 5), "f"), np.zeros((0, 1, 2, 3, 4), "f"))
    assert out.shape == (1, 2, 3, 4, 5) and (out == 0).all() and (lse == -np.inf).all()
    outs[1], lses[1] = 2.5, 1.0
    out, lse = manyhead.merge_states(outs, lses)
    assert (out == 2.5).all() and (lse == 1).all()
    out, lse = manyhead.merge_states(outs[:, :0], lses[:, :0])
    assert out.shape == (0, 2, 4, 5) and lse.shape == (0, 2, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lses_of_any_type(dtype):
    outs, lses, _ = parts(dtype)
    expected = manyhead.merge_states(outs, lses)
    pair = manyhead.merge_state(outs[0], lses[0], outs[3], lses[3])
    for given in (lses.tolist(), lses.astype(np.float64), lses.astype(np.float64)[..., ::-1].copy()[..., ::-1]):
        merged = manyhead.merge_states(outs, given)
        np.testing.assert_array_equal(merged.out, expected.out)
        assert merged.lse.dtype == lses.dtype
        np.testing.assert_array_equal(manyhead.merge_state(outs[0], given[0], outs[3], lses[3]).lse, pair.lse)
    for kind in (np.float16, ml_dtypes.bfloat16, np.int32):
        given = np.where(np.isfinite(lses), lses, 0).astype(kind)
        merged = manyhead.merge_states(outs, given)
        np.testing.assert_array_equal(merged.lse, manyhead.merge_states(outs, given.astype(lses.dtype)).lse)
    one = manyhead.merge_state(np.ones(4, F32), 1.0 * np.ones(()), np.ones(4, F32), np.float16(2))
    assert one.lse.shape == ()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("states", [0, 1, 3])
def test_no_values(states, layout):
    lses = np.random.default_rng(2).standard_normal((states, 2, 3, 4)).astype(F32)
    shape = (states, 2, 3, 4) if layout == "bhsd" else (states, 2, 4, 3)
    expected = manyhead.merge_states(np.ones((*shape, 5), F32), lses, layout=layout).lse
    out = np.empty((*shape[1:], 0), F32)
    for merged in (
        manyhead.merge_states(np.ones((*shape, 0), F32), lses, layout=layout),
        manyhead.merge_states(np.ones((*shape, 0), F32), lses, layout=layout, out=out),
    ):
        assert merged.out.shape == out.shape
        np.testing.assert_array_equal(merged.lse, expected)
    assert merged.out is out
    if states > 1:
        merged = manyhead.merge_state(out, lses[0], out, lses[1], layout=layout)
        np.testing.assert_array_equal(
            merged.lse, manyhead.merge_states(np.ones((2, *shape[1:], 1), F32), lses[:2], layout=layout).lse
        )


def test_in_place():
    outs, lses, _ = parts()
    expected = manyhead.merge_state(outs[0], lses[0], outs[2], lses[2])
    out = outs[0]
    result = manyhead.merge_state(out, lses[0], outs[2], lses[2], out=out)
    assert result.out is out
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)
    with pytest.raises(ValueError, match="out"):
        manyhead.merge_state(outs[1], lses[1], outs[2], lses[2], out=outs[2])


def test_the_sink_counts_in_one_part_only():
    outs, lses, _ = parts(cuts=(0, 20, 37))
    rng = np.random.default_rng(0)
    q, k, v = random_tensors(rng, "f32", batch=2, kv_heads=2, group=2, q_len=5, kv_len=37, head_dim=8, v_dim=7)
    sinks = [0.3, -1, 2, 0]
    first = manyhead.attention(q, k[:, :, :20], v[:, :, :20], sinks=sinks, return_lse=True)
    out, lse = manyhead.merge_state(first.out, first.lse, outs[1], lses[1])
    expected = reference.attention(q, k, v, sinks=sinks)
    np.testing.assert_allclose(out, expected.out, 2e-5, 2e-5)
    np.testing.assert_allclose(lse, expected.lse, 2e-6, 2e-5)


F32 = np.float32


@pytest.mark.parametrize(("arguments", "options", "exception", "text"), [
    ((np.zeros((2, 3, 4), F32), np.zeros((2, 4), F32)), {}, ValueError, r"lses has shape \(2, 4\), must be \(2, 3\)"),
    ((np.zeros((2, 3, 4), F32), np.zeros((2, 3), bool)), {}, TypeError, "lses has dtype bool, must be real numbers"),
    ((np.zeros((2, 3, 4), F32), [[1.0], [1.0, 2.0]]), {}, ValueError, "lses: .*inhomogeneous"),
    ((np.zeros((2, 3, 4), np.int32), np.zeros((2, 3), F32)), {}, TypeError, "outs has dtype int32"),
    ((np.zeros(2, F32), np.zeros(2, F32)), {}, ValueError, "outs has shape"),
    ((np.zeros((2, 3, 4), F32), np.zeros((2, 3), F32)), {"lse_base": "10"}, ValueError, "lse_base is '10'"),
    ((np.zeros((2, 3, 4), F32), np.zeros((2, 3), F32)), {"layout": "bshd"}, ValueError, "needs 5 dimensions"),
    ((np.zeros((2, 3, 4), F32), np.zeros((2, 3), F32)), {"layout": "x"}, ValueError, "layout is 'x'"),
    ((np.zeros((2, 3, 4), F32), np.zeros((2, 3), F32)), {"out": np.zeros((2, 3, 4), F32)}, ValueError, "out has shape"),
    ((np.zeros((2, 3, 4), F32), np.zeros((2, 3), F32)), {"out": np.zeros((3, 4))}, TypeError, "out has dtype float64"),
    (([[1.0]], np.zeros((2, 3), F32)), {}, TypeError, "outs must be an array"),
    ((np.zeros((2, 2, 2, 2, 2, 3), F32), np.zeros((2, 2, 2, 2, 2), F32)),
     {"out": np.zeros((4, 2, 2, 2, 3), F32)[::2]}, ValueError, "out must be contiguous where"),
])  # fmt: skip
def test_bad_arguments(arguments, options, exception, text):
    with pytest.raises(exception, match=text):
        manyhead.merge_states(*arguments, **options)


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_threads(threads):
    outs, lses = np.random.default_rng(1).standard_normal((2, 300, 500)), np.zeros((2, 300))
    expected = manyhead.merge_states(outs, lses)
    with manyhead.profile() as profile:
        merged = manyhead.merge_states(outs, lses, threads=threads)
        pair = manyhead.merge_state(*outs[:1], *lses[:1], *outs[1:], *lses[1:], threads=threads)
    for result in merged, pair:
        np.testing.assert_array_equal(result.out, expected.out)
    assert len(profile.calls) == 2
    if threads == 1:
        assert all(call["threads"] == 1 for call in profile.calls)
    with pytest.raises(ValueError, match="threads is -1"):
        manyhead.merge_states(outs, lses, threads=-1)


def test_bad_pairs():
    a, b = np.zeros((3, 4), F32), np.zeros(3, F32)
    with pytest.raises(ValueError, match=r"out_b has shape \(3, 5\), must be that of out_a"):
        manyhead.merge_state(a, b, np.zeros((3, 5), F32), b)
    with pytest.raises(TypeError, match="out_b has dtype float16, must be that of out_a"):
        manyhead.merge_state(a, b, a.astype(np.float16), b)
    with pytest.raises(ValueError, match="lse_b has shape"):
        manyhead.merge_state(a, b, a, b[:2])
