"""Many Python threads at once: right results, and the interpreter goes on while C computes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
