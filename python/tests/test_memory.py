"""Nothing outside the arrays is read or written, and nothing is kept: guard pages on both sides, counted references."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import weakref

import manyhead
import numpy as np
import problems
import pytest
from interpreter import run_python
from problems import DTYPES, random_options, random_tensors

PAGE = mmap.PAGESIZE
PROT_NONE = 0


class Guarded:
    """Copies of arrays in memory of their own, each against a page that may not be touched."""

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.maps = []

    def copy(self, array, at_end):
        if array.size == 0:
            return array
        pages = -(-array.nbytes // PAGE)
        memory = mmap.mmap(-1, (pages + 2) * PAGE)
        whole = np.frombuffer(memory, np.uint8)
        start = PAGE + (pages * PAGE - array.nbytes if at_end else 0)
        view = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        base = whole.ctypes.data
        for edge in (base, base + (pages + 1) * PAGE):
            assert self.libc.mprotect(ctypes.c_void_p(edge), PAGE, PROT_NONE) == 0
        self.maps.append((memory, base, pages))
        return view

    def open(self):
        """munmap of the whole works either way; Python must not see a fault when it frees the arrays."""
        for _, base, pages in self.maps:
            self.libc.mprotect(ctypes.c_void_p(base), (pages + 2) * PAGE, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.fixture
def guarded():
    guard = Guarded()
    yield guard
    guard.open()


@pytest.fixture
def on_isa():
    before = manyhead.isa()
    yield manyhead.set_isa
    manyhead.set_isa(before)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect through ctypes")
@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", [name for name, supported in manyhead.isas().items() if supported])
@pytest.mark.parametrize("seed", range(12))
def test_guard_pages_around_every_array(guarded, on_isa, seed, isa, dtype, at_end):
    on_isa(isa)
    rng = np.random.default_rng(seed)
    q, k, v = random_tensors(rng, dtype)
    options = random_options(rng, set(rng.choice(problems.OPTIONS, 4)), q, k)
    expected = manyhead.attention(q, k, v, return_lse=True, return_weights=True, **options)
    inside = {name: guarded.copy(x, at_end) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out = guarded.copy(np.zeros((*q.shape[:3], v.shape[3]), q.dtype), at_end)
    q, k, v = (guarded.copy(x, at_end) for x in (q, k, v))
    result = manyhead.attention(q, k, v, out=out, return_lse=True, return_weights=True, **inside)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect through ctypes")
@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
def test_guard_pages_around_the_layer(guarded, at_end):
    rng = np.random.default_rng(0)
    w = [guarded.copy(rng.standard_normal((15, 15)).astype(np.float32), at_end) for _ in range(4)]
    b = guarded.copy(rng.standard_normal(15).astype(np.float32), at_end)
    layer = manyhead.MultiHeadAttention(*w, b_q=b, b_o=b, bias_k=b, bias_v=b, num_heads=3)
    x = guarded.copy(rng.standard_normal((2, 7, 15)).astype(np.float32), at_end)
    mask = guarded.copy(rng.random((7, 7)) < 0.5, at_end)
    out = guarded.copy(np.zeros_like(x), at_end)
    layer(x, attn_mask=mask, out=out)
    np.testing.assert_array_equal(out, layer(x.copy(), attn_mask=mask.copy()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_past_the_used_ones_are_not_looked_at(dtype):
    q, k, v = random_tensors(np.random.default_rng(1), dtype, batch=2, kv_len=37)
    used = [20, 3]
    expected = manyhead.attention(q, k, v, seqused_k=used)
    for b, length in enumerate(used):
        k[b, :, length:] = np.nan
        v[b, :, length:] = np.nan
    np.testing.assert_array_equal(manyhead.attention(q, k, v, seqused_k=used), expected)


def test_first_calls_while_python_shuts_down():
    code = """
import builtins, numpy as np, manyhead as mh
q, w = np.ones((1, 2, 3, 8), "f4"), np.ones((1, 8), "f4")
class Last:
    def __init__(self, call): self.call = call
    def __del__(self, print=print): print(self.call())
builtins.kept = [Last(lambda call=call: call() is not None) for call in (
    lambda: mh.attention(q, q, q, return_lse=True, sinks=[1, 2], seqused_k=[3]),
    lambda: mh.attention(q.astype("f2"), q.astype("f2"), q.astype("f2"), attn_mask=np.ones((3, 3), bool)),
    lambda: mh.attention(q.astype(">f4"), q, q),
    lambda: mh.merge_state(q, q[..., 0].astype("f8"), q, q[..., 0]),
    lambda: mh.MultiHeadAttention(w, w, w, num_heads=1)(q[0]),
    lambda: mh.attention(q, q, q),
)]
"""
    result = run_python(code)
    assert result.stdout.split() == ["True"] * 6, result.stderr


def test_calls_keep_no_reference():
    class Tensor(np.ndarray):  # plain arrays cannot be referred to weakly
        pass

    arrays = [np.ones((1, 2, 3, 4), np.float32).view(Tensor) for _ in range(3)]
    mask = np.ones((3, 3), bool).view(Tensor)
    counts = [sys.getrefcount(x) for x in (*arrays, mask)]
    result = manyhead.attention(*arrays, attn_mask=mask, return_lse=True)
    plan = manyhead.plan(*arrays, attn_mask=mask)
    plan.run(*arrays, attn_mask=mask)
    with pytest.raises(ValueError):
        manyhead.attention(*arrays, attn_mask=mask, seqused_k=[9])
    gc.collect()
    assert [sys.getrefcount(x) for x in (*arrays, mask)] == counts
    gone = weakref.ref(arrays[0])
    del arrays
    gc.collect()
    assert gone() is None
    assert (result.out == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("work", [
    "manyhead.attention(q, q, q, scale=float(i))",  # a plan of about 700 bytes each
    "manyhead.attention(q, q, q, return_lse=True, return_weights=True)",
    "i % 20 or manyhead.MultiHeadAttention(*w, num_heads=4)(x)",  # 64 kB of weights each
    "fails(i)",
])  # fmt: skip
def test_memory_does_not_grow(work):
    """Plans, results, layers and errors give back what they took; in a process without memory freed by other tests."""
    code = f"""
import numpy as np, manyhead, pathlib
q, x, w = (np.ones(shape, np.float32) for shape in ((1, 2, 3, 8), (1, 3, 64), (4, 64, 64)))
def fails(i):
    try:
        manyhead.plan(q, q, q, scale=float(i), seqused_k=(1,)).run(q, q, q, seqused_k=[9])
    except ValueError:
        return
    raise AssertionError
def run(rounds):
    for i in range(rounds):
        {work}
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * {PAGE // 1024}
before = run(2000)
print(run(20000) - before)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4000, f"{done.stdout} kB"
