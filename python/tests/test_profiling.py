"""Profiles, logs, probes and problem lines of the library, as Python sees them. What they say, not how long it took."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import manyhead
import numpy as np
import pytest
from interpreter import run_python
from manyhead import _measure
from manyhead._measure import ProblemLineError, Workload, parse_problem

PHASES = ["pack", "scores", "mask", "softmax", "values", "store", "merge", "weights", "project", "idle"]


def arrays(length: int = 64, heads: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, heads, length, 16), dtype=np.float32)


# --- manyhead.profile -------------------------------------------------------------------------------------------------


def test_a_call_with_its_phases():
    q = arrays(200)
    with manyhead.profile() as profile:
        manyhead.attention(q, q, q, causal=True)
    assert len(profile.calls) == 1
    call = profile.calls[0]
    assert call["kind"] == "attention" and call["problem"] == "f32 b1 h4 q200 kv200 d16 causal"
    assert call["isa"] == manyhead.isa() and call["route"] in ("tile", "decode", "matrix")
    assert call["flops"] == 2 * 32 * 4 * 200 * 201 / 2 and call["bytes"] == 4 * 4 * 4 * 200 * 16
    assert call["tasks"] >= 1 and 1 <= call["threads"] <= max(manyhead.threads(), 1)
    assert list(call["phases"]) == PHASES
    assert all(call["phases"][name] > 0 for name in ("pack", "scores", "mask", "softmax", "values", "store"))
    assert all(call["phases"][name] == 0 for name in ("merge", "weights", "project"))
    spent = sum(call["phases"].values())
    assert spent == pytest.approx(call["threads"] * call["seconds"], rel=0.3), "phases and waiting are all there is"


def test_phases_of_other_work():
    q, k = arrays(1), arrays(2000)
    with manyhead.profile() as profile:
        for _ in range(2):
            manyhead.attention(q, k, k)
            manyhead.attention(k, k[:, :, :64], k[:, :, :64], return_weights=True)
    decode, weights = profile.calls[:2]
    assert decode["phases"]["merge"] > 0 and decode["route"] == "decode"
    assert weights["phases"]["weights"] > 0 and "weights" in weights["problem"].split()


def test_calls_in_order_of_their_beginning_and_from_many_threads():
    q = arrays(8)

    def work():
        for _ in range(20):
            manyhead.attention(q, q, q)

    with manyhead.profile() as profile:
        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    calls = profile.calls
    starts = [call["start"] for call in calls]
    assert len(calls) == 60 and profile.summary["calls_dropped"] == 0
    assert len({call["thread"] for call in calls}) == 3
    for thread in {call["thread"] for call in calls}:
        own = [call["start"] for call in calls if call["thread"] == thread]
        assert own == sorted(own)
    assert min(starts) >= 0 and max(starts) <= profile.summary["seconds"]


def test_what_there_is_no_room_for_is_counted():
    q = arrays(8)
    with manyhead.profile(calls=3, tasks=2) as profile:
        for _ in range(5):
            manyhead.attention(q, q, q)
    assert len(profile.calls) == 3
    assert profile.summary["calls_dropped"] == 2 and profile.summary["tasks_dropped"] > 0


def test_a_layer_projects_and_attends():
    rng = np.random.default_rng(0)
    width, tokens = 64, 160
    given = {name: rng.standard_normal((width, width), dtype=np.float32) for name in ("w_q", "w_k", "w_v", "w_o")}
    layer = manyhead.MultiHeadAttention(num_heads=4, **given)
    x = rng.standard_normal((2, tokens, width), dtype=np.float32)
    with manyhead.profile() as profile:
        layer(x)
    outer, inner = profile.calls
    assert (outer["kind"], inner["kind"]) == ("layer", "attention")
    assert outer["problem"] == f"layer f32 b2 q{tokens} kv{tokens} embed_dim {width} heads 4"
    assert outer["start"] <= inner["start"] and outer["seconds"] >= inner["seconds"]
    assert outer["phases"]["project"] > 0 and outer["phases"]["scores"] > 0
    assert inner["phases"]["project"] == 0 and inner["phases"]["scores"] > 0
    assert outer["tasks"] > inner["tasks"] >= 1, "its own and its attention's"


def test_counters_are_numbers_or_the_reason_why_not():
    q = arrays()
    with manyhead.profile(counters=True) as profile:
        manyhead.attention(q, q, q)
    for thread in profile.summary["threads"]:
        assert all(count is None or count >= 0 for count in thread["counters"].values())
        if None in thread["counters"].values():
            assert profile.summary["counters_note"]
    with manyhead.profile() as profile:
        manyhead.attention(q, q, q)
    assert profile.summary["threads"][0]["counters"] is None
    assert profile.summary["counters_note"] == "hardware counters were not asked for"


def test_an_empty_profile(tmp_path):
    with manyhead.profile() as profile:
        pass
    assert profile.calls == [] and profile.summary["threads"] == []
    profile.save(tmp_path / "trace.json")
    check_trace((tmp_path / "trace.json").read_text(), calls=0)


def check_trace(text: str, calls: int | None = None) -> dict:
    """What Perfetto relies on: slices with times, which lie inside each other on a thread."""
    trace = json.loads(text)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in slices} <= {"call", "task", "phase"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    if calls is not None:
        assert sum(event["cat"] == "call" for event in slices) == calls
    assert len(trace["manyhead"]["calls"]) == sum(event["cat"] == "call" for event in slices)
    return trace


def test_the_trace(tmp_path):
    q = arrays(100)
    with manyhead.profile() as profile:
        for _ in range(3):
            manyhead.attention(q, q, q)
    profile.save(tmp_path / "trace.json")
    trace = check_trace((tmp_path / "trace.json").read_text(), calls=3)
    assert trace["manyhead"] == profile.summary
    tasks = [event for event in trace["traceEvents"] if event.get("cat") == "task"]
    assert len(tasks) >= 3 and all({"call", "batch", "kv_head", "row_begin"} <= set(event["args"]) for event in tasks)
    with pytest.raises(OSError):
        profile.save(tmp_path / "no" / "such" / "folder.json")


def test_a_profile_is_read_when_it_has_ended():
    opened = manyhead.profile()
    with pytest.raises(RuntimeError, match="the profile has not ended: read it after its with block"):
        opened.calls  # noqa: B018
    with opened:
        for read in (lambda: opened.summary, lambda: opened.calls, lambda: opened.trace, lambda: opened.save("x")):
            with pytest.raises(RuntimeError, match="has not ended"):
                read()
    assert opened.calls == []


def test_one_profile_at_a_time():
    q = arrays()
    with manyhead.profile() as outer:
        with pytest.raises(ValueError, match="a profile is running: end it first"), manyhead.profile():
            pass
        manyhead.attention(q, q, q)
    assert len(outer.calls) == 1, "the inner one changed nothing"
    with manyhead.profile() as later:
        pass
    assert len(outer.calls) == 1 and later.calls == [], "each keeps its own"
    with outer:
        pass
    assert outer.calls == [], "and can be opened again"


def test_an_error_ends_the_profile():
    with pytest.raises(KeyError), manyhead.profile():
        raise KeyError
    with manyhead.profile():
        pass


@pytest.mark.parametrize("name", ["calls", "tasks"])
@pytest.mark.parametrize("number", [0, -1, 2**24 + 1, 1.5, True, None, "3"])
def test_numbers_that_are_no_room(name, number):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {number!r}, must be a whole number from 1 to 2^24")):
        manyhead.profile(**{name: number})


# --- environment ------------------------------------------------------------------------------------------------------

CALL = "import numpy, manyhead; x = numpy.ones((1, 2, 8, 4), numpy.float32); manyhead.attention(x, x, x)\n"
AGAIN = """
for call in range(2):
    try:
        manyhead.attention(x, x, x)
    except Exception as error:
        print(type(error).__name__, error)
"""
FAILS = CALL.replace("manyhead.attention(x, x, x)\n", "") + AGAIN


def test_a_line_for_each_call():
    done = run_python(CALL * 3, MH_VERBOSE="1")
    assert done.returncode == 0 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(
        re.fullmatch(r"manyhead: f32 b1 h2 q8 kv8 d4  # \d+\.\d\d us, 1 thread, \w+@\w+", line) for line in lines
    )


def test_no_lines():
    done = run_python(CALL, MH_VERBOSE="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("value", ["2", "yes", "-1", " 1"])
def test_a_wrong_word_is_refused_by_each_call(value):
    done = run_python(FAILS, MH_VERBOSE=value)
    said = f'ValueError the environment variable MH_VERBOSE is "{value}", must be 0 or 1'
    assert done.stdout.splitlines() == [said, said] and done.stderr == ""


def test_a_trace_of_the_whole_process(tmp_path):
    path = tmp_path / "trace.json"
    done = run_python(CALL * 5, MH_PROFILE=str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    trace = check_trace(path.read_text(), calls=5)
    assert {call["problem"] for call in trace["manyhead"]["calls"]} == {"f32 b1 h2 q8 kv8 d4"}
    assert sum(event.get("cat") == "task" for event in trace["traceEvents"]) >= 1


def test_a_trace_beside_lines(tmp_path):
    done = run_python(CALL, MH_PROFILE=str(tmp_path / "trace.json"), MH_VERBOSE="1")
    assert done.returncode == 0 and done.stderr.startswith("manyhead: f32 ")
    check_trace((tmp_path / "trace.json").read_text(), calls=1)


def test_a_trace_that_cannot_be_written_is_refused_by_each_call(tmp_path):
    path = str(tmp_path / "no" / "trace.json")
    done = run_python(FAILS, MH_PROFILE=path)
    why = "which cannot be written: No such file or directory"
    said = f'ValueError the environment variable MH_PROFILE is "{path}", {why}'
    assert done.stdout.splitlines() == [said, said] and done.stderr == ""


def test_a_profile_of_the_programs_own_inside_one_of_the_environment(tmp_path):
    path = tmp_path / "trace.json"
    code = CALL + "try:\n    manyhead.profile().__enter__()\nexcept ValueError as error:\n    print(error)\n"
    done = run_python(code, MH_PROFILE=str(path))
    assert done.stdout == "a profile is running: end it first\n", done.stderr
    check_trace(path.read_text(), calls=1)


def test_a_profile_that_the_program_ends_is_written_as_far_as_it_came(tmp_path):
    path = tmp_path / "trace.json"
    code = CALL + "from manyhead._library import lib\nassert lib.mh_profile_end() == 0\n" + CALL
    done = run_python(code, MH_PROFILE=str(path))
    assert (done.returncode, done.stderr) == (0, "")
    check_trace(path.read_text(), calls=1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_children_leave_their_parents_file_alone(tmp_path, leave):
    path = tmp_path / "trace.json"
    code = CALL + (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for _ in range(7):\n"
        "        manyhead.attention(x, x, x)\n"
        f"    {leave}\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "manyhead.attention(x, x, x)\n"
    )
    done = run_python(code, MH_PROFILE=str(path))
    assert (done.returncode, done.stderr) == (0, "")
    check_trace(path.read_text(), calls=2)


# --- problem lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        ("f32 b1 h2 q3 kv4 d5 \u00e9t\u00e9", 20, '"\u00e9t\u00e9" is not a word of a problem (column 21)'),
        ("f32 b1 h2 q3 kv4 d5 caus\u00e4l", 20, "is not a word of a problem"),
        ("\u00bd b1", 0, "is not a dtype: f32, f64, bf16 or f16"),
        ("\U0001f642", 0, "is not a dtype"),
        ("f32 b\u0661 h2", 4, "is not a word of a problem"),
        ("", 0, "the line is empty"),
        ("f32 b1 h2 q3 kv4", 16, "d<number> is missing"),
        ("f32 b1 b2", 7, "is the second of its kind"),
        ("f32 b1 window=3", 7, "must be window=<number>,<number>"),
    ],
)
def test_lines_that_are_no_problem(line, column, said):
    with pytest.raises(ProblemLineError) as error:
        parse_problem(line)
    assert said in str(error.value) and error.value.column == column
    assert error.value.pointed() == f"{line}\n{' ' * column}^"


@pytest.mark.parametrize("before", ["f32 \u00e9", "f32 \u00e9t\u00e9 b1"])
def test_columns_behind_other_letters_are_those_of_the_text(before):
    """The library counts bytes; the mark has to stand under the first word at fault."""
    with pytest.raises(ProblemLineError) as error:
        parse_problem(f"{before} casual")
    assert error.value.column == 4


def test_strange_text():
    assert parse_problem("f32\tb1  h2 q3\nkv4 d5\r\n").heads == 2
    for line, column in (("\udcff b1", 0), ("f32 b1 h2 q3 kv4 d5\0 and more", 19)):
        with pytest.raises(ProblemLineError) as error:
            parse_problem(line)
        assert error.value.column == column


def test_what_a_line_says_is_what_the_library_writes():
    line = (
        "f64 b2 h6/3 q5 kv9 d7 v3 causal align=br window=4,2 softcap=2.5 scale=0.5 alibi=signed sinks mask bias=f64 "
        "keymask lens i64 fastexp lse2 weights meanw colsums scores=biased bshd"
    )
    assert _measure.Planned(line).line == line
    assert _measure.Planned(" ".join([line.split()[0], *reversed(line.split()[1:])])).line == line


# --- problems made real -----------------------------------------------------------------------------------------------

WORDS = {
    "plain": ("", set()),
    "masks": ("causal align=br window=6,2 mask keymask", {"mask", "key_mask"}),
    "bias": ("bias softcap=20 alibi align=br", {"bias", "alibi_slopes"}),
    "bias of another type": ("bias=bf16 alibi=signed slopes=bh sinks align=tl", {"bias", "alibi_slopes", "sinks"}),
    "lengths": ("lens offsets i64 causal", {"seqused_k", "q_offset"}),
    "lengths of 32 bits": ("lens sinks bshd", {"seqused_k", "sinks"}),
    "outputs": ("lse weights meanw colsums scores=raw", {"lse", "weights", "mean_weights", "column_sums", "scores"}),
    "other outputs": ("lse2 scores=biased bias bshd", {"lse", "scores", "bias"}),
}


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("isa", [name for name, runs in manyhead.isas().items() if runs])
def test_every_word_runs_and_gives_finite_numbers(dtype, name, isa):
    words, extra = WORDS[name]
    for sizes in ("b2 h4/2 q5 kv13 d8 v6", "b1 h2 q40 kv50 d33"):
        workload = Workload(f"{dtype} {sizes} {words}", isa=isa, threads=1)
        assert set(workload.arrays) == {"q", "k", "v", "out"} | extra
        workload.run()
        for output in {"out", "lse", "weights", "mean_weights", "column_sums", "scores"} & set(workload.arrays):
            values = workload.arrays[output]
            if dtype == "bf16" and output == "out":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            assert np.isfinite(values).all(), output
            assert values.any(), output


def test_a_workload_says_what_runs():
    workload = Workload("f32 b1 h2 q64 kv64 d16", threads=1)
    assert workload.line == "f32 b1 h2 q64 kv64 d16" and workload.threads == 1
    assert workload.flops == 2 * 32 * 2 * 64 * 64 and workload.bytes == 4 * 4 * 2 * 64 * 16
    seconds = workload.measure(0.01, 5)
    assert 1 <= len(seconds) <= 5 and (seconds > 0).all()
    phases = workload.phases()
    assert list(phases["phases"]) == PHASES and phases["threads"] == 1
    same = Workload("f32 b1 h2 q64 kv64 d16", threads=1)
    np.testing.assert_array_equal(workload.arrays["q"], same.arrays["q"])
    with pytest.raises(ValueError, match="threads is -1"):
        Workload("f32 b1 h2 q64 kv64 d16", threads=-1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: _measure.arithmetic_rate("avx3", "f32", 1, 0.01), "avx3"),
        (lambda: _measure.arithmetic_rate(manyhead.isa(), "f8", 1, 0.01), "dtype is 'f8', must be one of 'f32'"),
        (lambda: _measure.arithmetic_rate(manyhead.isa(), "f32", 0, 0.01), "threads"),
        (lambda: _measure.read_rate(0, 1, 0.01), "bytes"),
        (lambda: _measure.read_rate(1 << 20, 1, 0.0), "seconds"),
        (lambda: _measure.clock_rate(float("nan")), "seconds"),
    ],
)
def test_wrong_arguments_of_probes(call, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()


def test_probes_measure_something():
    assert _measure.arithmetic_rate(manyhead.isa(), "f32", 1, 1e-3) > 1e8
    assert _measure.read_rate(1 << 16, 2, 1e-3) > 1e7
    assert _measure.clock_rate(1e-3) > 1e7


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not say")
def test_threads_that_share_a_cpu_wait_for_it():
    cpus, before, begin = os.sched_getaffinity(0), _measure.waited(), time.monotonic()
    os.sched_setaffinity(0, {min(cpus)})
    try:
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            while _measure.waited() - before < 0.05 and time.monotonic() - begin < 30:
                pass
        finally:
            child.kill()
            child.wait()
    finally:
        os.sched_setaffinity(0, cpus)
    assert _measure.waited() - before >= 0.05
