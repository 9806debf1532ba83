"""manyhead.plan: made from arrays or shapes, run many times, refuses arrays it was not made for."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import get_args, get_type_hints

import manyhead
import numpy as np
import problems
import pytest
from problems import DTYPES, random_options, random_tensors, relayout

SHAPES = ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6))


def arrays(dtype="f32", seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_from_shapes(dtype):
    plan = manyhead.plan(*SHAPES, dtype=DTYPES[dtype], causal=True, align="bottom_right", return_lse=True)
    for seed in range(3):
        q, k, v = arrays(dtype, seed)
        result = plan.run(q, k, v)
        expected = manyhead.attention(q, k, v, causal=True, align="bottom_right", return_lse=True)
        np.testing.assert_array_equal(result.out, expected.out)
        np.testing.assert_array_equal(result.lse, expected.lse)
        assert result.out.dtype == DTYPES[dtype]


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_from_arrays_of_any_layout(seed):
    rng = np.random.default_rng(seed)
    q, k, v = random_tensors(rng, "f32")
    options = random_options(rng, {"mask", "bias", "key_mask", "alibi", "sinks", "seqused_k", "q_offsets"}, q, k)
    q, k, v = (relayout(rng, x) for x in (q, k, v))
    options = problems.in_memory(rng, options)
    plan = manyhead.plan(q, k, v, **options)
    mode = options.pop("alibi_mode")
    np.testing.assert_array_equal(plan.run(q, k, v, **options), manyhead.attention(q, k, v, alibi_mode=mode, **options))


@pytest.mark.parametrize("layout", [
    lambda shape: np.zeros((*shape[:3], 2 * shape[3]), np.float32)[..., ::2],
    lambda shape: np.zeros(shape, np.float32)[:, :, ::-1],
    lambda shape: np.zeros(shape[::-1], np.float32).transpose(3, 2, 1, 0),
])  # fmt: skip
def test_a_plan_for_results_in_another_order_needs_their_array(layout):
    q, k, v = arrays()
    out = layout((2, 4, 3, 6))
    plan = manyhead.plan(q, k, v, out=out)
    for run in (plan.run, plan.bind):
        with pytest.raises(ValueError, match=r"made for an out with strides .* in elements: pass out"):
            run(q, k, v)
    np.testing.assert_array_equal(plan.run(q, k, v, out=out), manyhead.attention(q, k, v))


def test_optional_inputs_by_shape():
    q, k, v = arrays()
    rng = np.random.default_rng(1)
    inputs = {
        "attn_mask": rng.random((2, 1, 3, 5)) < 0.8,
        "attn_bias": rng.standard_normal((3, 5)).astype(np.float32),
        "key_mask": rng.random((2, 5)) < 0.8,
        "seqused_k": np.array([5, 3]),
        "q_offset": np.array([1, -1]),
        "alibi_slopes": rng.random(4).astype(np.float32),
        "sinks": rng.random(4).astype(np.float32),
    }
    plan = manyhead.plan(*SHAPES, causal=True, **{name: x.shape for name, x in inputs.items()})
    np.testing.assert_array_equal(plan.run(q, k, v, **inputs), manyhead.attention(q, k, v, causal=True, **inputs))
    plan = manyhead.plan(*SHAPES, causal=True, q_offset=2)
    np.testing.assert_array_equal(plan.run(q, k, v), manyhead.attention(q, k, v, causal=True, q_offset=2))


def test_out_threads_and_workspace():
    q, k, v = arrays()
    expected = manyhead.attention(q, k, v)
    out = np.zeros((3, 6, 4, 2), np.float32).transpose(3, 2, 0, 1)
    plan = manyhead.plan(q, k, v, out=out)
    workspace = plan.make_workspace(2)
    assert workspace.nbytes == plan.workspace_size(2) and workspace.ctypes.data % 64 == 0
    assert plan.workspace_size(1) <= plan.workspace_size(2)
    assert plan.run(q, k, v, out=out, threads=2, workspace=workspace) is out
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError, match="workspace"):
        plan.run(q, k, v, out=out, workspace=workspace[: max(workspace.nbytes - 64, 0)], threads=2)
    with pytest.raises(ValueError, match="out has strides"):
        plan.run(q, k, v, out=np.zeros(out.shape, np.float32))
    np.testing.assert_array_equal(manyhead.plan(*SHAPES).run(q, k, v, out=np.zeros(out.shape, np.float32)), expected)


@pytest.mark.parametrize(("change", "text"), [
    (lambda q, k, v: (q[:1], k[:1], v[:1]), r"q has shape \(1, 4, 3, 8\), the plan was made for \(2, 4, 3, 8\)"),
    (lambda q, k, v: (q, k[:, :, :4], v), "k has shape"),
    (lambda q, k, v: (q, k, v.astype(np.float64)), "v has dtype float64, the plan was made for float32"),
    (lambda q, k, v: (q[..., ::-1], k, v), "q has strides .* in elements, the plan was made for"),
])  # fmt: skip
def test_arrays_that_differ_from_the_plan(change, text):
    plan = manyhead.plan(*SHAPES)
    with pytest.raises(ValueError, match=text):
        plan.run(*change(*arrays()))


def test_inputs_that_differ_from_the_plan():
    q, k, v = arrays()
    plan = manyhead.plan(*SHAPES, attn_mask=(3, 5))
    with pytest.raises(ValueError, match=r"made for the inputs \['attn_mask'\], not \[\]"):
        plan.run(q, k, v)
    with pytest.raises(ValueError, match=r"made for .* not \['attn_bias \(or a float attn_mask\)'\]"):
        plan.run(q, k, v, attn_mask=np.ones((3, 5), np.float32))
    with pytest.raises(ValueError, match="attn_mask has shape"):
        plan.run(q, k, v, attn_mask=np.ones((1, 5), bool))
    plan.run(q, k, v, attn_mask=np.ones((3, 5), np.uint8))  # uint8 and bool are the same memory
    plan = manyhead.plan(*SHAPES, seqused_k=(2,))
    with pytest.raises(ValueError, match="seqused_k has dtype int32, the plan was made for int64"):
        plan.run(q, k, v, seqused_k=np.array([1, 1], np.int32))


def test_strides_of_dimensions_of_size_one_say_nothing():
    q = np.ones((1, 4, 1, 8), np.float32)
    plan = manyhead.plan(q.shape, q.shape, q.shape)
    odd = np.ones((3, 4, 7, 8), np.float32)[:1, :, :1].copy()[:, :, :1]
    odd = np.lib.stride_tricks.as_strided(odd, odd.shape, (4000, odd.strides[1], 12, 4))
    np.testing.assert_array_equal(plan.run(odd, q, q), q)


def test_type_checkers_know_the_options_of_a_plan():
    hints = get_type_hints(manyhead.plan)
    known = hints.keys() | get_args(hints["options"])[0].__annotations__.keys()
    of_attention = inspect.signature(manyhead.attention).parameters.keys()
    assert known - {"dtype", "options", "return"} == of_attention - {"threads", "workspace"}


def test_mistakes_in_making_a_plan():
    for name in ("q", "k", "v", "out"):
        with pytest.raises(TypeError, match=f"{name} is a list, must be an array or, as a shape, a tuple"):
            manyhead.plan(**dict(zip("qkv", SHAPES, strict=True)) | {name: [2, 2, 3, 8]})
    with pytest.raises(TypeError, match="unexpected option 'dropout'"):
        manyhead.plan(*SHAPES, dropout=1)
    for dtype in (np.int32, "bfloat17", object):
        with pytest.raises(TypeError, match=r"dtype is .*, must be float32, float64, float16 or bfloat16"):
            manyhead.plan(*SHAPES, dtype=dtype)
    with pytest.raises(ValueError, match=r"k\.shape\[3\]"):
        manyhead.plan(SHAPES[0], (2, 2, 5, 7), SHAPES[2])
    with pytest.raises(
        ValueError, match="align is None, but .* must be 'top_left' or 'bottom_right' .or q_offset given.$"
    ):
        manyhead.plan(*SHAPES, causal=True)
    with pytest.raises(ValueError, match=r"out has shape \(1, 2\)"):
        manyhead.plan(*SHAPES, out=(1, 2))
    with pytest.raises(ValueError, match="too large for memory"):
        manyhead.plan((2**40, 2**20, 3, 8), (2**40, 2**20, 5, 8), (2**40, 2**20, 5, 6))
    with pytest.raises(ValueError, match="a size of a shape is 18446744073709551622, must fit a 64-bit integer"):
        manyhead.plan((2, 3, 2**64 + 6, 8), *SHAPES[1:])
    with pytest.raises(ValueError, match="has a size below 0"):
        manyhead.plan((2, 3, -1, 8), *SHAPES[1:])
    with pytest.raises(TypeError, match="a size of a shape must be an integer, not float"):
        manyhead.plan((2, 3, 4.0, 8), *SHAPES[1:])
    manyhead.plan(tuple(np.array(SHAPES[0])), *SHAPES[1:])


def test_a_plan_names_its_dtype():
    assert " bf16 " in f" {manyhead.plan(*SHAPES, dtype='bfloat16').describe()} "
    assert " f16 " in f" {manyhead.plan(*SHAPES, dtype='float16').describe()} "


def test_describe():
    plan = manyhead.plan((1, 8, 128, 64), (1, 2, 128, 64), (1, 2, 128, 64), causal=True)
    line = plan.describe()
    assert "\n" not in line and "h8/2" in line and manyhead.isa() in line and line in repr(plan)
    facts = plan.describe(json=True)
    assert facts["isa"] == manyhead.isa() and facts["flops"] > 0
    q, k, v = arrays()
    plan = manyhead.plan(q, k, v)
    assert repr(plan.bind(q, k, v)) == repr(plan).replace("Plan", "BoundPlan", 1)


def test_a_plan_outlives_its_arrays_and_many_others():
    import gc

    plan = manyhead.plan(*arrays())
    q, k, v = arrays()
    expected = plan.run(q, k, v)
    for length in range(1, 300):
        manyhead.attention(q[:, :, :1], *(np.ones((2, 2, length, 8), np.float32) for _ in range(2)))
    gc.collect()
    np.testing.assert_array_equal(plan.run(q, k, v), expected)


def test_a_bound_plan_sees_what_its_arrays_hold_at_each_run():
    q, k, v = arrays()
    used = np.array([5, 3])
    plan = manyhead.plan(q, k, v, seqused_k=used, return_lse=True)
    bound = plan.bind(q, k, v, seqused_k=used)
    first = bound()
    for seed in range(1, 4):
        for own, other in zip((q, k, v), arrays(seed=seed), strict=True):
            own[:] = other
        used[:] = [seed, 5 - seed]
        assert bound() is first
        expected = manyhead.attention(q, k, v, seqused_k=used, return_lse=True)
        np.testing.assert_array_equal(first.out, expected.out)
        np.testing.assert_array_equal(first.lse, expected.lse)


@pytest.mark.parametrize("seed", range(12))
def test_a_bound_plan_of_any_inputs(seed):
    rng = np.random.default_rng(seed)
    q, k, v = random_tensors(rng, "f32")
    options = random_options(rng, {"mask", "bias", "key_mask", "alibi", "sinks", "seqused_k", "q_offsets"}, q, k)
    options["alibi_slopes"], options["sinks"] = (options[x].astype(np.float32) for x in ("alibi_slopes", "sinks"))
    vectors = {name: options[name] for name in ("seqused_k", "q_offset", "alibi_slopes", "sinks")}
    options = problems.in_memory(rng, options) | vectors  # these are read where they are only if they are contiguous
    plan = manyhead.plan(q, k, v, **options)
    mode = options.pop("alibi_mode")
    expected = manyhead.attention(q, k, v, alibi_mode=mode, **options)
    out = np.empty_like(expected)
    workspace = plan.make_workspace(2)
    bound = plan.bind(q, k, v, out=out, threads=2, workspace=workspace, **options)
    for _ in range(2):
        out[:] = -1
        assert bound() is out
        np.testing.assert_array_equal(out, expected)


def test_a_bound_plan_keeps_its_arrays():
    import weakref

    given = dict(zip(("q", "k", "v"), arrays(), strict=True)) | {"seqused_k": np.array([4, 2])}
    plan = manyhead.plan(**given, return_lse=True)
    bound = plan.bind(**given, threads=2, workspace=(workspace := plan.make_workspace(2)))
    expected = bound().out.copy()
    held = [weakref.ref(x) for x in (*given.values(), workspace)]
    del given, workspace, plan
    assert all(ref() is not None for ref in held)
    np.testing.assert_array_equal(bound().out, expected)


def test_copies():
    given = dict(zip(("q", "k", "v"), arrays(), strict=True))
    plan = manyhead.plan(**given)
    layer = manyhead.MultiHeadAttention(*(np.eye(8, dtype=np.float32) for _ in range(3)), num_heads=2)
    for immutable in (plan, layer):
        assert copy.copy(immutable) is immutable
        assert copy.deepcopy({"model": [immutable]})["model"][0] is immutable
    for other in (plan, layer, plan.bind(**given)):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            pickle.dumps(other)
    with pytest.raises(TypeError, match="a BoundPlan cannot be copied or pickled"):
        copy.deepcopy(plan.bind(**given))


def test_a_bound_plan_holds_on_to_a_workspace_that_could_move():
    plan = manyhead.plan((1, 1, 1, 64), (1, 1, 5000, 64), (1, 1, 5000, 64))
    size = plan.workspace_size(1)
    memory = bytearray(size + 64)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % 64
    q, k = np.ones((1, 1, 1, 64), np.float32), np.ones((1, 1, 5000, 64), np.float32)
    bound = plan.bind(q, k, k, threads=1, workspace=memoryview(memory)[start : start + size])
    with pytest.raises(BufferError):
        memory.extend(bytes(size))
    np.testing.assert_allclose(bound(), q, rtol=1e-5)


def test_a_bound_plan_of_no_rows_or_heads():
    q = np.ones((2, 0, 3, 8), np.float32)
    assert manyhead.plan(q, q, q).bind(q, q, q)().shape == q.shape
    q = np.ones((2, 4, 0, 8), np.float32)
    assert manyhead.plan(q, q, q).bind(q, q, q)().shape == q.shape


def odd_address(x):
    memory = np.empty(x.nbytes + 1, np.uint8)
    moved = memory[1:].view(x.dtype).reshape(x.shape)
    moved[:] = x
    return moved


@pytest.mark.parametrize(("name", "change"), [
    ("q", odd_address),
    ("v", lambda x: x.astype(x.dtype.newbyteorder())),
    ("attn_mask", lambda x: x.tolist()),
    ("seqused_k", lambda x: x.astype(np.int16)),
    ("seqused_k", lambda x: x.tolist()),
    ("q_offset", lambda x: np.repeat(x, 2)[::2]),
    ("sinks", lambda x: x.astype(np.float64)),
])  # fmt: skip
def test_a_bound_plan_refuses_arrays_that_would_be_copied(name, change):
    given = dict(zip(("q", "k", "v"), arrays(), strict=True))
    given |= {"attn_mask": np.ones((3, 5), bool), "seqused_k": np.array([5, 3]), "q_offset": np.array([1, 2])}
    given |= {"sinks": np.ones(4, np.float32)}
    plan = manyhead.plan(**given, causal=True)
    np.testing.assert_array_equal(plan.bind(**given)(), plan.run(**given))
    changed = given | {name: change(given[name])}
    np.testing.assert_array_equal(plan.run(**changed), plan.run(**given))
    with pytest.raises(ValueError, match=f"{name} would be copied"):
        plan.bind(**changed)


def test_a_bound_plan_checks_its_arrays():
    q, k, v = arrays()
    plan = manyhead.plan(q, k, v)
    with pytest.raises(ValueError, match="k has shape"):
        plan.bind(q, k[:, :, :4], v)
    with pytest.raises(ValueError, match="q has dtype float64, the plan was made for float32"):
        plan.bind(q.astype(np.float64), k, v)
    with pytest.raises(ValueError, match="made for the inputs"):
        plan.bind(q, k, v, attn_mask=[[True] * 5] * 3)
    with pytest.raises(ValueError, match="made for the inputs"):
        plan.bind(q, k, v, sinks=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="out has strides"):
        plan.bind(q, k, v, out=np.zeros((3, 6, 4, 2), np.float32).transpose(3, 2, 0, 1))
    with pytest.raises(ValueError, match="workspace"):
        plan.bind(q, k, v, workspace=np.zeros(1, np.uint8))()
    with pytest.raises(ValueError, match="overlaps"):
        manyhead.plan(q, q, q).bind(q, q, q, out=q)()


def test_a_bound_plan_of_torch_tensors():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16) for x in arrays())
    bound = manyhead.plan(q, k, v, return_lse=True).bind(q, k, v)
    result = bound()
    assert type(result.out) is torch.Tensor and result.out.dtype is torch.bfloat16
    v *= 2
    assert bound() is result
    assert torch.equal(result.out, manyhead.attention(q, k, v))


def test_jax_arrays_are_not_bound():
    jnp = pytest.importorskip("jax.numpy")
    q, k, v = arrays()
    for i, name in enumerate("qkv"):
        given = [q, k, v]
        given[i] = jnp.asarray(given[i])
        with pytest.raises(TypeError, match=f"{name} is a JAX array, which never changes"):
            manyhead.plan(q, k, v).bind(*given)


def test_torch_tensors_with_a_plan_for_ml_dtypes():
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16) for x in arrays())
    plan = manyhead.plan(*SHAPES, dtype=ml_dtypes.bfloat16)
    assert torch.equal(plan.run(q, k, v), manyhead.attention(q, k, v))
