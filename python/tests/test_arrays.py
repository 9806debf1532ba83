"""What may be passed as an array: memory of every kind is read in place, results come back in the caller's kind."""

from __future__ import annotations

import array as stdlib_array
import ctypes
import sys

import fake_torch
import manyhead
import ml_dtypes
import numpy as np
import problems
import pytest
import reference
from manyhead import _exec, _tensors
from manyhead._arrays import BF16, _DLTensor, _DLVersioned, view
from problems import DTYPES, close, random_tensors, relayout


def tensors(*shape, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


class Foreign:
    """A tensor of some other library: __dlpack__ and nothing else."""

    def __init__(self, array, device=(1, 0), versioned=True):
        self.array, self.device, self.versioned = array, device, versioned

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_any_strides(dtype, seed):
    rng = np.random.default_rng(seed)
    q, k, v = random_tensors(rng, dtype)
    expected = manyhead.attention(q, k, v, return_lse=True)
    out = relayout(rng, np.zeros((*q.shape[:3], v.shape[3]), q.dtype))
    result = manyhead.attention(*(relayout(rng, x) for x in (q, k, v)), out=out, return_lse=True)
    assert result.out is out
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [3, 17, 40, 64, 72])
def test_any_strides_of_a_step(dtype, head_dim):
    rng = np.random.default_rng(head_dim)
    q, k, v = (rng.standard_normal((1, 2, n, head_dim)).astype(DTYPES[dtype]) for n in (2, 70, 70))
    expected = manyhead.attention(q, k, v, return_lse=True)
    for backwards in (k, v):
        k_view, v_view = (x[..., ::-1].copy()[..., ::-1] if x is backwards else x for x in (k, v))
        result = manyhead.attention(q, k_view, v_view, return_lse=True)
        np.testing.assert_array_equal(result.out, expected.out)
        np.testing.assert_array_equal(result.lse, expected.lse)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(dtype, versioned):
    q, k, v = tensors(1, 2, 5, 8, dtype=DTYPES[dtype])
    expected = manyhead.attention(q, k, v)
    k_view = k[:, :, ::-1, ::-1]  # negative strides
    result = manyhead.attention(
        Foreign(q, versioned=versioned),
        Foreign(k_view[:, :, ::-1, ::-1]),
        Foreign(v.swapaxes(1, 2).copy().swapaxes(1, 2)),
    )
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, expected)
    out = np.zeros_like(q)
    given = Foreign(out, versioned=versioned)
    assert manyhead.attention(q, k, v, out=given) is given
    np.testing.assert_array_equal(out, expected)


def test_dlpack_reads_in_place_and_keeps_the_memory():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1, ::2]
    seen = view(Foreign(array), "q")
    assert seen.shape == array.shape and seen.strides == array.strides
    assert np.shares_memory(seen, array)
    before = sys.getrefcount(array)
    del seen
    assert sys.getrefcount(array) == before - 1
    assert view(Foreign(np.zeros((2, 0), np.float32)), "q").shape == (2, 0)
    for dtype in (np.uint8, np.int32, np.int64):
        assert view(Foreign(np.ones(3, dtype)), "mask").dtype == dtype


class HandMade:
    """A capsule as the DLPack header describes it, with the fields that NumPy never uses."""

    def __init__(self, memory, offset=0, strides=None, lanes=1, code=2, bits=32, name=b"dltensor", major=1):
        self.memory = memory
        shape = (ctypes.c_int64 * memory.ndim)(*memory.shape)
        steps = (ctypes.c_int64 * memory.ndim)(*strides) if strides else None
        start = memory.ctypes.data - offset
        tensor = _DLTensor(start, 1, 0, memory.ndim, code, bits, lanes, shape, steps, offset)
        self.managed = _DLVersioned(major, 0, None, None, 0, tensor) if name.endswith(b"versioned") else tensor
        self.keep = shape, steps, name
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.capsule = new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(self.managed), name, None)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        return self.capsule


def test_dlpack_fields():
    memory = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for name in (b"dltensor", b"dltensor_versioned"):
        np.testing.assert_array_equal(view(HandMade(memory, name=name), "q"), memory)
        np.testing.assert_array_equal(view(HandMade(memory, offset=16, name=name), "q"), memory)
    wide = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    seen = view(HandMade(wide, strides=(12, 4, 1)), "q")
    np.testing.assert_array_equal(seen, wide)
    backwards = HandMade(wide[:, :, 3:], strides=(12, 4, -1))
    backwards.keep[0][2] = 4
    np.testing.assert_array_equal(view(backwards, "q"), wide[:, :, ::-1])
    halves = np.arange(6, dtype=np.uint16).reshape(2, 3)
    seen = view(HandMade(halves, code=4, bits=16), "q")
    assert seen.dtype == BF16 and np.shares_memory(seen, halves)
    assert view(HandMade(np.ones((2, 3), np.bool_), code=6, bits=8), "m").dtype == np.bool_


@pytest.mark.parametrize(("wrong", "text"), [
    ({"lanes": 4}, "a DLPack type that manyhead does not read"),
    ({"code": 9, "bits": 8}, "code 9, 8 bits"),
    ({"code": 2, "bits": 8}, "code 2, 8 bits"),
    ({"name": b"used_dltensor"}, "did not return an unused DLPack capsule"),
    ({"name": b"dltensor_versioned", "major": 2}, "q speaks DLPack 2"),
])  # fmt: skip
def test_dlpack_that_is_not_understood(wrong, text):
    with pytest.raises(TypeError, match=text):
        view(HandMade(np.ones((2, 3), np.float32), **wrong), "q")


def test_dlpack_errors():
    q, k, v = tensors(1, 2, 5, 8)
    with pytest.raises(TypeError, match="k is on another device .*2, 0"):
        manyhead.attention(q, Foreign(k, device=(2, 0)), v)
    with pytest.raises(TypeError, match=r"complex|code 5"):
        manyhead.attention(q, Foreign(k.astype(np.complex64)), v)
    constant = HandMade(q, name=b"dltensor_versioned")
    constant.managed.flags = 1  # read-only
    np.testing.assert_array_equal(manyhead.attention(constant, k, v), manyhead.attention(q, k, v))
    with pytest.raises(ValueError, match="out is read-only"):
        manyhead.attention(q, k, v, out=constant)
    q.flags.writeable = False
    with pytest.raises(TypeError, match="v: "):  # NumPy refuses to export what it cannot mark read-only
        manyhead.attention(q, k, Foreign(q, versioned=False))

    class Broken(Foreign):
        def __dlpack__(self, **_):
            return "no capsule"

    with pytest.raises(TypeError, match="did not return an unused DLPack capsule"):
        manyhead.attention(Broken(q), k, v)


def test_objects_with_the_buffer_protocol():
    q, k, v = tensors(1, 2, 5, 8)
    expected = manyhead.attention(q, k, v)
    buffer = bytearray(v.nbytes)
    out = memoryview(buffer).cast("B").cast("f", v.shape)
    assert manyhead.attention(memoryview(q), memoryview(k), memoryview(v), out=out) is out
    np.testing.assert_array_equal(np.frombuffer(buffer, np.float32).reshape(v.shape), expected)
    slopes = stdlib_array.array("f", [0.5, 0.25])
    np.testing.assert_array_equal(
        manyhead.attention(q, k, v, alibi_slopes=slopes), manyhead.attention(q, k, v, alibi_slopes=[0.5, 0.25])
    )


def test_subclasses_of_ndarray():
    q, k, v = tensors(1, 2, 5, 8)

    class Named(np.ndarray):
        pass

    result = manyhead.attention(q.view(Named), k, v)
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, manyhead.attention(q, k, v))
    with pytest.raises(TypeError, match="k is a masked array"):
        manyhead.attention(q, np.ma.masked_array(k), v)


def test_memory_that_c_cannot_read_is_copied():
    q, k, v = tensors(1, 2, 5, 8)
    expected = manyhead.attention(q, k, v)
    raw = np.zeros(k.nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(k.shape)
    odd[...] = k
    assert not odd.flags.aligned
    np.testing.assert_array_equal(manyhead.attention(q, odd, v), expected)
    np.testing.assert_array_equal(manyhead.attention(q, k, v.astype(">f4")), expected)
    records = np.zeros(k.shape, np.dtype([("x", np.float32), ("pad", np.uint8)]))
    records["x"] = k
    np.testing.assert_array_equal(manyhead.attention(q, records["x"], v), expected)
    bias = np.arange(5, dtype=">f8")
    np.testing.assert_array_equal(
        manyhead.attention(q, k, v, attn_bias=bias), manyhead.attention(q, k, v, attn_bias=bias.astype(np.float64))
    )
    np.testing.assert_array_equal(
        manyhead.attention(q, k, v, seqused_k=np.array([3], ">i4")), manyhead.attention(q, k, v, seqused_k=[3])
    )


def test_outputs_are_never_copied():
    q, k, v = tensors(1, 2, 5, 8)
    raw = np.zeros(k.nbytes + 1, np.uint8)
    for out, text in (
        (raw[1:].view(np.float32).reshape(k.shape), "out is not aligned"),
        (np.zeros(k.shape, ">f4"), "out has dtype >f4"),
        (np.broadcast_to(np.float32(0), k.shape), "out is read-only"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            manyhead.attention(q, k, v, out=out)


def test_bfloat16_by_structure():
    """bfloat16 that no NumPy type describes: the structured type that also comes out of DLPack."""
    q, k, v = tensors(1, 2, 5, 8, dtype=ml_dtypes.bfloat16)
    expected = manyhead.attention(q, k, v)
    assert expected.dtype == ml_dtypes.bfloat16
    result = manyhead.attention(*(x.view(BF16) for x in (q, k, v)))
    np.testing.assert_array_equal(result.view(np.uint16), expected.view(np.uint16))
    mixed = manyhead.attention(q, k.view(BF16), v)
    np.testing.assert_array_equal(mixed, expected)


@pytest.mark.filterwarnings("ignore:future versions")
def test_arrays_that_numpy_warns_of_writing():
    """Such are said to be writable, and their buffers are not."""
    q, k, v = tensors(1, 2, 3, 8)
    warned = np.broadcast_arrays(q, np.zeros((2, 2, 3, 8), np.float32))[0][:1]
    assert warned.flags.c_contiguous
    expected = manyhead.attention(q, k, v)
    np.testing.assert_array_equal(manyhead.attention(warned, k, v), expected)
    np.testing.assert_array_equal(manyhead.plan(q, k, v).run(warned, k, v), expected)


def test_float16_results_round_once():
    q, k, v = tensors(1, 1, 1, 8, dtype=np.float16)
    np.testing.assert_array_equal(manyhead.attention(q, k, v), v)  # one key: the weight is 1


# ---- PyTorch and JAX, where they are installed ----


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    arrays = random_tensors(rng, dtype, batch=2, q_len=5)
    names = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
    q, k, v = (torch.from_numpy(x.astype(np.float64)).to(names[dtype]) for x in arrays)
    expected = manyhead.attention(*arrays, return_lse=True)
    k_strided = k.transpose(1, 2).contiguous().transpose(1, 2)
    result = manyhead.attention(q, k_strided, v, return_lse=True)
    assert type(result.out) is torch.Tensor and result.out.dtype is names[dtype]
    assert result.lse.dtype is (torch.float64 if dtype == "f64" else torch.float32)
    np.testing.assert_array_equal(result.out.double().numpy(), expected.out.astype(np.float64))
    np.testing.assert_array_equal(result.lse.numpy(), expected.lse)
    assert _tensors.see(q, "q")[0] is q and _tensors.see(k_strided, "k")[0] is k_strided
    out = torch.full_like(result.out, 5)
    assert manyhead.attention(q, k, v, out=out) is out
    assert torch.equal(out, result.out)
    mask = torch.ones(k.shape[2], dtype=torch.bool)
    assert torch.equal(manyhead.attention(q, k, v, attn_mask=mask), out)
    lengths = torch.full((2,), k.shape[2], dtype=torch.int32)
    assert torch.equal(manyhead.attention(q, k, v, seqused_k=lengths), out)


def test_torch_errors():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"k requires a gradient.*k\.detach\(\)"):
        manyhead.attention(q, torch.zeros(1, 1, 2, 4, requires_grad=True), q)
    with pytest.raises(TypeError, match="v is on device meta"):
        manyhead.attention(q, q, torch.zeros(1, 1, 2, 4, device="meta"))
    for apart in (q.to_sparse(), q.to_mkldnn(), torch.nested.nested_tensor([q[0], q[0]])):
        for _ in range(2):
            with pytest.raises(TypeError, match="q: "):
                manyhead.attention(apart, q, q)
    for x in (torch.zeros(1, 1, 2, 4), torch.zeros(1, 3, 2, 4)[:, 2:], torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)):
        x.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(ValueError, match="k has a storage of 0 bytes, its shape needs"):
                manyhead.attention(q.to(x.dtype), x, q.to(x.dtype))
    x = torch.zeros(1, 1, 3, 4)
    x.untyped_storage().resize_(40)
    with pytest.raises(ValueError, match="v has a storage of 40 bytes, its shape needs 48"):
        manyhead.attention(q, torch.zeros(1, 1, 3, 4), x)
    with pytest.raises(TypeError, match="dtype int64"):
        manyhead.attention(q.long(), q, q)


@pytest.fixture
def fake(monkeypatch):
    """A PyTorch of which no tensor has been seen."""
    monkeypatch.setitem(sys.modules, "torch", fake_torch.module())
    monkeypatch.setattr(_tensors, "_Tensor", _tensors._NoTensor)
    monkeypatch.setattr(_tensors, "_like", None)
    monkeypatch.setattr(_tensors, "_grad_enabled", None)
    for name in ("_types", "_empty"):
        monkeypatch.setattr(_tensors, name, {})
    monkeypatch.setattr(_exec, "_runtimes", dict(_exec._runtimes))
    return sys.modules["torch"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_tensors_as_they_are(fake, dtype):
    """The first of PyTorch's tensors comes by way of NumPy, later ones do not, and results are the same."""

    def tensor_of(x):
        bits = x.astype(ml_dtypes.bfloat16).view(np.int16) if dtype == "bfloat16" else x.astype(dtype)
        return fake.Tensor(bits, dtype)

    arrays = tensors(2, 4, 5, 8)
    expected = manyhead.attention(*map(tensor_of, arrays), return_lse=True)
    assert type(expected.out) is fake.Tensor and expected.out.dtype.name == dtype
    plan = manyhead.plan(*map(tensor_of, arrays), return_lse=True)
    other = manyhead.plan(*map(tensor_of, tensors(2, 4, 6, 8)))
    apart = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]
    for call, given in ((manyhead.attention, arrays), (manyhead.attention, apart), (plan.run, arrays)):
        options = {} if call == plan.run else {"return_lse": True}
        for makes_out in (True, False):
            for numpy_looks in (True, False):  # the second time the plan is known
                q, k, v, out = map(tensor_of, (*given, np.zeros((2, 4, 5, 8))))
                result = call(q, k, v, out=None if makes_out else out, **options)
                assert type(result.out) is fake.Tensor and (makes_out or result.out is out)
                assert numpy_looks or not any(x.seen_by_numpy for x in (q, k, v, *result))
                np.testing.assert_array_equal(result.out.array, expected.out.array)
                np.testing.assert_array_equal(result.lse.array, expected.lse.array)
    with pytest.raises(ValueError, match="q has shape .*, the plan was made for"):
        other.run(*map(tensor_of, arrays))
    with pytest.raises(ValueError, match="k has strides .*, the plan was made for"):
        plan.run(*map(tensor_of, (arrays[0], apart[1], arrays[2])))


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias"])
@pytest.mark.parametrize("dtype", ["bool", "float32", "bfloat16"])
def test_masks_as_they_are(fake, name, dtype):
    if name == "attn_bias" and dtype == "bool":
        with pytest.raises(TypeError, match="attn_bias has dtype bool"):
            manyhead.attention(*tensors(1, 2, 3, 8), attn_bias=fake.Tensor(np.ones((3, 3), bool)))
        return
    q, k, v = tensors(2, 4, 5, 8)
    drawn = np.random.default_rng(1).standard_normal((2, 1, 5, 5))
    mask = drawn > -1 if dtype == "bool" else drawn.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    expected = manyhead.attention(q, k, v, **{name: mask})
    bits = mask.view(np.int16) if dtype == "bfloat16" else mask
    apart = np.ascontiguousarray(bits.swapaxes(2, 3)).swapaxes(2, 3)
    for given in (bits, apart):
        for numpy_looks in (True, True, False):  # at the first tensors, and for a plan of their like
            x, *qkv = fake.Tensor(given, dtype), *map(fake.Tensor, (q, k, v))
            np.testing.assert_array_equal(manyhead.attention(*qkv, **{name: x}).array, expected)
            assert numpy_looks or x.seen_by_numpy == 0
    plan = manyhead.plan(q, k, v, **{name: x})
    for y in (x, fake.Tensor(apart, dtype)):
        np.testing.assert_array_equal(plan.run(q, k, v, **{name: y}), expected)
    np.testing.assert_array_equal(plan.bind(q, k, v, **{name: x})(), expected)
    with pytest.raises(ValueError, match="attn_(mask|bias.*) has strides"):
        plan.run(q, k, v, **{name: fake.Tensor(bits, dtype)})
    with pytest.raises(ValueError, match="attn_bias .*has shape|attn_mask has shape"):
        manyhead.attention(*map(fake.Tensor, (q, k, v)), **{name: fake.Tensor(bits[..., :4], dtype)})


@pytest.mark.parametrize("seen_as", ["as they are", "apart", "of another type"])
@pytest.mark.parametrize("name", ["key_mask", "seqused_k", "q_offset", "alibi_slopes", "sinks"])
def test_vectors_as_they_are(fake, name, seen_as):
    """What C can read stays a tensor; what it cannot is converted, and counts as much."""
    q, k, v = tensors(2, 4, 5, 8)
    given, another = {
        "key_mask": (np.arange(10).reshape(2, 5) % 3 > 0, "uint8"),
        "seqused_k": (np.array([3, 4], np.int32), "int16"),
        "q_offset": (np.array([2, -1]), "int16"),
        "alibi_slopes": (np.arange(8, dtype=np.float32).reshape(2, 4) / 8, "float64"),
        "sinks": (np.arange(4, dtype=np.float32), "float16"),
    }[name]
    options = {"causal": True, "align": "top_left"}
    expected = manyhead.attention(q, k, v, **{name: given}, **options)
    assert not np.array_equal(manyhead.attention(q, k, v, causal=True, align="top_left"), expected)
    if seen_as == "of another type":
        given = given.astype(another)
    elif seen_as == "apart":
        given = np.repeat(given, 2, axis=-1)[..., ::2]
    stays = seen_as == "as they are" or name == "key_mask"  # whose strides C reads, and whose bytes of either type
    plan = manyhead.plan(q, k, v, **{name: fake.Tensor(given)}, **options)
    for numpy_looks in (True, True, False):
        x, *qkv = fake.Tensor(given), *map(fake.Tensor, (q, k, v))
        np.testing.assert_array_equal(manyhead.attention(*qkv, **{name: x}, **options).array, expected)
        assert numpy_looks or (x.seen_by_numpy == 0) == stays
        np.testing.assert_array_equal(plan.run(*qkv, **{name: x}).array, expected)
        np.testing.assert_array_equal(plan.run(q, k, v, **{name: given}), expected)
    shorter = given[..., :-1]
    with pytest.raises(ValueError, match=f"{name} has shape"):
        plan.run(q, k, v, **{name: fake.Tensor(shorter)})


@pytest.mark.parametrize("name", ["seqused_k", "q_offset", "alibi_slopes", "sinks"])
def test_numbers_without_a_dimension(fake, name):
    """They are vectors of one, whatever their type."""
    q, k, v = tensors(1, 1, 5, 8)
    number = np.array(2, np.int64 if name in ("seqused_k", "q_offset") else np.float32)
    options = {"causal": True, "align": "top_left"}
    expected = manyhead.attention(q, k, v, **{name: number.reshape(1)}, **options)
    for given in (number, number.astype(np.int16), fake.Tensor(number), fake.Tensor(number), fake.Tensor(number)):
        np.testing.assert_array_equal(manyhead.attention(q, k, v, **{name: given}, **options), expected)


def test_tensors_that_numpy_must_see(fake):
    q, k, v = tensors(1, 2, 3, 8)
    expected = manyhead.attention(q, k, v)
    manyhead.attention(*map(fake.Tensor, (q, k, v)))
    memory = np.zeros(q.nbytes + 1, np.uint8)
    misaligned = memory[1:].view(np.float32).reshape(q.shape)
    misaligned[:] = q
    for _ in range(2):
        np.testing.assert_array_equal(manyhead.attention(*map(fake.Tensor, (misaligned, k, v))).array, expected)
        np.testing.assert_array_equal(manyhead.attention(fake.Tensor(q), k, fake.Tensor(v)).array, expected)
        np.testing.assert_array_equal(manyhead.attention(q, fake.Tensor(k), v), expected)
        assert manyhead.attention(*map(fake.Tensor, (q[:, :, :0], k, v))).shape == (1, 2, 0, 8)
        assert not manyhead.attention(*map(fake.Tensor, (q, k[:, :, :0], v[:, :, :0]))).array.any()
        for wrong, said in (
            (fake.Tensor(q, requires_grad=True), "requires a gradient"),
            (fake.Tensor(q, is_cpu=False, device="meta"), "is on device meta"),
            (fake.Tensor(q, bytes_left=0), "has a storage of 0 bytes, its shape needs 192"),
            (fake.Tensor(q, negative=True), "negative bit set"),
            (fake.Tensor(q.astype(np.int64)), "has dtype int64"),
        ):
            exception = ValueError if "storage" in said else TypeError
            with pytest.raises(exception, match="q " + said if said != "negative bit set" else "q: " + said):
                manyhead.attention(wrong, fake.Tensor(k), fake.Tensor(v))
            with pytest.raises(exception, match="out:? " + said):
                manyhead.attention(*map(fake.Tensor, (q, k, v)), out=wrong)


def test_gradients_that_nobody_asks_for(fake, monkeypatch):
    q, k, v = tensors(1, 2, 3, 8)
    expected = manyhead.attention(q, k, v)
    wanted = [fake.Tensor(x, requires_grad=True) for x in (q, k, v)]
    manyhead.attention(*map(fake.Tensor, (q, k, v)))
    monkeypatch.setattr(_tensors, "_grad_enabled", lambda: False)
    fake.is_grad_enabled = lambda: False
    for _ in range(2):
        np.testing.assert_array_equal(manyhead.attention(*wanted).array, expected)


def test_torch_is_not_imported():
    if "torch" in sys.modules:
        pytest.skip("another test has imported torch")
    manyhead.attention(*tensors(1, 1, 2, 4))
    assert "torch" not in sys.modules and "jax" not in sys.modules


def test_parameters_of_torch():
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 1, 2, 4)
    expected = manyhead.attention(q, q, q)
    parameter, wanted = torch.nn.Parameter(q), q.clone().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for x in (parameter, wanted, wanted):
                result = manyhead.attention(x, x, x)
                assert torch.equal(result, expected) and not result.requires_grad
    with pytest.raises(TypeError, match="q requires a gradient"):
        manyhead.attention(wanted, q, q)
    module = torch.nn.MultiheadAttention(8, 2)
    layer = manyhead.MultiHeadAttention.from_state_dict(dict(module.named_parameters()), num_heads=2)
    x = torch.randn(1, 5, 8)
    again = manyhead.MultiHeadAttention.from_state_dict(module.state_dict(), num_heads=2)
    assert torch.equal(layer(x), again(x))


def test_jax_arrays_without_data():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 2, 3, 4))
    for trace in (jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())):
        with pytest.raises(TypeError, match="q is traced .*: use jax.pure_callback"):
            trace(lambda x: manyhead.attention(x, x, x))(x[None])
    with pytest.raises(TypeError, match="scale is traced"):
        jax.jit(lambda scale: manyhead.attention(x, x, x, scale=scale))(0.5)
    gone = jax.numpy.zeros((1, 2, 3, 4))
    gone.delete()
    with pytest.raises(ValueError, match="k was deleted"):
        manyhead.attention(x, gone, x)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_jax(dtype):
    jax = pytest.importorskip("jax")
    arrays = random_tensors(np.random.default_rng(4), dtype, batch=1, q_len=5)
    expected = manyhead.attention(*arrays, return_lse=True)
    q, k, v = (jax.numpy.asarray(x) for x in arrays)
    result = manyhead.attention(q, k, v, return_lse=True)
    assert isinstance(result.out, jax.Array) and result.out.dtype == arrays[0].dtype
    np.testing.assert_array_equal(np.asarray(result.out), expected.out)
    np.testing.assert_array_equal(np.asarray(result.lse), expected.lse)
    with pytest.raises(TypeError, match="out is a JAX array"):
        manyhead.attention(q, k, v, out=result.out)
    expected = reference.attention(*arrays, causal=True)
    close(np.asarray(manyhead.attention(q, k, v, causal=True, align="top_left")), expected.out, dtype)


def test_tolerances_name_every_dtype():
    assert problems.TOLERANCE.keys() == DTYPES.keys()
