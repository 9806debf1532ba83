"""`manyhead replay`: logs made up, on a machine that does what it is told, and one that a program really wrote."""

from __future__ import annotations

import io
import json
import re
import sys
from types import SimpleNamespace

import manyhead
import pytest
from fake_measure import MACHINE, FakeMeasure, is_plain, runner
from interpreter import run_python
from manyhead import _measure
from manyhead._user import UserError
from manyhead.profiling import replay, sweep

pytest.importorskip("rich")

command = runner("replay")

A, B, C = "f32 b1 h8 q128 kv128 d64", "bf16 b1 h8 q1 kv512 d64", "f32 b1 h2 q32 kv32 d16 causal"
LOG = f"""\
Loading model...
manyhead: {A}  # 100.00 us, 2 threads, tile@avx512
50% |#####     | manyhead: {B}  # 10.00 us, 1 thread, decode@avx512
manyhead: {A}  # 300.00 us, 2 threads, tile@avx512
manyhead: # layer f32 b1 q128 kv128 embed_dim 512 heads 8: 1234.00 us, at most 2 threads
manyhead: {A}  # 200.00 us, 2 threads, tile@avx512
manyhead: # merge f32 states 2 b1 h8 q1 v64: 3.00 us, at most 2 threads
manyhead: {A}  # 90.00 us, 1 thread, tile@avx512
manyhead: MH_PROFILE: the profile could not be written in full
this program uses manyhead: it is fast
done
"""


class Tools(FakeMeasure):
    def Planned(self, line, *, isa=None, threads=0):
        return SimpleNamespace(line=" ".join(line.split()))


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("manyhead.commands.replay.machine", lambda: MACHINE | {"isa": "avx2"})
    monkeypatch.setattr(replay, "EFFORT", sweep.Effort(seconds=0.01, passes=2, least=1, longest=10.0, looks=1))
    tools = Tools()
    for name in (
        "parse_problem",
        "check_problem",
        "Planned",
        "Workload",
        "arithmetic_rate",
        "read_rate",
        "clock_rate",
        "waited",
    ):
        monkeypatch.setattr(_measure, name, getattr(tools, name))
    return tools


# --- logs -------------------------------------------------------------------------------------------------------------


def read(text: str) -> replay.Log:
    return replay.read_log([("log.txt", text)], Tools())


def test_lines_of_the_library_among_others():
    log = read(LOG)
    assert [(calls.problem, calls.threads, calls.count) for calls in log.calls] == [(A, 2, 3), (A, 1, 1), (B, 1, 1)]
    assert log.calls[0].seconds == pytest.approx([100e-6, 300e-6, 200e-6])
    assert log.calls[0].isas == {"avx512"}
    assert log.others == {"layer": 1, "merge": 1}


def test_without_such_lines_every_line_is_a_problem():
    log = read(f"# what we run\n\n{A}\n  {B} # 1.5e3 ns once, on three threads\n{A}   # 2 ms\n{C}#\n")
    assert {calls.problem: calls.count for calls in log.calls} == {A: 2, B: 1, C: 1}
    found = {calls.problem: calls for calls in log.calls}
    assert found[A].seconds == [2e-3] and found[B].seconds == [1.5e-6] and found[C].seconds == []
    assert found[B].threads is None
    assert [calls.problem for calls in log.calls] == [A, B, C], "most logged time first"


def test_a_problem_is_the_same_however_it_is_written():
    log = replay.read_log(
        [("a", "f32 b1 h8 q16 kv16 d8 causal\n"), ("b", "f32 causal d8  h8/8 b1 kv16 q16 v8\n")], _measure
    )
    assert [(calls.problem, calls.count) for calls in log.calls] == [("f32 b1 h8 q16 kv16 d8 causal", 2)]
    assert log.files == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "log.txt: there is no problem line in it: make one with MH_VERBOSE=1"),
        ("# nothing\n\n", "there is no problem line in it"),
        ("manyhead: # layer f32 b1: 3 us\nmanyhead: # layer f32 b1: 3 us\n", "only 2 lines of layers and merges"),
        (f"{A}\nf32 b1 h8 q1 kv1 d64 casual", 'log.txt:2: "casual" is not a word'),
        (f"x\nmanyhead: {A}\nmanyhead: f32 b1 bah", 'log.txt:3: "bah" is not a word of a problem (column 8)\nf32 b1 b'),
        ("hello world", 'log.txt:1: "hello" is not a dtype'),
        ("f32 b1 h3/2 q1 kv1 d8", "log.txt:1: kv_heads is 2, must divide heads = 3\nf32 b1 h3/2 q1 kv1 d8"),
    ],
)  # fmt: skip
def test_what_is_no_log(text, said):
    with pytest.raises(UserError) as error:
        read(text)
    assert said in str(error.value)


# --- the replay -------------------------------------------------------------------------------------------------------


def run(tools: FakeMeasure, text: str = LOG, **options) -> dict:
    log = replay.read_log([("log.txt", text)], tools)
    given = {"isa": "avx2", "threads": None, "effort": sweep.Effort(0.01, 2, 1, 10.0, 1), "available": 1 << 30}
    again = replay.Replay(log, tools, MACHINE, **given | options)
    again.run(sweep.Watch())
    return again.document()


def test_each_problem_is_measured_once_and_as_logged():
    tools = Tools()
    document = run(tools)
    assert sorted(set(tools.order)) == sorted({A, B})
    assert len(tools.order) == 3 * 2, "once for each number of threads and pass"
    first, second, third = document["rows"]
    assert (first["problem"], first["calls"], first["threads"], first["isa"]) == (A, 3, 2, "avx2")
    assert first["logged"] == pytest.approx({"best": 100e-6, "median": 200e-6, "total": 600e-6, "times": 3})
    assert first["ratio"] == pytest.approx(200e-6 / first["now"]["median"])
    assert second["threads"] == third["threads"] == 1
    assert [row["share"] for row in document["rows"]] == pytest.approx([600 / 700, 90 / 700, 10 / 700])
    assert document["logged"] == document["compared"] == pytest.approx(700e-6)
    replayed = sum(row["calls"] * row["now"]["median"] for row in document["rows"])
    assert document["replayed"] == pytest.approx(replayed)
    assert document["others"] == {"layer": 1, "merge": 1}


def test_threads_can_be_forced_and_are_never_more_than_there_are():
    assert {row["threads"] for row in run(Tools(), threads=3)["rows"]} == {3}
    row = run(Tools(), f"{A} # 3 us, 64 threads, tile@avx2")["rows"][0]
    assert row["threads"] == MACHINE["cpus"] and "logged with 64 threads" in row["notes"]
    assert run(Tools(), A)["rows"][0]["threads"] == MACHINE["threads"], "where the log does not say"


def test_a_log_without_times_is_sorted_by_what_is_measured():
    document = run(Tools(), f"{C}\n{C}\n{A}")
    assert [row["problem"] for row in document["rows"]] == [A, C]
    assert document["logged"] is document["replayed"] is None
    assert document["rows"][0]["share"] is document["rows"][0]["ratio"] is None


def test_what_cannot_be_run_is_left_out():
    document = run(Tools(), f"{A} # 1 us\nf32 b1 h32 q1 kv1000000 d128 # 1 s", available=64 << 20)
    large, small = document["rows"]
    assert large["now"] is None and "more than half of the memory that is free" in large["notes"][-1]
    assert (
        small["now"] and document["compared"] == pytest.approx(1e-6) and document["logged"] == pytest.approx(1.000001)
    )


def test_what_a_line_does_not_say_is_told():
    text = "\n".join(
        f"f32 b1 h2 q8 kv8 d8 {words}" for words in ("strided", "mask", "bias=f64", "lens", "extra=1", "causal")
    )
    log = replay.read_log([("log.txt", text)], _measure)
    effort = sweep.Effort(0.001, 1, 1, 10.0, 1)
    again = replay.Replay(log, _measure, MACHINE, isa=manyhead.isa(), threads=1, effort=effort, available=1 << 30)
    again.run(sweep.Watch())
    notes = {row["problem"]: " ".join(row["notes"]) for row in again.document()["rows"]}
    assert "without gaps" in notes["f32 b1 h2 q8 kv8 d8 strided"]
    assert "full size" in notes["f32 b1 h2 q8 kv8 d8 mask"] and "full size" in notes["f32 b1 h2 q8 kv8 d8 bias=f64"]
    assert "all keys" in notes["f32 b1 h2 q8 kv8 d8 lens"]
    assert notes["f32 b1 h2 q8 kv8 d8 causal"] == ""


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(fake, tmp_path):
    (tmp_path / "log.txt").write_text(LOG)
    return "log.txt"


def test_a_replay(fake, log, capsys):
    status, out, err = command(capsys, log)
    assert (status, err) == (0, "") and is_plain(out)
    assert "Replay of log.txt\n" in out
    assert re.search(rf"^ +86% +3 +200 us +[\d.]+ us +[\d.]+ +2 +{A}$", out, re.M)
    assert re.search(r"^5 calls in the log: 700 us as logged, [\d.]+ \w+ now: ratio [\d.]+\.$", out, re.M)
    assert "Logged on avx512, replayed on avx2: --isa takes another one." in out
    assert "1 line of layer not replayed: the attention inside has lines of its own." in out
    assert "1 line of merge not replayed." in out


def test_only_the_top(fake, log, capsys):
    _, out, _ = command(capsys, log, "--top", "1")
    assert set(fake.order) == {A} and B not in out
    assert "5 calls in the log, 3 of them replayed: 700 us as logged, 600 us without" in out


def test_standard_input_and_several_files(fake, log, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(f"{C}\n".encode())))
    monkeypatch.setitem(sys.modules, "rich", None)  # which JSON needs not
    status, out, _ = command(capsys, "-", log, "--json")
    found = json.loads(out)
    assert status == 0 and found["files"] == ["standard input", "log.txt"]
    assert {row["problem"] for row in found["rows"]} == {A, B, C}


def test_an_interrupt_is_told(fake, log, capsys):
    fake.interrupt = 2
    status, out, err = command(capsys, log)
    assert (status, err) == (130, "Interrupted: 1 of 3 problems were done.\n")
    assert re.search(r"200 us +[\d.]+ us", out) and re.search(r"10\.0 us +- +-", out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.txt"], "cannot read none.txt: No such file or directory"),
        (["."], "cannot read .: Is a directory"),
        (["binary"], "cannot read binary: it is not a text file"),
        (["empty"], "empty: there is no problem line in it"),
        (["typo"], 'typo:1: "casual" is not a word of a problem (column 8)\nf32 b1 casual\n       ^'),
        (["log.txt", "--top", "0"], "--top 0: expected a number of problems, at least 1"),
        (["log.txt", "--threads", "99"], "--threads 99: '99' is not a number from 1 to 4"),
        (["log.txt", "--isa", "avx3"], "there is no instruction set 'avx3'"),
        (["log.txt", "--seconds", "-1"], "--seconds -1: expected a number of seconds above 0"),
    ],
)
def test_bad_input_is_a_sentence(fake, log, tmp_path, capsys, arguments, said):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "typo").write_text("f32 b1 casual\n")
    status, out, err = command(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("manyhead replay: ") and said in err
    assert fake.order == []


def test_standard_input_that_is_not_text(fake, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff\xfe")))
    assert command(capsys, "-") == (2, "", "manyhead replay: standard input is not text\n")


def test_nothing_that_can_be_run(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("manyhead.commands.replay.available_memory", lambda: 0)
    (tmp_path / "log.txt").write_text(f"{A}  # 3 us, 1 thread, tile@avx2\n")
    status, out, _ = command(capsys, "log.txt")
    assert (
        status == 1
        and "1 call in the log, 0 of them replayed: 3.00 us as logged." in out
        and "not replayed: its tensors take" in " ".join(out.split())
    )


# --- a real log -------------------------------------------------------------------------------------------------------

PROGRAM = """
import threading
import numpy as np
import manyhead

rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
q, k = draw(1, 4, 16, 8), draw(1, 2, 24, 8)

def work():
    for _ in range(50):
        manyhead.attention(q, k, k, causal=True, align="bottom_right")

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
plan = manyhead.plan(q, k, k, attn_mask=np.ones((16, 24), bool))
for _ in range(3):
    plan.run(q, k, k, attn_mask=np.ones((16, 24), bool))
out, lse = manyhead.attention(q, k, k, return_lse=True)
manyhead.merge_state(out, lse, out, lse)
manyhead.attention(q.swapaxes(2, 3).copy().swapaxes(2, 3), k, k, threads=1)
layer = manyhead.MultiHeadAttention(num_heads=2, w_q=draw(8, 8), w_k=draw(8, 8), w_v=draw(8, 8))
layer(draw(2, 5, 8))
"""


def test_a_real_log(tmp_path, capsys):
    done = run_python(PROGRAM, MH_VERBOSE="1")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    pattern = r"manyhead: (#|f32 .*  #) .*\d us, (at most )?\d+ threads?(, \w+@\w+)?"
    assert all(re.fullmatch(pattern, line) for line in lines), "no two lines mixed"
    (tmp_path / "log.txt").write_text(done.stderr)
    status, out, err = command(capsys, str(tmp_path / "log.txt"), "--json", "--seconds", "0.01")
    assert (status, err) == (0, "")
    found = json.loads(out)
    calls = {row["problem"]: row["calls"] for row in found["rows"]}
    assert calls["f32 b1 h4/2 q16 kv24 d8 causal align=br"] == 200
    assert calls["f32 b1 h4/2 q16 kv24 d8 mask"] == 3
    assert calls["f32 b1 h4/2 q16 kv24 d8 lse"] == calls["f32 b1 h4/2 q16 kv24 d8 strided"] == 1
    assert found["others"] == {"layer": 1, "merge": 1}
    assert found["calls"] == sum(calls.values()) == len(lines) - 2
    assert all(row["now"] and row["ratio"] > 0 for row in found["rows"])
