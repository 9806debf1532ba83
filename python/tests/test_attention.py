"""manyhead.attention against the float64 reference: every option, alone and with others, every type, special values."""

from __future__ import annotations

import copy
import itertools
import pickle

import manyhead
import ml_dtypes
import numpy as np
import problems
import pytest
import reference
from manyhead import _plan
from problems import DTYPES, OPTIONS, check, close, random_options, random_tensors


def tensors(*shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["none", *OPTIONS])
def test_one_option(option, dtype):
    rng = np.random.default_rng(OPTIONS.index(option) if option != "none" else 99)
    for _ in range(4):
        q, k, v = random_tensors(rng, dtype)
        check(q, k, v, dtype, **random_options(rng, {option}, q, k))


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
def test_pair_of_options(pair):
    rng = np.random.default_rng(list(itertools.combinations(OPTIONS, 2)).index(pair))
    q, k, v = random_tensors(rng, "f32")
    options = random_options(rng, set(pair), q, k)
    changed = [problems.relayout(rng, x) for x in (q, k, v)], problems.in_memory(rng, options)
    check(q, k, v, "f32", changed, **options)


@pytest.mark.parametrize("seed", range(150))
def test_many_options_in_any_memory(seed):
    rng = np.random.default_rng(1000 + seed)
    dtype = str(rng.choice(list(DTYPES)))
    q, k, v = random_tensors(rng, dtype)
    options = random_options(rng, set(rng.choice(OPTIONS, rng.integers(3, 8))), q, k)
    changed = [problems.relayout(rng, x) for x in (q, k, v)], problems.in_memory(rng, options)
    check(q, k, v, dtype, changed, **options)


@pytest.mark.parametrize("seed", range(40))
def test_masked_slots_may_hold_anything(seed):
    """NaN and inf in keys and values that no query attends do not change one bit; but in bf16 and f16 on a matrix
    unit, where rows beside them are computed again without its roundings."""
    rng = np.random.default_rng(2000 + seed)
    dtype = str(rng.choice(list(DTYPES)))
    q, k, v = random_tensors(rng, dtype)
    names = set(rng.choice(["causal", "window", "mask", "bias", "key_mask", "seqused_k", "q_offset"], 2))
    options = random_options(rng, names, q, k)
    before = manyhead.attention(q, k, v, return_lse=True, return_weights=True, **options)
    attended = reference.attention(q, k, v, **options).biased != -np.inf
    batch, kv_heads = k.shape[:2]
    by_head = attended.reshape(batch, kv_heads, -1, k.shape[2]).any(axis=2)
    poison = np.array([np.nan, np.inf, -np.inf])
    for x in (k, v):
        x[~by_head] = rng.choice(poison, (int((~by_head).sum()), x.shape[3])).astype(x.dtype)
    after = manyhead.attention(q, k, v, return_lse=True, return_weights=True, **options)
    has_unit = manyhead.isa() not in ("avx512", "avx2", "sse2", "neon")
    rounding = {"bf16": 2.0**-7, "f16": 2.0**-10}.get(dtype, 0) if has_unit else 0
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=rounding, atol=rounding)


def test_nan_reaches_exactly_the_rows_that_attend_it():
    q, k, v = tensors(1, 2, 20, 8)
    k[0, 0, 7] = np.nan
    v[0, 1, 5, 3] = np.inf
    out = manyhead.attention(q, k, v, causal=True)
    assert np.isfinite(out[0, 0, :7]).all() and np.isnan(out[0, 0, 7:]).all()
    assert np.isfinite(out[0, 1, :5]).all() and np.isinf(out[0, 1, 5:, 3]).all()
    assert np.isfinite(np.delete(out[0, 1], 3, axis=1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["mask", "bias", "key_mask", "seqused_k", "window", "causal", "q_offset"])
def test_rows_that_attend_nothing(how, dtype):
    q, k, v = tensors(2, 2, 3, 4, dtype=DTYPES[dtype])
    options = {
        "mask": {"attn_mask": np.zeros((3, 3), bool)},
        "bias": {"attn_bias": np.full((1, 3), -np.inf, np.float32)},
        "key_mask": {"key_mask": np.zeros((2, 3), bool)},
        "seqused_k": {"seqused_k": [0, 0]},
        "window": {"window": (0, 0), "q_offset": 50},
        "causal": {"causal": True, "q_offset": -3},
        "q_offset": {"causal": True, "q_offset": [-3, -9]},
    }[how]
    result = manyhead.attention(q, k, v, return_lse=True, return_weights=True, return_column_sums=True, **options)
    assert (result.out == 0).all() and (result.weights == 0).all() and (result.column_sums == 0).all()
    assert (result.lse == -np.inf).all()
    sinks = np.array([0.5, -2.0])
    result = manyhead.attention(q, k, v, return_lse=True, sinks=sinks, **options)
    assert (result.out == 0).all()
    np.testing.assert_allclose(result.lse, np.broadcast_to(sinks[None, :, None], (2, 2, 3)), 1e-6)


LOWEST = np.float32(-1e30), np.finfo(np.float32).min, np.float64(-1e300), np.finfo(np.float64).min


@pytest.mark.parametrize("lowest", LOWEST, ids=str)
def test_a_finite_bias_everywhere_is_an_ordinary_softmax(lowest):
    q, k, v = tensors(1, 1, 4, 8)
    bias = np.full((4, 4), lowest)
    mean = np.broadcast_to(v.mean(axis=2, keepdims=True), v.shape)
    np.testing.assert_allclose(manyhead.attention(q, k, v, attn_bias=bias), mean, 1e-5, 1e-6)
    for lse_base in "e", "2":  # in base 2 the lowest number is lower still
        result = manyhead.attention(
            *(x.astype(bias.dtype) for x in (q, k, v)), attn_bias=bias, return_lse=True, lse_base=lse_base
        )
        assert np.isfinite(result.lse).all()
        np.testing.assert_allclose(result.out, mean, 1e-5, 1e-6)


@pytest.mark.parametrize("lowest", LOWEST, ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 20, 100])
def test_keys_behind_such_a_bias_count_nothing(lowest, q_len):
    q, k, v = (x[:, :, :n] for x, n in zip(tensors(1, 2, 300, 8), (q_len, 300, 300), strict=True))
    bias = np.full(300, lowest)
    bias[-2:] = 0
    got = manyhead.attention(q, k, v, attn_bias=bias, return_lse=True)
    want = manyhead.attention(q, k[:, :, -2:], v[:, :, -2:], return_lse=True)
    np.testing.assert_allclose(got.out, want.out, 1e-5, 1e-6)
    np.testing.assert_allclose(got.lse, want.lse, 1e-5, 1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_cache_has_room_for_changes_no_bit(dtype, q_len, causal):
    q, k, v = (x.astype(DTYPES[dtype]) for x in tensors(2, 2, 5000, 64))
    q, options = q[:, :, :q_len], {"return_lse": True, "return_weights": True}
    for used in (490, 0), (700, 1100):  # of chunks of 512 keys one, one and none, two and three
        places = {"causal": True, "q_offset": np.array(used) - q_len} if causal else {"seqused_k": np.array(used)}
        cache = manyhead.attention(q, k, v, **places, **options)
        for i, n in enumerate(used):
            ends = {"causal": True, "align": "bottom_right"} if causal else {}
            alone = manyhead.attention(*(x[i : i + 1] for x in (q, k[:, :, :n], v[:, :, :n])), **ends, **options)
            assert cache.out[i].tobytes() == alone.out[0].tobytes() and cache.lse[i].tobytes() == alone.lse[0].tobytes()
            assert (
                cache.weights[i, ..., :n].tobytes() == alone.weights[0].tobytes()
                and not cache.weights[i, ..., n:].any()
            )


@pytest.mark.parametrize("sink", [np.nan, np.inf])
@pytest.mark.parametrize("q_len", [1, 20])
def test_a_sink_that_is_no_number_shows_in_its_head_alone(q_len, sink):
    q, k, v = tensors(1, 2, q_len, 8)
    result = manyhead.attention(q, k, v, sinks=np.array([sink, 0.5]), return_lse=True, return_weights=True)
    for x in (result.out, result.lse, result.weights):
        assert np.isnan(x[:, 0]).all() and not np.isnan(x[:, 1]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", ["batch", "q_len", "kv_len"])
def test_empty_dimensions(zero, dtype):
    rng = np.random.default_rng(5)
    q, k, v = random_tensors(rng, dtype, **({"batch": 2, "q_len": 3, "kv_len": 4} | {zero: 0}))
    options = random_options(rng, {"mask", "bias", "key_mask", "seqused_k", "alibi", "causal"}, q, k)
    check(q, k, v, dtype, **options)


def test_no_heads_and_no_values_give_empty_results():
    q, k, v = (np.zeros((2, 0, 3, 4), np.float32) for _ in range(3))
    result = manyhead.attention(q, k, v, return_lse=True, return_weights=True)
    assert result.out.shape == (2, 0, 3, 4) and result.lse.shape == (2, 0, 3) and result.weights.shape == (2, 0, 3, 3)
    q, k, _ = tensors(2, 2, 3, 4)
    assert manyhead.attention(q, k, np.zeros((2, 2, 3, 0), np.float32)).shape == (2, 2, 3, 0)
    with pytest.raises(ValueError, match=r"k\.shape\[1\] is 0"):
        manyhead.attention(q, k[:, :0], k[:, :0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [{}, {"q_len": 1, "kv_len": 300}, {"q_len": 40, "kv_len": 0}, {"batch": 0}])
def test_what_is_not_of_values_is_there_without_values(sizes, dtype):
    rng = np.random.default_rng(5)
    q, k, v = random_tensors(rng, dtype, **({"batch": 2, "group": 2, "q_len": 20, "kv_len": 33} | sizes))
    options = {"return_lse": True, "return_column_sums": True, "causal": True, "align": "bottom_right"}
    for more in ({}, {"return_weights": "mean"}, {"return_weights": True, "return_scores": "biased"}):
        expected = manyhead.attention(q, k, v, **options, **more)
        none = v[..., :0]
        plan = manyhead.plan(q, k, none, **options, **more)
        for result in (
            manyhead.attention(q, k, none, **options, **more),
            manyhead.attention(q, k, none, out=expected.out[..., :0], **options, **more),
            plan.run(q, k, none),
            plan.bind(q, k, none)(),
        ):
            assert result.out.shape == (*q.shape[:3], 0) and result.out.dtype == q.dtype
            for name in result._fields[1:]:
                close(getattr(result, name), getattr(expected, name), dtype, name)


def test_huge_scores_are_an_exact_arg_max():
    q, k, v = tensors(1, 2, 6, 16)
    result = manyhead.attention(q, k, v, scale=1e6, return_lse=True, return_weights=True)
    expected = reference.attention(q, k, v, scale=1e6)
    np.testing.assert_array_equal(result.weights.argmax(-1), expected.weights.argmax(-1))
    np.testing.assert_allclose(result.lse, expected.lse, 1e-6)
    np.testing.assert_allclose(result.out, expected.out, 1e-3, 1e-3)


def test_values_near_the_largest_float_do_not_overflow_on_the_way():
    q, k, _ = tensors(1, 1, 3, 8)
    v = np.full((1, 1, 3, 8), 3e38, np.float32)
    np.testing.assert_allclose(manyhead.attention(q, k, v), v, 1e-5)


def test_denormals_are_kept():
    q, k, _ = tensors(1, 1, 3, 8)
    v = np.full((1, 1, 3, 8), 1e-42, np.float32)
    np.testing.assert_allclose(manyhead.attention(q, k, v), v, 0, 3e-45)


@pytest.mark.parametrize("stage", ["raw", "capped", "biased"])
def test_scores_at_each_stage(stage):
    rng = np.random.default_rng(6)
    q, k, v = random_tensors(rng, "f32", kv_len=37, q_len=17)
    options = random_options(rng, {"softcap", "bias", "causal", "alibi"}, q, k)
    result = manyhead.attention(q, k, v, return_scores=stage, **options)
    assert result._fields == ("out", "scores")
    close(result.scores, getattr(reference.attention(q, k, v, **options), stage), "f32", "scores")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fast_exp_is_used_where_the_documentation_says(dtype):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, 64, 64)).astype(DTYPES[dtype]) for _ in range(3))

    def same(q, **options):
        out = [manyhead.attention(q, k, v, fast_exp=fast, return_lse=True, **options) for fast in (False, True)]
        np.testing.assert_allclose(out[1][0].astype(float), out[0][0].astype(float), atol=0.02, rtol=0.01)
        return all(np.array_equal(*pair) for pair in zip(*out, strict=True))

    assert same(q) == (dtype == "f64")
    assert same(q[:, :, :1])
    assert same(q, return_weights=True)


def test_a_layer_takes_a_fast_exp():
    rng = np.random.default_rng(4)
    w = rng.standard_normal((4, 32, 32)).astype(np.float32)
    layer = manyhead.MultiHeadAttention(*w, num_heads=2)
    x = rng.standard_normal((1, 40, 32)).astype(np.float32)
    exact, fast = layer(x), layer(x, fast_exp=True)
    assert not np.array_equal(exact, fast)
    np.testing.assert_allclose(fast, exact, rtol=1e-3, atol=1e-2)


def test_results_come_in_the_order_of_the_documentation():
    q, k, v = tensors(1, 2, 3, 4)
    result = manyhead.attention(
        q, k, v, return_scores="raw", return_weights=True, return_lse=True, return_column_sums=True
    )
    assert result._fields == ("out", "lse", "weights", "column_sums", "scores")
    out, lse = manyhead.attention(q, k, v, return_lse=True)
    close(out, result.out, "f32")
    close(lse, result.lse, "f32", "lse")
    assert isinstance(manyhead.attention(q, k, v), np.ndarray)


def test_results_are_copied_and_pickled():
    q, k, v = tensors(1, 2, 5, 4)
    out, lse = manyhead.attention(q, k, v, return_lse=True)
    layer = manyhead.MultiHeadAttention(q[0, 0, :4], q[0, 0, :4], q[0, 0, :4], num_heads=2)
    for result in (
        manyhead.attention(q, k, v, return_lse=True, return_scores="raw"),
        manyhead.merge_states(out[None], lse[None]),
        layer(q[0], need_weights=True),
    ):
        for other in (pickle.loads(pickle.dumps(result)), copy.copy(result), copy.deepcopy(result)):
            assert type(other) is type(result)
            for name in result._fields:
                np.testing.assert_array_equal(getattr(other, name), getattr(result, name))


def test_mean_weights_and_base_two():
    q, k, v = tensors(2, 3, 5, 8)
    expected = reference.attention(q, k, v)
    result = manyhead.attention(q, k, v, return_weights="mean", return_lse=True, lse_base="2")
    close(result.weights, expected.weights.mean(axis=1), "f32", "weights")
    np.testing.assert_allclose(result.lse, expected.lse / np.log(2), 2e-6, 2e-5)


def test_the_real_outputs_are_f32_or_f64():
    for dtype, real in (("f32", np.float32), ("f64", np.float64), ("f16", np.float32), ("bf16", np.float32)):
        q, k, v = tensors(1, 2, 3, 4, dtype=DTYPES[dtype])
        result = manyhead.attention(q, k, v, return_lse=True, return_weights=True, return_scores="raw")
        assert {x.dtype for x in result[1:]} == {np.dtype(real)}


def test_layout_bshd():
    rng = np.random.default_rng(7)
    q, k, v = random_tensors(rng, "f32", group=2, q_len=5, kv_len=9)
    options = random_options(rng, {"mask", "causal"}, q, k)
    expected = manyhead.attention(q, k, v, return_lse=True, return_weights=True, **options)
    bshd = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    result = manyhead.attention(*bshd, layout="bshd", return_lse=True, return_weights=True, **options)
    assert result.out.flags.c_contiguous
    np.testing.assert_array_equal(result.out.swapaxes(1, 2), expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)
    np.testing.assert_array_equal(result.weights, expected.weights)


def test_packed_qkv_and_repeated_memory():
    packed = np.random.default_rng(8).standard_normal((2, 7, 3, 4, 8)).astype(np.float32)
    q, k, v = (packed[:, :, i] for i in range(3))
    separate = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    expected = manyhead.attention(*separate)
    np.testing.assert_array_equal(manyhead.attention(q, k, v, layout="bshd").swapaxes(1, 2), expected)
    one = np.broadcast_to(separate[1][:, :1], separate[1].shape)
    shared = separate[1][:, :1]  # one kv head instead of the same one four times
    close(manyhead.attention(separate[0], one, one), manyhead.attention(separate[0], shared, shared), "f32")


def test_window_by_two_names():
    q, k, v = tensors(1, 1, 9, 4)
    both = manyhead.attention(q, k, v, window=(2, 1))
    np.testing.assert_array_equal(manyhead.attention(q, k, v, window_left=2, window_right=1), both)
    np.testing.assert_array_equal(manyhead.attention(q, k, v, window=[2, 1]), both)
    left = manyhead.attention(q, k, v, window=(2, -1))
    np.testing.assert_array_equal(manyhead.attention(q, k, v, window_left=2), left)


def test_masks_of_every_rank_and_plain_sequences():
    q, k, v = tensors(2, 2, 3, 4)
    mask = np.array([True, False, True])
    expected = manyhead.attention(q, k, v, attn_mask=np.broadcast_to(mask, (2, 2, 3, 3)))
    for shape in ((3,), (1, 3), (1, 1, 3), (1, 1, 1, 3)):
        np.testing.assert_array_equal(manyhead.attention(q, k, v, attn_mask=mask.reshape(shape)), expected)
    np.testing.assert_array_equal(manyhead.attention(q, k, v, attn_mask=[True, False, True]), expected)
    np.testing.assert_array_equal(manyhead.attention(q, k, v, key_mask=mask), expected)
    close(manyhead.attention(q, k, v, attn_mask=np.where(mask, 0, -np.inf).astype(np.float16)), expected, "f32")
    np.testing.assert_array_equal(
        manyhead.attention(q, k, v, seqused_k=[2, 1]), manyhead.attention(q, k, v, seqused_k=np.array([2, 1], np.uint8))
    )


def test_an_offset_takes_the_place_of_the_alignment():
    q, k, v = tensors(1, 1, 4, 8)
    expected = manyhead.attention(q[:, :, 2:], k, v, causal=True, align="bottom_right")
    for offset in (2, np.int32(2), [2], np.array([2])):
        for align in (None, "none", "top_left"):
            result = manyhead.attention(q[:, :, 2:], k, v, causal=True, align=align, q_offset=offset)
            np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(manyhead.attention(q, k, v, align="none"), manyhead.attention(q, k, v))


def test_offsets_and_lengths_of_two_integer_types():
    q, k, v = tensors(2, 1, 4, 8)
    expected = manyhead.attention(q, k, v, causal=True, q_offset=[0, 2], seqused_k=[4, 3])
    plan = manyhead.plan(q, k, v, causal=True, q_offset=(2,), seqused_k=(2,))
    layer = manyhead.MultiHeadAttention(*[np.eye(8, dtype=np.float32)] * 3, num_heads=1)
    for kinds in (("i4", "i8"), ("i8", "i4"), ("i2", "i4"), ("u4", "i4")):
        offsets, used = np.array([0, 2], kinds[0]), np.array([4, 3], kinds[1])
        np.testing.assert_array_equal(
            manyhead.attention(q, k, v, causal=True, q_offset=offsets, seqused_k=used), expected
        )
        np.testing.assert_array_equal(plan.run(q, k, v, q_offset=offsets, seqused_k=used), expected)
        result = layer(q[:, 0], k[:, 0], v[:, 0], causal=True, q_offset=offsets, seqused_k=used)
        close(result, expected[:, 0], "f32")


def test_arrays_without_a_dimension_are_numbers():
    q, k, v = tensors(2, 1, 4, 8)
    options = {"scale": 0.5, "softcap": 2.0, "causal": True, "q_offset": 1}
    expected = manyhead.attention(q, k, v, **options)
    for kinds in (("f4", "i4"), ("f8", "i8"), ("f2", "u1"), (ml_dtypes.bfloat16, "i2")):
        given = {name: np.array(x, kinds[isinstance(x, int)]) for name, x in options.items() if name != "causal"}
        np.testing.assert_array_equal(manyhead.attention(q, k, v, causal=True, **given), expected)
        np.testing.assert_array_equal(manyhead.plan(q, k, v, causal=True, **given).run(q, k, v), expected)
    scale = np.array(0.5)
    before = manyhead.attention(q, k, v, scale=scale)
    scale[...] = 0.25
    np.testing.assert_array_equal(manyhead.attention(q, k, v, scale=scale), manyhead.attention(q, k, v, scale=0.25))
    assert not np.array_equal(before, manyhead.attention(q, k, v, scale=scale))


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_numbers_of_other_libraries(package):
    library = pytest.importorskip(package)
    number = library.tensor if package == "torch" else library.numpy.array
    q, k, v = tensors(2, 1, 4, 8)
    for _ in range(2):
        np.testing.assert_array_equal(
            manyhead.attention(q, k, v, causal=True, scale=number(0.5), softcap=number(2.0), q_offset=number(1)),
            manyhead.attention(q, k, v, causal=True, scale=0.5, softcap=2.0, q_offset=1),
        )


def test_the_result_is_written_to_out():
    q, k, v = tensors(2, 3, 5, 8)
    expected = manyhead.attention(q, k, v)
    memory = np.full((5, 8, 3, 2, 2), 7, np.float32)
    out = memory[::-1, :, :, 1, :].transpose(3, 2, 0, 1)
    assert manyhead.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert (memory[:, :, :, 0] == 7).all()
    result = manyhead.attention(q, k, v, out=out, return_lse=True)
    assert result.out is out


def test_the_same_bits_for_any_threads_and_neighbours():
    rng = np.random.default_rng(9)
    q, k, v = random_tensors(rng, "f32", batch=3, kv_heads=2, group=2, q_len=40, kv_len=900, head_dim=64, v_dim=64)
    expected = manyhead.attention(q, k, v, threads=1, return_lse=True, return_weights=True, return_column_sums=True)
    for threads in (2, 3, 7):
        result = manyhead.attention(
            q, k, v, threads=threads, return_lse=True, return_weights=True, return_column_sums=True
        )
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(manyhead.attention(q[1:2], k[1:2], v[1:2]), expected.out[1:2])
    step = q[:, :, :1]
    np.testing.assert_array_equal(
        manyhead.attention(step[2:], k[2:], v[2:], threads=1), manyhead.attention(step, k, v, threads=2)[2:]
    )


def test_results_stay_valid_after_later_calls():
    q, k, v = tensors(1, 2, 8, 16)
    first = manyhead.attention(q, k, v, return_lse=True)
    copies = [x.copy() for x in first]
    for seed in range(5):
        manyhead.attention(*tensors(1, 2, 8, 16, seed=seed), return_lse=True)
    for a, b in zip(first, copies, strict=True):
        np.testing.assert_array_equal(a, b)


def test_options_that_compare_equal_are_not_confused():
    """Kept plans are found by the options' values: 0 and None, 0 and False, 1 and True mean different things."""
    q, k, v = tensors(1, 1, 3, 4)
    uniform = manyhead.attention(q, k, v, scale=0)
    np.testing.assert_allclose(uniform, np.broadcast_to(v.mean(2, keepdims=True), v.shape), 1e-5, 1e-6)
    default = manyhead.attention(q, k, v)
    assert not np.allclose(uniform, default)
    np.testing.assert_array_equal(manyhead.attention(q, k, v, scale=np.float32(0.5)), default)
    assert isinstance(manyhead.attention(q, k, v, return_weights=0), np.ndarray)
    assert manyhead.attention(q, k, v, return_weights=1)._fields == ("out", "weights")


def test_more_kinds_of_calls_than_plans_are_kept():
    q, k, v = tensors(1, 1, 1, 8)
    keys = np.random.default_rng(3).standard_normal((1, 1, 600, 8)).astype(np.float32)
    for length in (*range(1, 600), 1, 2):
        out = manyhead.attention(q, keys[:, :, :length], keys[:, :, :length])
        if length % 97 == 1:
            close(out, reference.attention(q, keys[:, :, :length], keys[:, :, :length]).out, "f32")
    assert 0 < len(_plan._plans) <= _plan._LIMIT < 600


def test_an_infinite_key_is_never_multiplied_by_what_pads_a_row():
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, 2, n, 40)).astype(np.float32) for n in (2, 30, 30))
    q[..., 30] = 1
    k[0, 0, 7, 30] = -np.inf  # a weight of 0 for both rows
    want = manyhead.attention(q, np.delete(k, 7, 2), np.delete(v, 7, 2))
    np.testing.assert_allclose(manyhead.attention(q, k, v)[0, 0], want[0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads"), [(1, 300, 4, 4), (3, 1300, 8, 2), (50, 100, 4, 4), (130, 300, 4, 2)]
)
def test_a_bias_that_is_a_mask_gives_what_one_does(dtype, q_len, kv_len, heads, kv_heads):
    rng = np.random.default_rng(q_len)
    q, k, v = random_tensors(
        rng,
        dtype,
        batch=2,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=64,
        v_dim=64,
    )
    last = rng.integers(1, kv_len + 1, (2, 1, q_len, 1))
    first = rng.integers(0, last)
    keys = np.arange(kv_len)
    seen = (keys >= first) & (keys < last)
    want = manyhead.attention(q, k, v, attn_mask=seen, return_lse=True)
    for lowest in (-np.inf, np.finfo(np.float32).min):
        bias = np.where(seen, np.float32(0), np.float32(lowest))
        for a, b in zip(manyhead.attention(q, k, v, attn_mask=bias, return_lse=True), want, strict=True):
            close(a, b.astype(np.float64), dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("q_len", [8, 70])
def test_the_lowest_bias_closes_keys_only_beside_others(dtype, q_len):
    rng = np.random.default_rng(q_len)
    q, k, v = random_tensors(rng, dtype, batch=1, kv_heads=2, group=1, q_len=q_len, kv_len=70, head_dim=64, v_dim=64)
    lowest = np.finfo(np.float32).min
    bias = np.zeros((q_len, 70), np.float32)
    bias[:, 40:] = lowest
    bias[5] = lowest  # such a row attends all of them alike
    bias[6] = -np.inf
    bias[7, :50], bias[7, 50:] = -np.inf, lowest
    out = manyhead.attention(q, k, v, attn_mask=bias)
    close(out[..., 5, :], v.astype(np.float64).mean(2), dtype)
    assert not out[..., 6, :].any()
    close(out[..., 7, :], v[..., 50:, :].astype(np.float64).mean(2), dtype)
    # What closed keys hold does not matter to the others.
    v[..., 60, :] = np.nan
    k[..., 61, :] = np.inf
    again = manyhead.attention(q, k, v, attn_mask=bias)
    others = np.delete(np.arange(q_len), (5, 7))
    close(again[..., others, :], out[..., others, :].astype(np.float64), dtype)
    assert np.isnan(again[..., 5, :].astype(np.float32)).all()


@pytest.mark.parametrize(("heads", "q_len", "kv_len"), [(1, 3, 2048), (2, 40, 2048), (4, 2, 1500), (2, 40, 200)])
def test_weights_of_rows_far_from_0_and_of_the_lowest_bias_together(heads, q_len, kv_len):
    rng = np.random.default_rng(kv_len)
    q, k, v = random_tensors(
        rng, "f32", batch=1, kv_heads=heads, group=1, q_len=q_len, kv_len=kv_len, head_dim=32, v_dim=32
    )
    bias = rng.standard_normal((q_len, kv_len)).astype(np.float32)
    bias[0] -= np.float32(1e4)
    bias[1] = np.finfo(np.float32).min
    result = manyhead.attention(q, k, v, attn_mask=bias, return_weights=True)
    np.testing.assert_allclose(result.weights.sum(-1), 1, 1e-4)
    np.testing.assert_allclose(result.weights[..., 1, :], 1 / kv_len, 1e-4)
