"""`manyhead explain`: the prediction against times that were measured once, and the command as a user runs it."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import manyhead
import pytest
from fake_measure import ARITHMETIC, CLOCK, MACHINE, READ, FakeMeasure, is_plain, runner
from manyhead import _measure
from manyhead.commands import errors, main, options
from manyhead.profiling import cases, document, explain, limits, predict

pytest.importorskip("rich")

command = runner("explain")


def _recorded(line: str) -> dict[str, Any]:
    name, isa, threads, route, tasks, chunks, block_kv, copies, balance, *rates, seconds, problem = line.split(
        maxsplit=15
    )
    return {
        "name": name,
        "isa": isa,
        "threads": int(threads),
        "route": route,
        "problem": problem,
        "plan": {
            "tasks": int(tasks),
            "chunks": int(chunks),
            "block_kv": int(block_kv),
            "copies_kv": copies == "1",
            "last_rows": 0,  # recorded before plans had any
            "balance": float(balance),
            "second_pass": False,
            "flops": _measure.Planned(problem).flops,
        },
        "rates": predict.Rates(*map(float, rates[:-1]), rates[-1]),
        "seconds": float(seconds),
    }


def _recorded_in(name: str) -> list[dict[str, Any]]:
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return [_recorded(line) for line in lines if not line.startswith("#")]


MEASURED = _recorded_in("measured.txt")


def as_planned(row: dict[str, Any]) -> Any:
    """What manyhead._measure.Planned gave there, on whatever CPU this runs."""
    fields = {key: row[key] for key in ("plan", "isa", "route", "threads")}
    return SimpleNamespace(problem=_measure.parse_problem(row["problem"]), dtype=row["problem"].split()[0], **fields)


def holds(row: dict[str, Any]) -> bool:
    found = predict.predict(as_planned(row), row["rates"])
    return 1 / (1 + explain.HOLDS) <= found.seconds / row["seconds"] <= 1 + explain.HOLDS


def dtype_of(row: dict[str, Any]) -> str:
    return row["problem"].split()[0]


@pytest.mark.parametrize(
    "row", MEASURED, ids=lambda row: f"{row['name']} {dtype_of(row)} {row['isa']} {row['threads']}"
)
def test_predictions_are_within_a_quarter_of_what_was_measured(row):
    assert holds(row)


def test_so_are_most_of_other_kinds():
    rows = _recorded_in("measured_various.txt")
    assert len(rows) == 7 * len(cases.preset_cases(["various"]))
    assert sum(map(holds, rows)) >= 0.95 * len(rows)


def test_what_was_measured_is_the_whole_table():
    table = {case.problem for case in cases.preset_cases(["table"])}
    ways = {(row["isa"], dtype_of(row), row["threads"]) for row in MEASURED}
    every = {("avx512", "f32"), ("avx2", "f32")}
    every |= {(isa, dtype) for isa in ("avx512", "avx2") for dtype in ("bf16", "f16")}
    every |= {(isa, dtype) for isa in ("amx_fp16", "amx") for dtype in ("f32", "f16")}
    assert {way[:2] for way in ways} == every
    assert len(MEASURED) == len(table) * len(ways)


# --- what the model does where something changes ----------------------------------------------------------------------


def predicted(line: str, threads: int = 1, **rates: float) -> predict.Prediction:
    planned = _measure.Planned(line, threads=threads)
    planned.plan["asks_in_order"] = False  # whatever CPU this is
    moved = predict.traffic(planned, 1 << 20)
    known = {"arithmetic": ARITHMETIC, "clock": CLOCK, "read": 1e12, "moved": moved, "level": "L2"} | rates
    return predict.predict(planned, predict.Rates(**known))


# Heads of 40 never run on a matrix unit in f32.
PREFILL, DECODE = "f32 b1 h8 q512 kv512 d40", "f32 b1 h8 q1 kv4096 d64"


def test_last_rows_cost_what_a_step_of_them_does():
    row = next(row for row in MEASURED if row["route"] == "tile" and row["isa"] == "avx512" and dtype_of(row) == "f32")
    row = row | {"problem": "f32 b1 h8 q49 kv300 d64", "plan": row["plan"] | {"tasks": 8, "chunks": 1, "balance": 1}}
    step = row | {"problem": "f32 b1 h8 q1 kv300 d64", "route": "decode"}
    whole = row | {"problem": "f32 b1 h8 q48 kv300 d64"}
    parts = row | {"plan": row["plan"] | {"last_rows": 1}}
    in_whole, in_step, in_parts, in_vectors = (
        predict.predict(as_planned(x), x["rates"]).terms for x in (whole, step, parts, row)
    )
    for phase in ("scores", "values", "softmax", "pack"):
        assert in_parts[phase] == pytest.approx(in_whole[phase] + in_step[phase])
    assert in_parts["scores"] < 0.9 * in_vectors["scores"]  # where one row takes a fourth vector


def test_steps_on_the_unit_take_its_time_whatever_the_rows():
    row = next(
        row for row in MEASURED if row["route"] == "decode" and row["isa"] == "avx512" and dtype_of(row) == "bf16"
    )

    def work(queries: int, **plan: bool) -> dict[str, float]:
        line, flops = f"bf16 b1 h8 q{queries} kv256 d64", 2.0 * 8 * queries * 256 * 128
        planned = as_planned(
            row | {"problem": line, "plan": row["plan"] | {"tasks": 8, "chunks": 1, "flops": flops} | plan}
        )
        return predict.predict(planned, row["rates"]).terms

    few, many = work(4, unit_steps=True), work(16, unit_steps=True)
    assert few["scores"] == many["scores"] and few["values"] == many["values"]
    assert few["softmax"] < many["softmax"] < 4 * few["softmax"]
    assert few["scores"] < work(4)["scores"] and many["scores"] < 0.5 * work(16)["scores"]
    assert work(17, unit_steps=True)["scores"] > many["scores"]


def test_steps_by_pairs_are_multiplied_at_the_rate_of_the_unit():
    line = "bf16 b1 h8 q4 kv256 d64"
    row = next(row for row in MEASURED if row["route"] == "decode" and dtype_of(row) == "bf16")
    plan = row["plan"] | {"tasks": 8, "chunks": 1, "flops": 2.0 * 8 * 4 * 256 * 128}

    def planned(isa: str, **more: bool) -> predict.Planned:
        return as_planned(row | {"problem": line, "isa": isa, "plan": plan | more})

    pairs, fmas = planned("avx512_bf16", unit_steps=True), planned("avx512")
    assert (predict.unit_of(pairs), predict.unit_of(fmas)) == ("bf16", "f32")
    assert predict.unit_of(planned("amx", unit_steps=True)) == "f32"  # of tiles the model has cycles
    twice = replace(row["rates"], arithmetic=2 * row["rates"].arithmetic)
    fast, slow = predict.predict(pairs, twice).terms, predict.predict(fmas, row["rates"]).terms
    assert fast["scores"] < 0.6 * slow["scores"] and fast["values"] < 0.8 * slow["values"]


def test_lines_asked_for_in_the_order_of_memory_come_in_time():
    row = next(row for row in MEASURED if row["route"] == "decode" and row["isa"] == "avx512")

    def seconds(line: str, **plan: bool) -> float:
        planned = as_planned(row | {"problem": line, "plan": row["plan"] | plan})
        return predict.predict(planned, replace(row["rates"], moved=2 * predict.FAR)).seconds

    one_by_one, side_by_side = "bf16 b1 h8/2 q1 kv4096 d64", "bf16 b1 h8/2 q1 kv4096 d64 bshd"
    for line in (one_by_one, side_by_side):
        assert seconds(line, asks_in_order=True) < seconds(line)
    assert seconds(one_by_one, asks_in_order=True) < seconds(side_by_side, asks_in_order=True)


def test_twice_the_heads_take_twice_as_long():
    once, twice = predicted("f64 b1 h8 q96 kv192 d64"), predicted("f64 b1 h16 q96 kv192 d64")
    assert twice.terms["scores"] == pytest.approx(2 * once.terms["scores"])
    assert twice.terms["softmax"] == pytest.approx(2 * once.terms["softmax"])
    assert twice.terms["call"] == once.terms["call"]
    assert twice.seconds == pytest.approx(2 * once.seconds, rel=0.01)


def test_products_follow_the_rate_of_multiply_adds_and_softmax_the_clock():
    slow, fast = predicted(PREFILL), predicted(PREFILL, arithmetic=2 * ARITHMETIC)
    assert slow.terms["values"] > 1.8 * fast.terms["values"]
    assert slow.terms["softmax"] == fast.terms["softmax"]
    assert predicted(PREFILL, clock=2 * CLOCK).terms["softmax"] == pytest.approx(slow.terms["softmax"] / 2)


def test_the_limit_is_the_largest_term():
    assert predicted(PREFILL).limit == "arithmetic"
    assert predicted(DECODE, read=1e9, level="memory").limit == "read memory"
    assert predicted(PREFILL, arithmetic=1e14).limit in ("softmax", "overhead")
    assert predicted("f32 b1 h1 q1 kv1 d64").limit == "overhead"
    assert predicted("f32 b1 h8 q512 kv512 d16 softcap=9", arithmetic=1e14).limit == "masks"


def test_reading_hides_behind_the_rest_in_part():
    free, slow = predicted(DECODE, read=1e15), predicted(DECODE, read=1e9)
    assert free.seconds < slow.seconds < free.seconds + slow.terms["read"]
    assert slow.terms["read"] == pytest.approx(2 * 4 * 8 * 4096 * 64 / 1e9, rel=0.01)


def test_what_is_not_attended_takes_no_time():
    full, causal = predicted("f32 b1 h8 q2048 kv2048 d40"), predicted("f32 b1 h8 q2048 kv2048 d40 causal")
    window = predicted("f32 b1 h8 q2048 kv2048 d40 causal window=127,0")
    assert 0.5 < causal.terms["scores"] / full.terms["scores"] < 0.55
    assert 0.06 < window.terms["scores"] / full.terms["scores"] < 0.1
    assert "mask" not in full.terms and causal.terms["mask"] < window.terms["mask"]


@pytest.mark.parametrize("word", ["mask", "bias", "keymask", "alibi", "softcap=3", "causal"])
def test_what_is_done_to_scores_takes_time(word):
    assert predicted(f"{PREFILL} {word}").terms["mask"] > 0


@pytest.mark.parametrize("word", ["weights", "meanw", "colsums", "scores=raw"])
def test_other_outputs_take_a_second_pass(word):
    least = predicted(PREFILL).terms["scores" if word == "scores=raw" else "softmax"]
    assert predicted(f"{PREFILL} {word}").terms["weights"] > least and "weights" not in predicted(PREFILL).terms


@pytest.mark.parametrize("l2_bytes", [1 << 20, 1 << 30])
def test_a_step_reads_the_keys_that_it_sees(l2_bytes):
    full, window = (_measure.Planned(f"f32 b1 h8 q1 kv8192 d64{words}") for words in ("", " window=1023,0 align=br"))
    assert predict.traffic(window, l2_bytes) < 0.2 * predict.traffic(full, l2_bytes)


def test_rows_that_lie_apart_are_read_more_slowly():
    near, apart = (predicted(f"{DECODE}{words}", read=1e9) for words in ("", " bshd"))
    assert apart.terms["read"] == pytest.approx(predict.APART * near.terms["read"])


def test_less_hides_where_what_is_read_lies_far_away():
    near, much, slow = (predicted(DECODE, read=1e3 * moved, moved=moved) for moved in (9e7, 2e8, 9e6))
    assert near.terms == much.terms == slow.terms
    assert near.seconds < much.seconds == slow.seconds


def test_chunks_are_packed_and_stored_each():
    whole, chunks = predicted("f32 b1 h8 q256 kv2048 d40"), predicted("f32 b1 h8 q128 kv2048 d40")
    assert chunks.terms["pack"] > 1.5 * whole.terms["pack"] and chunks.terms["store"] > 1.5 * whole.terms["store"]


def test_threads_share_the_work():
    one, two = predicted(PREFILL), predicted(PREFILL, threads=2, arithmetic=2 * ARITHMETIC)
    assert two.terms["scores"] == pytest.approx(one.terms["scores"] / 2, rel=0.02)
    assert two.terms["call"] > one.terms["call"]


def test_the_matrix_unit_takes_more_products_for_f16():
    row = next(row for row in MEASURED if (row["isa"], row["name"], dtype_of(row)) == ("amx", "bert_large", "f16"))
    bf16, f16 = (
        predict.predict(as_planned(row | {"problem": row["problem"].replace("f16", dtype)}), row["rates"])
        for dtype in ("bf16", "f16")
    )
    assert bf16.terms["scores"] < f16.terms["scores"] < 4 * bf16.terms["scores"]
    assert f16.terms["softmax"] == bf16.terms["softmax"]


def test_a_fast_exp_takes_fewer_products_and_shorter_exponentials():
    row = next(row for row in MEASURED if (row["isa"], row["name"], dtype_of(row)) == ("amx", "bert_large", "f16"))
    exact, fast = (
        predict.predict(as_planned(row | {"problem": row["problem"] + words}), row["rates"]).terms
        for words in ("", " fastexp")
    )
    for phase in ("scores", "values", "softmax"):
        assert fast[phase] < exact[phase]
    exact, fast = (predicted(f"f32 b1 h8 q512 kv512 d64 weights{words}") for words in ("", " fastexp"))
    assert fast.terms == exact.terms  # calls with weights stay exact


@pytest.mark.parametrize("isa", predict.UNITS)
def test_f32_bound_by_arithmetic_is_told_of_the_matrix_unit(isa):
    row = next(row for row in MEASURED if row["isa"] == "avx512" and row["name"] == "bert_large")
    terms = predict.predict(as_planned(row), row["rates"]).terms
    for runs in (True, False):
        advice = explain._advice_of_time(terms, "arithmetic", as_planned(row), {"isas": {isa: runs}})
        assert any(f"on {predict.UNITS[isa].name}, with isa {isa}" in said for said in advice) == runs


def test_an_instruction_is_not_called_a_unit():
    row = next(row for row in MEASURED if row["isa"] == "avx512" and row["name"] == "bert_large")
    advice = explain._advice_of_time(
        {"softmax": 0, "read": 0}, "arithmetic", as_planned(row), {"isas": {"avx512_bf16": True}}
    )
    assert advice == ["bf16 would run on VDPBF16PS, with isa avx512_bf16."]


@pytest.mark.parametrize("sizes", ["b0 h8 q1 kv10 d64", "b1 h8 q0 kv10 d64", "b1 h8 q3 kv0 d64", "b1 h1 q1 kv1 d1"])
@pytest.mark.parametrize("dtype", cases.ITEM_SIZE)
@pytest.mark.parametrize("isa", [name for name, runs in manyhead.isas().items() if runs])
def test_nothing_to_do_takes_next_to_no_time(sizes, dtype, isa):
    planned = _measure.Planned(f"{dtype} {sizes}", isa=isa)
    rates = predict.Rates(1e11, 3e9, predict.traffic(planned, 1 << 20), 1e10, "L1")
    assert 0 < predict.predict(planned, rates).seconds < 1e-5


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_for_another_isa_and_number_of_threads_changes_no_setting():
    before = manyhead.isa(), manyhead.threads()
    other = [name for name, runs in manyhead.isas().items() if runs][-1]
    planned = _measure.Planned("f32 b1 h32 q512 kv512 d64", isa=other, threads=3)
    assert (planned.isa, planned.threads) == (other, 3)
    assert (manyhead.isa(), manyhead.threads()) == before
    with pytest.raises(ValueError, match="kv_heads is 2"):
        _measure.Planned("f32 b1 h5/2 q1 kv1 d8", isa=other, threads=3)
    assert (manyhead.isa(), manyhead.threads()) == before


def words_of(line: str, threads: int = 1) -> dict[str, str]:
    tools = _measure
    rows = cases.make_rows(cases.shape_cases([line]), ["f32"], [manyhead.isa()], [threads], tools)
    return dict(explain.explain(rows[0], tools, manyhead.machine(), None)["words"])


def test_plans_in_words():
    said = words_of("f32 b1 h8 q512 kv512 d40 causal")
    assert said["kernel"].startswith(f"the tile route on {manyhead.isa()}: panels of up to ")
    assert said["K and V"] == "read where they lie, without a copy"
    assert "which nobody attends to" in said["left out"]
    assert said["work"] == "168 MFLOP: 1,050,624 pairs of query and key x 2 x (40 + 40)"
    assert said["bytes"] == "2.5 MiB of Q, K, V and the result, each once"
    assert "keys" not in said and "weights" not in said and "scores" not in said
    assert said["tasks"].endswith("on one thread")


def test_plans_in_words_say_what_is_special():
    assert "64 chunks of 512" in words_of("f32 b1 h32/8 q1 kv32768 d128")["keys"]
    assert "for all together" in words_of("f32 b1 h32/8 q1 kv32768 d128")["workspace"]
    said = words_of("f32 b1 h8 q64 kv64 d64 weights scores=raw")
    assert "that are kept" in said["weights"] and "once more" in said["scores"]
    assert "multiple of 1 KiB" in words_of("f32 b1 h16 q384 kv384 d16 bshd")["K and V"]
    assert "are not whole vectors" in words_of("f32 b1 h8 q1 kv64 d3")["K and V"]
    assert words_of("f32 b1 h64 q512 kv512 d40", threads=2)["tasks"].endswith("times the mean")


# --- rates ------------------------------------------------------------------------------------------------------------


class Tools(FakeMeasure):
    """Plans are real, times and rates are those of the fake machine."""

    def parse_problem(self, line):
        return _measure.parse_problem(line)

    def check_problem(self, problem):
        _measure.check_problem(problem)

    def Planned(self, line, *, isa=None, threads=0):
        return _measure.Planned(line, threads=threads)

    def Workload(self, line, *, isa=None, threads=0, seed=0):
        planned = _measure.Planned(line, threads=threads)
        planned.seconds = 2 * planned.flops / ARITHMETIC / planned.threads + 1e-6
        planned.run = lambda: None
        planned.measure = lambda seconds, most: self.times(planned, seconds)
        planned.phases = lambda: {
            "seconds": 2 * planned.seconds,
            "threads": planned.threads,
            "phases": {"scores": planned.seconds * planned.threads, "idle": planned.seconds * planned.threads},
        }
        return planned

    def times(self, planned, seconds):
        self.order.append(planned.line)
        if len(self.order) == self.interrupt:
            raise KeyboardInterrupt
        return planned.seconds * (1 + self.random.random(7))


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    tools = Tools()
    for name in ("Workload", "arithmetic_rate", "read_rate", "clock_rate"):
        monkeypatch.setattr(_measure, name, getattr(tools, name))
    return tools


def test_the_highest_rate_counts_and_reads_are_as_large_as_the_call(monkeypatch):
    tools, sizes = Tools(), []
    rates = iter([READ / 2, READ, READ / 4] * 1000)
    tools.read_rate = lambda size, threads, seconds: sizes.append(size) or next(rates)
    source = explain.MeasuredRates(tools, MACHINE, 1 << 30)
    planned = _measure.Planned("f32 b1 h8 q1 kv1024 d64", threads=1)
    found = source.rates(planned)
    assert (found.arithmetic, found.clock, found.read) == (ARITHMETIC, CLOCK, READ)
    assert found.level == "L3" and set(sizes) == {int(found.moved)}
    assert found.moved == pytest.approx(4 * 8 * 1024 * 128, rel=0.01)


def test_a_problem_of_any_size_is_read_in_the_memory_there_is():
    tools, sizes = Tools(), []
    tools.read_rate = lambda size, threads, seconds: sizes.append(size) or READ
    source = explain.MeasuredRates(tools, MACHINE, 1 << 30)
    assert source.rates(_measure.Planned("f32 b64 h64 q1 kv100000 d128")).level == "memory"
    assert max(sizes) <= 256 << 20 and len(sizes) < 10


def test_large_buffers_are_read_until_caches_hold_what_they_are_going_to():
    seconds = []
    tools = Tools()
    tools.read_rate = lambda size, threads, time: seconds.append(time) or READ
    for size in (1 << 14, 64 << 20):
        limits.reading_rate(tools, size, 1)
    assert seconds == [limits.LOOK, pytest.approx(limits.PASSES * (64 << 20) / limits.PASSING)]


def one_measured(tools, capsys):
    status, out, _ = command(capsys, PREFILL, "--threads", "1", "--run", "--json")
    assert status == 0
    return json.loads(out)


def test_a_machine_that_is_not_quiet_gets_more_chances(fake, monkeypatch, capsys):
    slow = (explain.ROUNDS // 2 + 1) * explain.GLANCES  # most of the first attempt
    rates = iter([READ / 4] * slow + [READ] * 1000)
    monkeypatch.setattr(_measure, "read_rate", lambda *_: next(rates))
    found = one_measured(fake, capsys)
    assert found["measured"]["quiet"] and found["rates"]["read"] == READ
    assert len(fake.order) == 2 * explain.ROUNDS


def test_a_machine_that_is_never_quiet_is_told(fake, monkeypatch, capsys):
    speeds = itertools.cycle([1, 0.7, 0.7, 0.7, 0.7])
    monkeypatch.setattr(_measure, "arithmetic_rate", lambda *_: ARITHMETIC * next(speeds))
    monkeypatch.setattr(explain, "GLANCES", 1)
    found = one_measured(fake, capsys)
    assert not found["measured"]["quiet"] and len(fake.order) == explain.ATTEMPTS * explain.ROUNDS
    assert found["rates"]["arithmetic"] == ARITHMETIC, "the best of the attempt's looks"
    _, out, _ = command(capsys, "--table", "gpt2", "--threads", "1")
    assert out.count("?") == 1 + len(cases.preset_cases(["gpt2"]))
    assert "0 of 0 rows within 25%" in out and "5 rows more, during which the machine was not quiet" in out
    _, out, _ = command(capsys, PREFILL, "--threads", "1", "--run")
    assert "; the machine was not quiet" in " ".join(out.split())


def test_rates_of_a_saved_profile():
    read = [
        {"level": "L2", "bytes": 1 << 20, "threads": 1, "rate": 1e11},
        {"level": "memory", "bytes": 1 << 30, "threads": 1, "rate": 1e10},
    ]
    arithmetic = [
        {"isa": manyhead.isa(), "dtype": dtype, "threads": 1, "rate": rate}
        for dtype, rate in (("f32", 1e11), ("f64", 5e10))
    ]
    known = {"arithmetic": arithmetic, "read": read, "clock": {"most": 3e9}}
    source = explain.SavedRates({"machine": MACHINE, "limits": known}, "a.json")
    small, large = (source.rates(_measure.Planned(f"f32 b1 h8 q1 kv{kv} d64", threads=1)) for kv in (16, 8192))
    assert (small.arithmetic, small.clock, small.read, small.level) == (1e11, 3e9, 1e11, "L2")
    assert large.level == "memory" and large.read == pytest.approx(1e11 / 10**0.5, rel=0.01), (
        "half way, in factors of 2"
    )
    assert source.rates(_measure.Planned("f64 b1 h8 q1 kv16 d64", threads=1)).arithmetic == 5e10
    many = source.rates(_measure.Planned("f32 b8 h64 q512 kv512 d40", threads=4))
    assert many.arithmetic == 4e11, "scaled from what there is"


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_plan_alone_measures_nothing(monkeypatch, capsys):
    for name in ("arithmetic_rate", "read_rate", "clock_rate", "Workload"):
        monkeypatch.setattr(_measure, name, lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = command(capsys, PREFILL, "--plan-only", "--threads", "1")
    assert (status, err) == (0, "") and is_plain(out)
    assert out.startswith(f"{PREFILL}\nkernel     the tile route on ")
    assert "predicted" not in out


def test_a_prediction(fake, capsys):
    status, out, err = command(capsys, PREFILL, "--threads", "1")
    assert (status, err, fake.order) == (0, "", []) and is_plain(out)
    assert re.search(r"^scores: Q x K +[\d.]+ ms +\d\d%$", out, re.M)
    assert re.search(r"^predicted  [\d.]+ ms on 1 thread: [\d.]+ GFLOP/s, ", out, re.M)
    assert "binds      the multiply-adds of the two products\n" in out
    assert "rates      100 GFLOP/s of multiply-adds, 3.00 GHz, 10.0 GB/s of reading" in out
    assert out.count("measured") == 1 and "measured now" in " ".join(out.split())


def test_a_run_beside_the_prediction(fake, capsys):
    status, out, _ = command(capsys, PREFILL, "--threads", "1", "--run", "--seconds", "0.1")
    assert status == 0 and is_plain(out)
    assert len(fake.order) == explain.ROUNDS
    assert re.search(r"^a thread's time +predicted +share +measured$", out, re.M)
    assert re.search(r"^threads that wait +- +- +[\d.]+ ms$", out, re.M)
    assert re.search(rf"^measured   [\d.]+ ms, the fastest of {7 * explain.ROUNDS} runs; median [\d.]+ ms$", out, re.M)
    assert re.search(r"^ratio      0\.\d\d, predicted over measured: not within 25%$", out, re.M)


def test_phases_are_those_of_a_thread_in_the_fastest_run(fake, capsys):
    _, out, _ = command(capsys, PREFILL, "--threads", "1", "--run", "--json")
    found = json.loads(out)
    assert found["measured"]["phases"]["scores"] == pytest.approx(found["measured"]["best"] / 2)
    assert found["ratio"] == found["predicted"]["seconds"] / found["measured"]["best"]
    assert found["problem"] == PREFILL and found["pairs"] == 8 * 512 * 512


def test_the_table(fake, capsys):
    status, out, _ = command(capsys, "--table", "--threads", "1", "--seconds", "0.01")
    assert status == 0 and is_plain(out)
    assert f"Predicted and measured: f32 on {manyhead.isa()}\n" in out
    assert re.search(r"^bert_base_b8 +[\d.]+ ms +[\d.]+ ms +\d\.\d\d[ *] ", out, re.M)
    assert re.search(r"^\d+ of 16 rows within 25%; ", out, re.M)
    assert out.count("*") - 1 == 16 - int(re.search(r"^(\d+) of 16", out, re.M)[1])


def test_rows_that_do_not_fit_are_only_predicted(fake, capsys, monkeypatch):
    monkeypatch.setattr("manyhead.commands.explain.available_memory", lambda: 64 << 20)
    status, out, _ = command(capsys, "--table", "--threads", "1")
    assert status == 0
    assert re.search(r"^dec_llama_32k +[\d.]+ ms +- +- ", out, re.M)
    assert "more than half of the free memory:\nsdxl_self, llama8b_2k" in out
    status, _, err = command(capsys, "f32 b1 h32/8 q1 kv32768 d128", "--run")
    assert status == 2 and "more than half of the memory that is free" in err


def test_an_interrupted_table_is_shown(fake, capsys):
    fake.interrupt = 2 * explain.ROUNDS + 1
    status, out, err = command(capsys, "--table", "--threads", "1")
    assert (status, err) == (130, "Interrupted: 2 of 16 rows were done.\n")
    assert "bert_base_b8" in out and "bert_large" not in out


def test_limits_of_a_file(fake, capsys, monkeypatch):
    monkeypatch.setattr(_measure, "read_rate", lambda *_: pytest.fail("measured"))
    known = {
        "arithmetic": [{"isa": manyhead.isa(), "dtype": "f32", "threads": 1, "rate": 5e10}],
        "read": [{"level": "memory", "bytes": 1 << 30, "threads": 1, "rate": 1e10}],
        "clock": {"first": 2e9, "last": 2e9, "least": 2e9, "most": 2e9},
    }
    made = document.make(machine=MACHINE, limits=known, rows=[], skipped=[], arguments=[], seconds=1.0, complete=True)
    document.save(made, Path("a.json"))
    status, out, _ = command(capsys, PREFILL, "--threads", "1", "--limits", "a.json")
    assert status == 0 and "rates      50.0 GFLOP/s of multiply-adds, 2.00 GHz, 10.0 GB/s" in out
    assert "of a.json: A CPU" in " ".join(out.split())
    status, _, err = command(capsys, PREFILL.replace("f32", "f64"), "--limits", "a.json")
    assert status == 2 and f"a.json has no limits for f64 on {manyhead.isa()}: measure that with" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("f64 b8 h8 q512 kv512 d64", "f32 does twice as many multiply-adds at a time"),
        ("f32 b1 h2 q4 kv4 d8", "one thread is done before a second is awake"),
        ("f32 b1 h8 q64 kv512 d64 weights", "take time of their own: leave them out where nobody reads them"),
        ("f32 b1 h16 q384 kv384 d16 bshd", "K and V as [batch, heads, length, head_dim] need no copies."),
        ("f32 b8 h8 q1 kv8192 d64", "It waits for memory: K and V in bf16 or f16 are fewer bytes."),
        ("f32 b8 h64 q512 kv512 d8", "fewer and larger heads"),
    ],
)
def test_what_would_make_it_faster(fake, capsys, line, said):
    if manyhead.threads() == 1 and "awake" in said:
        pytest.skip("there is no second thread")
    _, out, _ = command(capsys, line)
    assert said in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected either a problem line, such as 'f32 b1 h8 q128 kv128 d64', or --table"),
        ([PREFILL, "--table"], "expected either a problem line"),
        (["f32 b1 h2 q3 kv4 d5 casual"], '"casual" is not a word of a problem (column 21)\n'
         "f32 b1 h2 q3 kv4 d5 casual\n                    ^"),
        (["f32 b1 h5/2 q3 kv4 d8"], "must divide heads = 5\nf32 b1 h5/2 q3 kv4 d8"),
        (["f32 b1 h2 q3 kv4 d8 causal"], "align is missing: with causal and q_len = 3 unequal kv_len = 4 it must be "
         "align=tl, align=br or align=off:<n>\nf32 b1 h2 q3 kv4 d8 causal"),
        (["f32 b1 h2 q3 kv3 d8", "--dtype", "bf16"], "--dtype bf16: the line 'f32 b1 h2 q3 kv3 d8' says f32."),
        ([PREFILL, "--isa", "avx3"], "there is no instruction set 'avx3'."),
        ([PREFILL, "--threads", "0"], "--threads 0: '0' is not a number from 1 to"),
        ([PREFILL, "--seconds", "3"], "--seconds is the time of runs: give --run or --table as well"),
        ([PREFILL, "--run", "--seconds", "no"], "--seconds no: expected a number of seconds above 0"),
        ([PREFILL, "--plan-only", "--run"], "--plan-only measures nothing, so --run has no meaning with it"),
        ([PREFILL, "--limits", "none.json"], "cannot read none.json: No such file or directory"),
        (["--table", "tablee"], "there is no preset 'tablee'. Did you mean 'table'?"),
        (["--table", "--dtype", "fp32"], "there is no dtype 'fp32'. Did you mean 'f32'?"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(fake, capsys, arguments, said):
    status, out, err = command(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("manyhead explain: ") and said in err
    assert fake.order == []


def test_options_that_take_one():
    assert options.single("--threads", [3], "3") == 3
    with pytest.raises(errors.UserError, match="--threads 1,2: expected one"):
        options.single("--threads", [1, 2], "1,2")


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    status, _, err = command(capsys, PREFILL)
    assert status == 2 and "manyhead explain: the table needs the Python package rich" in err


@pytest.mark.parametrize("more", [["--plan-only"], []])
def test_json_needs_no_package(fake, capsys, monkeypatch, more):
    monkeypatch.setitem(sys.modules, "rich", None)
    status, out, _ = command(capsys, PREFILL, "--json", *more)
    assert status == 0 and json.loads(out)["problem"] == PREFILL


@pytest.mark.parametrize("name", ["profile", "explain", "replay"])
def test_help_says_what_a_line_is(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    out = capsys.readouterr().out
    assert cases.LINES in out and max(map(len, out.splitlines())) < 81


def test_one_profile_at_a_time(capsys, monkeypatch):
    monkeypatch.setenv("MH_PROFILE", "trace.json")
    status, _, err = command(capsys, PREFILL)
    assert status == 2 and "MH_PROFILE is set" in err
    assert command(capsys, PREFILL, "--plan-only")[0] == 0


def test_on_this_machine(capsys):
    """As a user runs it; times are not looked at."""
    status, out, _ = command(capsys, "f32 b1 h4 q64 kv64 d40", "--run", "--seconds", "0.05", "--json")
    found = json.loads(out)
    assert status == 0 and found["measured"]["best"] > 0
    assert set(found["predicted"]["terms"]) <= set(found["measured"]["phases"]) | {"task", "call", "read"}
    assert found["threads"] == found["plan"]["threads"]
