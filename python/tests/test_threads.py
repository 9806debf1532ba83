"""Many Python threads at once: right results, and the interpreter goes on while C computes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import manyhead
import numpy as np
import pytest
import reference
from problems import close, random_tensors


def test_threads_share_plans_and_make_new_ones():
    rng = np.random.default_rng(0)
    problems = [random_tensors(rng, "f32", batch=1) for _ in range(12)]
    expected = [reference.attention(*p, causal=True).out for p in problems]

    def work(seed):
        order = np.random.default_rng(seed).permutation(len(problems))
        for _ in range(6):
            for i in order:
                close(manyhead.attention(*problems[i], causal=True, align="top_left"), expected[i], "f32")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


def test_one_plan_and_one_layer_in_many_threads():
    rng = np.random.default_rng(1)
    q, k, v = random_tensors(rng, "f32", batch=2, q_len=40, kv_len=130)
    plan = manyhead.plan(q, k, v)
    expected = manyhead.attention(q, k, v)
    w = rng.standard_normal((4, 16, 16)).astype(np.float32)
    layer = manyhead.MultiHeadAttention(*w, num_heads=4)
    x = rng.standard_normal((2, 9, 16)).astype(np.float32)
    layer_expected = layer(x)

    def work(_):
        for _ in range(20):
            np.testing.assert_array_equal(plan.run(q, k, v), expected)
            np.testing.assert_array_equal(layer(x), layer_expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


def test_errors_belong_to_the_thread_that_made_them():
    q = np.ones((1, 1, 2, 4), np.float32)

    def work(length):
        for _ in range(50):
            try:
                manyhead.attention(q, q, q, seqused_k=[length])
            except ValueError as error:
                assert str(length) in str(error)
            else:
                raise AssertionError("no error")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1000, 1008)))


def test_the_interpreter_goes_on_while_c_computes():
    q = np.ones((1, 8, 3000, 64))
    before = time.perf_counter()
    worker = threading.Thread(target=lambda: manyhead.attention(q, q, q, threads=1))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    seconds = time.perf_counter() - before
    # With the interpreter lock held, the loop would run a few times at the start and once at the end.
    assert ticks >= 10, f"{ticks} in {seconds:.3f} s"


FORK = """
import os, manyhead, numpy as np
q, k, v = (np.random.default_rng(0).standard_normal((4, 8, 24, 64), dtype=np.float32) for _ in range(3))
expected = manyhead.attention(q, k, v)
right = lambda calls: all(np.array_equal(manyhead.attention(q, k, v), expected) for _ in range(calls))
assert right(300)  # so close that threads stand by
child = os.fork()
if child == 0:
    os._exit(0 if right(100) else 1)
assert os.waitpid(child, 0)[1] == 0 and right(100)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_without_the_threads_of_its_parent():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


# Of a runtime that is told how many threads it has: the number of those that calls are for says whose they are.
ON_OPENMP = """
import ctypes, os, sys, time
sys.path.insert(0, TESTS)
import fake_torch
sys.modules["torch"] = torch = fake_torch.module(openmp=True)
runtime = ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
import manyhead, numpy as np

array = np.random.default_rng(0).standard_normal((4, 8, 24, 64), dtype=np.float32)
expected = manyhead.attention(array, array, array, threads=1)
tokens = array[:, 0]
layer = manyhead.MultiHeadAttention(*(np.eye(64, dtype=np.float32) for _ in range(4)), num_heads=4)
expected_of_layer = layer(tokens, threads=1)
plan = manyhead.plan(array, array, array)
lses = array[..., 0]
expected_of_merge = manyhead.merge_states(array, lses, threads=1).out

def forward(some, options):  # has no option for threads
    if not options:
        yield lambda: layer.forward_torch(some, some, some, need_weights=False, batch_first=True)[0], expected_of_layer

def check(kind, wanted, **options):
    x, some = kind(array), kind(tokens)
    for call, result in (
        (lambda: manyhead.attention(x, x, x, **options), expected),
        (lambda: plan.run(x, x, x, **options), expected),
        (lambda: plan.bind(x, x, x, **options)(), expected),
        (lambda: layer(some, **options), expected_of_layer),
        (lambda: manyhead.merge_states(x, kind(lses), **options).out, expected_of_merge),
        *forward(some, options),
    ):
        for _ in range(60):  # a team that was late is left alone for up to a second
            with manyhead.profile() as profile:
                out = call()
            assert np.array_equal(getattr(out, "array", out), result)
            threads = max(call["threads"] for call in profile.calls)
            if threads == wanted:
                break
            time.sleep(0.5)
        assert threads == wanted, (kind, wanted, options)

cpus = len(os.sched_getaffinity(0))  # no more of manyhead's own threads
for most in (3, 1, 5):  # so not all the same
    runtime.omp_set_num_threads(most)
    check(torch.Tensor, min(4, most if IS_ON else cpus), threads=4)
    check(torch.Tensor, min(6, most if IS_ON else cpus))
    check(np.asarray, min(4, cpus), threads=4)
child = os.fork()
if child == 0:
    check(torch.Tensor, 1)  # the runtime would wait for its parent's threads, and manyhead's are not there either
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

FORKED_BEFORE = """
import os
import torch
x = torch.ones(1000, 1000)
x + x  # on threads that a child has not
q = torch.ones(4, 8, 24, 64)
if os.fork() == 0:
    import manyhead
    manyhead.attention(q, q, q, threads=2)
    os._exit(0)
assert os.wait()[1] == 0
"""

IN_ANOTHER_THREAD = """
import threading
import torch, manyhead
q = torch.ones(4, 8, 24, 64)
torch.set_num_threads(3)
seen = []

def attend():
    with manyhead.profile() as profile:
        manyhead.attention(q, q, q)
    seen.append(profile.calls[0]["threads"])

thread = threading.Thread(target=attend)  # in which PyTorch has done nothing
thread.start()
thread.join()
attend()
assert seen == [3, 3], seen
"""


def run_on_openmp(code, **changes):
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_", "MH_O"))}
    environment |= {"MH_THREADS": "6"} | changes
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def has_libgomp():
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_libgomp(), reason="no libgomp here")
@pytest.mark.parametrize(
    "is_on, changes",
    [
        (True, {}),
        (False, {"MH_OPENMP": "0"}),
        (False, {"OMP_WAIT_POLICY": " Passive"}),
        (False, {"GOMP_SPINCOUNT": "0"}),
    ],
)
def test_tensors_on_the_threads_of_pytorch(is_on, changes):
    run_on_openmp(f"TESTS = {str(Path(__file__).parent)!r}\nIS_ON = {is_on}\n" + ON_OPENMP, **changes)


@pytest.mark.parametrize("code", [FORKED_BEFORE, IN_ANOTHER_THREAD])
def test_pytorch_itself(code):
    torch = pytest.importorskip("torch")
    if not torch.backends.openmp.is_available():
        pytest.skip("PyTorch without OpenMP")
    run_on_openmp(code)
