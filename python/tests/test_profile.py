"""`manyhead profile`: on a machine that does what it is told, and as a new user would run it on this one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import manyhead
import pytest
from fake_measure import ARITHMETIC, EFFORT, MACHINE, READ, SHAPES, FakeMeasure, is_plain, make_rows, profile, runner
from manyhead import _measure, _user
from manyhead._user import UserError
from manyhead.commands import options
from manyhead.profiling import cases, document, limits, show, sweep
from manyhead.profiling.model import model_cases

pytest.importorskip("rich")

command = runner("profile")

# --- what is measured -------------------------------------------------------------------------------------------------


def flops(line: str) -> float:
    p = _measure.parse_problem(line)
    return 2.0 * (p.head_dim + (p.v_dim or p.head_dim)) * p.batch * p.heads * p.q_len * p.kv_len


def test_the_table_is_that_of_workloads_txt():
    table = {case.name: case for case in cases.preset_cases(["table"])}
    assert len(table) == 16
    assert table["bert_base_b8"].problem == "b8 h12 q128 kv128 d64"
    assert table["llama8b_2k"].problem == "b1 h32/8 q2048 kv2048 d128 causal"
    assert table["dec_mqa_16k"].what == "decode, one kv head"


def test_heads_have_the_same_products():
    heads = cases.preset_cases(["heads"])
    assert [case.x for case in heads] == [1, 2, 4, 8, 16, 32, 64]
    assert len({flops(f"f32 {case.problem}") for case in heads}) == 1
    assert {case.series for case in heads} == {"heads"}


@pytest.mark.parametrize("name", cases.presets())
def test_presets_can_be_planned(name):
    what, found = cases.presets()[name]
    assert what and found
    assert max(Counter(case.name for case in found).values()) == 1
    for row in cases.make_rows(found, ["f32"], [manyhead.isa()], [1], _measure):
        full = flops(row.line)
        assert row.flops == (full / 2 if "causal" in row.line else full)
        assert row.case.series in ("table", "sequence", "threads", "heads")
        assert "{" not in row.case.name + row.case.what + row.line


def test_every_case_comes_in_every_way():
    rows = make_rows(
        FakeMeasure(), ["b1 h1 q1 kv1 d1", "f64 b1 h1 q2 kv2 d1"], ["f32", "bf16"], ["avx2", "sse2"], [1, 4]
    )
    ways = Counter((row.case.name, row.dtype) for row in rows)
    assert ways == {("b1 h1 q1 kv1 d1", "f32"): 4, ("b1 h1 q1 kv1 d1", "bf16"): 4, ("f64 b1 h1 q2 kv2 d1", "f64"): 4}, (
        "the dtype of a line wins"
    )
    assert rows[0].line == "f32 b1 h1 q1 kv1 d1"


def test_help_has_the_words_of_the_header():
    header = (Path(__file__).parents[2] / "include" / "manyhead" / "manyhead.h").read_text()
    grammar = re.compile(r"in any order\n(.*read as if not there)", re.S)
    words = grammar.search(re.sub(r"^ \*", "", header, flags=re.M))[1].split()
    assert grammar.search(cases.LINES)[1].split() == words
    assert max(map(len, cases.LINES.splitlines())) < 80


def test_threads_double():
    assert cases.doublings(1) == [1]
    assert cases.doublings(6) == [1, 2, 4, 6]
    assert cases.doublings(8) == [1, 2, 4, 8]
    rows = cases.make_rows(cases.preset_cases(["threads"]), ["f32"], ["avx2"], [1, 6], FakeMeasure())
    assert [(row.threads, row.x) for row in rows] == [(1, 1), (2, 2), (4, 4), (6, 6)]


def test_sizes_count_masks():
    plain, masked = make_rows(FakeMeasure(), ["b2 h4/2 q8 kv16 d4 v6", "b2 h4/2 q8 kv16 d4 v6 mask"])
    assert plain.size == (2 * 4 * 8 + 2 * 2 * 16) * (4 + 6) * 4
    assert masked.size > plain.size + 2 * 4 * 8 * 16


# --- models -----------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


def problems_of(tmp_path, config) -> dict[str, str]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {case.name: case.problem for case in model_cases(tmp_path / "config.json")}


def test_a_decoder(tmp_path):
    problems = problems_of(tmp_path, LLAMA | {"max_position_embeddings": 8192})
    assert problems == {
        "llama_prompt_128": "b1 h32/8 q128 kv128 d128 causal",
        "llama_prompt_512": "b1 h32/8 q512 kv512 d128 causal",
        "llama_prompt_2048": "b1 h32/8 q2048 kv2048 d128 causal",
        "llama_decode_512": "b1 h32/8 q1 kv512 d128",
        "llama_decode_4096": "b1 h32/8 q1 kv4096 d128",
    }
    assert [case.name for case in model_cases(tmp_path)] == list(problems), "its folder does as well"


@pytest.mark.parametrize(
    ("config", "name", "problem"),
    [
        (
            {"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 512},
            "bert_512",
            "b1 h12 q512 kv512 d64",
        ),
        (
            {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_positions": 1024},
            "gpt2_prompt_512",
            "b1 h12 q512 kv512 d64 causal",
        ),
        ({"model_type": "distilbert", "dim": 768, "n_heads": 12}, "distilbert_128", "b1 h12 q128 kv128 d64"),
        (LLAMA | {"head_dim": 96}, "llama_decode_512", "b1 h32/8 q1 kv512 d96"),
        (LLAMA | {"sliding_window": 1024}, "llama_window_2048", "b1 h32/8 q2048 kv2048 d128 causal window=1023,0"),
        (LLAMA | {"sliding_window": 1024}, "llama_decode_512", "b1 h32/8 q1 kv512 d128"),
        (
            {"model_type": "bloom", "hidden_size": 1024, "n_head": 16},
            "bloom_decode_512",
            "b1 h16 q1 kv512 d64 causal align=br alibi",
        ),
        (
            {"model_type": "whisper", "d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
            | {"max_source_positions": 1500, "max_target_positions": 448},
            "whisper_encoder",
            "b1 h6 q1500 kv1500 d64",
        ),
        (
            {"model_type": "whisper", "d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
            | {"max_source_positions": 1500, "max_target_positions": 448},
            "whisper_cross_1",
            "b1 h6 q1 kv1500 d64",
        ),
        (
            {"model_type": "t5", "d_model": 512, "d_kv": 64, "num_heads": 6, "is_encoder_decoder": True},
            "t5_encoder_512",
            "b1 h6 q512 kv512 d64",
        ),
        (
            {"model_type": "vit", "hidden_size": 768, "num_attention_heads": 12, "image_size": 224, "patch_size": 16},
            "vit_197",
            "b1 h12 q197 kv197 d64",
        ),
        (
            {"model_type": "clip", "vision_config": {"hidden_size": 64, "num_attention_heads": 2, "image_size": 32}}
            | {"text_config": LLAMA},
            "llama_prompt_128",
            "b1 h32/8 q128 kv128 d128 causal",
        ),
        (
            {"model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168}
            | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            "deepseek_v3_decode_512",
            "b1 h128 q1 kv512 d192 v128",
        ),
    ],
)
def test_models(tmp_path, config, name, problem):
    problems = problems_of(tmp_path, config)
    assert problems[name] == problem
    if tools := sys.modules.get("manyhead._measure"):
        for line in problems.values():
            tools.parse_problem(f"f32 {line}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "not the config.json of a model: it is not JSON (Expecting value: line 1 column 1"),
        ("[1]", "expected a JSON object"),
        ("{}", "it has no num_attention_heads or n_head"),
        ('{"num_attention_heads": 12}', "it has no hidden_size or n_embd"),
        ('{"num_attention_heads": 12, "hidden_size": 100}', "12 heads do not divide a width of 100"),
        ('{"num_attention_heads": 12, "head_dim": 8, "num_key_value_heads": 5}', "5 heads of keys and values"),
        ('{"num_attention_heads": "12"}', 'its num_attention_heads is "12", expected a whole number above 0'),
        ('{"num_attention_heads": 0}', "its num_attention_heads is 0, expected"),
    ],
)
def test_files_that_are_no_models(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        model_cases(tmp_path / "config.json")


# --- limits -----------------------------------------------------------------------------------------------------------


def make_limits(**machine) -> limits.Limits:
    return limits.Limits(FakeMeasure(), MACHINE | machine, 8 << 30, 1)


def test_levels_of_the_memory():
    levels = limits.levels(MACHINE, 8 << 30)
    assert [level.name for level in levels] == ["L1", "L2", "L3", "memory"]
    sizes = {level.name: level.probe for level in levels}
    assert sizes["L1"] == 16 << 10 and sizes["L2"] == 512 << 10
    assert 4 << 20 < sizes["L3"] <= 16 << 20, "beyond L2, within L3"
    assert sizes["memory"] >= 256 << 20
    assert [level.name for level in limits.levels({"l1_bytes": 1024, "l2_bytes": 0}, 1 << 20)] == ["L1", "memory"]
    assert limits.levels({}, 1 << 20)[0].probe <= 1 << 18, "no more than there is"


@pytest.mark.parametrize(
    ("flops", "moved", "kept", "threads", "best", "limit", "share"),
    [
        (ARITHMETIC, 1e3, 1e3, 1, 2.0, "arithmetic", 0.5),
        (ARITHMETIC, 1e3, 1e3, 4, 1.0, "arithmetic", 0.25),
        (1.0, READ, 64 << 20, 1, 1.25, "read memory", 0.8),
        (1.0, READ, 8 << 20, 1, 2.0, "read L3", 0.5),
        (1.0, READ, 2 << 20, 4, 0.5, "read L2", 0.5),
        (1.0, READ, 2 << 20, 1, 2.0, "read L3", 0.5),
        (1.0, READ, 100 << 10, 4, 0.5, "read L1", 0.5),
        (ARITHMETIC * 1e-6, 1.0, 1.0, 1, 20e-6, "overhead", 0.05),
        (ARITHMETIC * 1e-6, 1.0, 1.0, 1, 4e-6, "arithmetic", 0.25),
        (ARITHMETIC * 1e-6, 1.0, 1.0, 1, 200e-6, "arithmetic", 0.005),
    ],
)
def test_what_limits(flops, moved, kept, threads, best, limit, share):
    found = make_limits().of(flops, moved, kept, "avx2", "f32", threads, best)
    assert found["limit"] == limit
    assert found["share"] == pytest.approx(share)


# --- a whole profile --------------------------------------------------------------------------------------------------


def test_threads_that_wait_for_a_cpu_are_noise():
    class Busy(FakeMeasure):
        def waited(self) -> float:
            return time.monotonic() / 2

    busy = Busy()
    limits = profile(busy, make_rows(busy, ["b1 h8 q512 kv512 d64"], threads=[1]))["limits"]
    assert limits["noise"] == limits["waited"] == pytest.approx(0.5, rel=0.1)


def test_a_profile_on_a_known_machine():
    result = profile(FakeMeasure(), make_rows(FakeMeasure(), ["b1 h8 q512 kv512 d64"], threads=[1, 2]))
    assert result["complete"] is True
    one, two = result["rows"]
    assert one["flops"] == 4 * 8 * 512 * 512 * 64
    assert one["limit"] == "arithmetic"
    assert one["limit_rate"] == ARITHMETIC
    assert one["share"] == pytest.approx(0.5, rel=0.05), "the fake machine takes twice the time of its limit"
    assert one["flops_rate"] == one["flops"] / one["seconds"]["best"]
    assert one["seconds"]["best"] <= one["seconds"]["median"] <= one["seconds"]["p90"]
    assert len(one["seconds"]["samples"]) == min(one["seconds"]["runs"], sweep.SAMPLES)
    assert (two["threads"], two["limit_rate"]) == (2, 2 * ARITHMETIC)
    assert one["phases"]["softmax"] > 0 and one["counters"] is None
    assert result["limits"]["noise"] == 0 and result["limits"]["drift"] == 0
    assert {entry["threads"] for entry in result["limits"]["read"]} == {1, 2}


def test_the_best_look_at_a_limit_counts(monkeypatch):
    tools = FakeMeasure()
    shares = iter([0.5, 0.25, 1.0] * 1000)
    monkeypatch.setattr(tools, "arithmetic_rate", lambda isa, dtype, threads, _: ARITHMETIC * threads * next(shares))
    result = profile(tools, make_rows(tools, ["b1 h8 q512 kv512 d64"]), dataclasses.replace(EFFORT, looks=4))
    (row,) = result["rows"]
    assert row["limit_rate"] == ARITHMETIC
    assert {entry["rate"] for entry in result["limits"]["arithmetic"]} == {ARITHMETIC}


def test_rows_take_turns():
    tools = FakeMeasure()
    profile(tools, effort=sweep.Effort(seconds=1e-9, passes=3, least=1, longest=10.0, looks=1))
    assert len(tools.order) == 9
    assert tools.order[:3] == tools.order[3:6] == tools.order[6:]
    assert len(set(tools.order)) == 3


def test_rows_have_enough_runs_for_a_test_of_significance():
    result = profile(FakeMeasure(), effort=sweep.Effort(1e-9, passes=3, least=2, longest=10.0, looks=1))
    assert {row["seconds"]["runs"] for row in result["rows"]} == {6}


def test_rows_that_do_not_fit_are_left_out_and_named():
    result = profile(FakeMeasure(), make_rows(FakeMeasure(), ["b1 h2 q1 kv64 d16", "b1 h32 q1 kv65536 d128"]))
    assert [row["name"] for row in result["rows"]] == SHAPES[1:2]
    (skipped,) = result["skipped"]
    assert skipped["name"] == "b1 h32 q1 kv65536 d128"
    assert "its tensors take 2.0 GiB, more than half of the memory that is free" in skipped["why"]


def test_rows_that_would_take_too_long_are_left_out():
    effort = sweep.Effort(seconds=0.01, passes=1, least=1, longest=0.5, looks=1)
    result = profile(FakeMeasure(), make_rows(FakeMeasure(), ["b1 h64 q4096 kv4096 d128"]), effort)
    assert result["rows"] == [] and result["complete"]
    assert result["skipped"][0]["why"] == "one run is expected to take more than 0.5 s"


def test_a_run_ends_in_time(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(sweep.time, "monotonic", lambda: next(clock))
    effort = sweep.Effort(seconds=1e-9, passes=3, least=1, longest=10.0, looks=1, total=4.5)
    tools = FakeMeasure()
    result = profile(tools, effort=effort)
    assert len(tools.order) == 4, "one pass, and a row of the second one"
    assert [row["seconds"]["runs"] for row in result["rows"]] == [2, 1, 1]
    result = profile(FakeMeasure(), effort=dataclasses.replace(effort, total=2.5))
    assert [row["name"] for row in result["rows"]] == SHAPES[:2]
    assert result["skipped"][0]["why"] == "there was no time left"


def test_rows_that_cannot_be_planned_do_not_end_the_run():
    tools = FakeMeasure(failing="causal")
    result = profile(tools)
    assert [row["name"] for row in result["rows"]] == SHAPES[:2]
    assert result["skipped"][0]["why"] == "there is no kernel for this"


def test_an_interrupt_keeps_what_is_done():
    result = profile(FakeMeasure(interrupt=3), effort=sweep.Effort(1e-9, 3, 1, 10.0, 1))
    assert result["complete"] is False
    assert [row["name"] for row in result["rows"]] == SHAPES[:2]
    result = profile(FakeMeasure(interrupt=1))
    assert result["rows"] == [] and result["complete"] is False


def test_an_interrupt_before_the_first_row(monkeypatch):
    tools = FakeMeasure()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tools, "read_rate", interrupted)
    result = profile(tools)
    assert result["rows"] == [] and result["complete"] is False
    assert result["limits"]["clock"]["first"] > 0


def test_progress_ends_where_it_was_planned():
    seen = Counter()
    watch = sweep.Watch(
        plan=lambda seconds: seen.update(plan=seconds),
        now=lambda what: seen.update(now=1),
        done=lambda seconds: seen.update(done=seconds),
    )
    profile(FakeMeasure(failing="causal"), watch=watch)
    assert seen["done"] == pytest.approx(seen["plan"])
    assert seen["now"] == 1 + 3 + 2 * 2, "limits, a pass of three rows, two passes of the two that can be planned"


def test_tensors_are_let_go(monkeypatch):
    monkeypatch.setattr(sweep, "TOGETHER", 1)
    tools = FakeMeasure()
    result = profile(tools, effort=sweep.Effort(1e-9, 2, 1, 10.0, 1))
    assert tools.order[0] == tools.order[1] != tools.order[2], "what is too large comes alone, all of its passes"
    assert len(result["rows"]) == 3


# --- the document -----------------------------------------------------------------------------------------------------


def test_documents_come_back(tmp_path):
    result = profile(FakeMeasure())
    document.save(result, tmp_path / "a.json")
    assert document.load(tmp_path / "a.json") == result
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    document.save(result | {"seconds": 1.0}, tmp_path / "a.json")
    assert document.load(tmp_path / "a.json")["seconds"] == 1.0


@pytest.mark.parametrize("kind", ["json", "html"])
def test_a_failed_write_leaves_the_old_file(fake, capsys, monkeypatch, kind):
    file = Path("old")
    file.write_text("old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_user.tempfile, "mkstemp", full)
    status, out, err = command(capsys, "--quick", "--shape", SHAPES[0], f"--{kind}", "old")
    assert (status, err) == (2, "manyhead profile: cannot write old: No space left on device\n")
    assert SHAPES[0] in out, "the figures are shown all the same"
    assert file.read_text() == "old"


def test_files_in_folders_that_are_closed(tmp_path, monkeypatch):
    def closed(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.json").write_text("old")
    monkeypatch.setattr(_user.tempfile, "mkstemp", closed)
    document.save({"a": 1}, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "is not a profile: expected a file that `manyhead profile --json` wrote"),
        ({"format_version": 2}, "is a profile of format version 2, and manyhead .* reads version 1"),
        ({"format_version": None}, "is a profile of format version None"),
        ({"rows": None}, "is a damaged profile: its 'rows' is missing"),
        ({"rows": [{}]}, "is a damaged profile: row 0 has no series, name"),
        ({"machine": []}, "is a damaged profile: its 'machine' is missing"),
        ({"limits": {"noise": "much"}}, "is a damaged profile: its noise is 'much'"),
        ({"rows": [dict.fromkeys(document.ROW, 1)]}, "is a damaged profile: row 0 has no times"),
        ({"rows": [dict.fromkeys(document.ROW, {"best": 1, "median": 1, "samples": ["x"]})]}, "row 0 has no times"),
        ({"rows": [dict.fromkeys(document.ROW, {"best": 0, "median": 1, "samples": [1]})]}, "row 0 has no times"),
    ],
)
def test_files_that_are_no_profiles(tmp_path, change, said):
    (tmp_path / "a.json").write_text(json.dumps(profile(FakeMeasure()) | change))
    with pytest.raises(UserError, match=said):
        document.load(tmp_path / "a.json")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch, tmp_path) -> FakeMeasure:
    """The command measures with this one; it runs in an empty folder, into a pipe of 80 columns."""
    tools = FakeMeasure()
    monkeypatch.setattr(manyhead, "_measure", tools, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tools


def test_everything(fake, capsys, tmp_path):
    status, out, err = command(capsys, "--json", "a.json", "--isa", "all", "--dtype", "f32,bf16", "--seconds", "1e-3")
    assert (status, err) == (0, "")
    assert is_plain(out)
    for text in (
        "What this machine can do: multiply-adds",
        "Growing lengths: f32",
        "of ideal",
        "Wrote a.json.",
    ):
        assert text in out
    # A table for each type or, where the CPU runs so many instruction sets that these are fewer, for each workload.
    assert "Workloads: bf16" in out or "\nminilm_b8\ndtype" in out
    result = document.load("a.json")
    assert result["arguments"][:2] == ["--json", "a.json"]
    ways = {(row["dtype"], row["isa"]) for row in result["rows"]}
    assert len(ways) == 2 * sum(manyhead.isas().values())
    assert {row["series"] for row in result["rows"]} == {"table", "sequence", "threads"}


def test_the_page(fake, capsys):
    status, out, _ = command(capsys, "--quick", "--html", "a.html", "--preset", "table,heads")
    assert status == 0 and "Wrote a.html." in out
    page = Path("a.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html") and "bert_base_b8" in page


def test_heads(fake, capsys):
    status, out, _ = command(capsys, "--preset", "heads", "--quick")
    assert status == 0 and is_plain(out)
    assert re.search(r"^ +64 +(16 +)?[\d.]+ ms +1\.00x +20% ", out, re.M)
    assert "64 heads of 16 take 1.00 times as long as 1 of 1024" in " ".join(out.split())


def test_one_problem_in_many_ways_is_one_table(fake, capsys):
    _, out, _ = command(capsys, "--shape", SHAPES[0], "--dtype", "all", "--threads", "1")
    assert re.search(rf"^{SHAPES[0]}\ndtype +isa +threads +time", out, re.M)
    assert re.search(r"^bf16 +\w+ +1 +[\d.]+ us ", out, re.M)


def test_list_runs_nothing(fake, capsys):
    status, out, _ = command(capsys, "--list", "--preset", "whisper,bert-base", "--dtype", "f16")
    assert status == 0 and is_plain(out)
    assert fake.order == []
    assert re.search(r"whisper_cross_1 +f16 .* b1 h20 q1 kv1500 d64", out)
    assert f"{9 * len({1, manyhead.threads()})} rows, about" in out


def test_an_interrupt_is_told(fake, capsys):
    fake.interrupt = 3
    arguments = [word for shape in SHAPES for word in ("--shape", shape)]
    status, out, err = command(capsys, *arguments, "--threads", "1", "--dtype", "f32", "--json", "a.json")
    assert (status, err) == (130, "Interrupted: 2 of 3 rows were done.\n")
    assert document.load("a.json")["complete"] is False
    assert SHAPES[1] in out and SHAPES[2] not in out


def test_an_interrupt_before_the_first_row_keeps_the_old_file(fake, capsys):
    Path("a.json").write_text("old")
    fake.interrupt = 1
    status, out, err = command(capsys, "--shape", SHAPES[0], "--threads", "1", "--dtype", "f32", "--json", "a.json")
    assert (status, err) == (130, "Interrupted: 0 of 1 rows were done.\n")
    assert Path("a.json").read_text() == "old" and "Wrote" not in out


def test_columns_that_say_nothing_are_left_out(fake, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = command(capsys, "--shape", SHAPES[0], "--seconds", "0.1")
    assert " p90 " in out and " most in " in out
    _, out, _ = command(capsys, "--shape", SHAPES[0], "--seconds", "1e-9", "--no-phases")
    assert " GFLOP/s " in out and " most in " not in out


def test_one_run_has_no_slowest_tenth():
    times = {"best": 1.0, "p90": 1.0}
    assert show.slowest_tenth({"seconds": times | {"runs": 1}}) == "-"
    assert show.slowest_tenth({"seconds": times | {"runs": 2}}) == "+0%"


def test_a_share_beyond_the_limit_is_said_to_be_one(fake, capsys, monkeypatch):
    monkeypatch.setattr(fake, "arithmetic_rate", lambda isa, dtype, threads, _: ARITHMETIC * threads / 4)
    _, out, _ = command(capsys, "--shape", SHAPES[0], "--threads", "1", "--dtype", "f32")
    assert "1 row above 100% of the limit: it was measured in slower moments" in out


def test_more_threads_wanted_than_cpus():
    assert options.threads_of("all", {"threads": 999, "cpus": 2}) == [2]
    assert options.threads_of("all,2", {"threads": 1, "cpus": 2}) == [1, 2]


def test_an_unsteady_machine_is_told(fake, capsys, monkeypatch):
    rates = iter(range(10**9))
    monkeypatch.setattr(fake, "arithmetic_rate", lambda *_: 1e11 / (1 + next(rates) % 2))
    _, out, _ = command(capsys, "--shape", SHAPES[0], "--threads", "1")
    assert "Warning: the machine was not steady while this ran" in out
    _, out, _ = command(capsys, "--shape", SHAPES[0], "--threads", "1", "--no-phases")
    assert "Warning" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "bert-bas"], "there is no preset 'bert-bas'. Did you mean 'bert-base'? Known: table, sequence"),
        (["--preset", "heads,,gpt2"], "--preset 'heads,,gpt2': expected names with commas between them"),
        (["--dtype", "fp32"], "there is no dtype 'fp32'. Did you mean 'f32'?"),
        (["--isa", "avx3"], "there is no instruction set 'avx3'."),
        (["--threads", "0"], "--threads 0: '0' is not a number from 1 to"),
        (["--threads", "-1"], "--threads -1: '-1' is not a number from 1 to"),
        (["--threads", "two"], "--threads two: 'two' is not a number from 1 to"),
        (["--threads", "1000000"], "--threads 1000000: '1000000' is not a number from 1 to"),
        (["--threads", ""], "--threads '': expected names with commas between them"),
        (["--dtype", ""], "--dtype '': expected names with commas between them"),
        (["--seconds", "0"], "--seconds 0: expected a number of seconds above 0"),
        (["--seconds", "nan"], "--seconds nan: expected a number of seconds above 0"),
        (["--shape", "b1 h2 q3 kv4 d5 casual"], "(column 17)\nb1 h2 q3 kv4 d5 casual\n                ^"),
        (["--shape", "x"], '"x" is not a word of a problem (column 1)\nx\n^'),
        (
            ["--shape", "f32 b1 h2 q3 kv3 d4", "--dtype", "bf16"],
            "--dtype bf16: the line 'f32 b1 h2 q3 kv3 d4' says f32.",
        ),
        (["--shape", "b1 h5/2 q3 kv4 d8"], "kv_heads is 2, must divide heads = 5\nb1 h5/2 q3 kv4 d8"),
        (["--model", "none.json"], "cannot read none.json: No such file or directory"),
        (["--json", "no/such/folder/a.json"], "cannot write no/such/folder/a.json: No such file or directory"),
        (["--json", "a", "--html", "./a"], "--json and --html are one file: a"),
        (["--html", "."], "cannot write .: Is a directory"),
    ],
)
def test_bad_input_is_a_sentence(fake, capsys, arguments, said):
    status, out, err = command(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("manyhead profile: ") and said in err
    assert fake.order == [], "told before the run"
    assert list(Path().iterdir()) == []


def test_instruction_sets_of_other_cpus_are_refused(fake, capsys, monkeypatch):
    monkeypatch.setattr("manyhead.commands.options.isas", lambda: {"avx512": False, manyhead.isa(): True})
    status, _, err = command(capsys, "--isa", "avx512")
    assert status == 2
    assert "--isa avx512: this CPU cannot run it" in err


def test_a_missing_package_is_named(fake, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    status, _, err = command(capsys, "--quick")
    assert status == 2
    assert "manyhead profile: the table needs the Python package rich: pip install rich, or " in err


def test_one_profile_at_a_time(fake, capsys, monkeypatch):
    monkeypatch.setenv("MH_PROFILE", "trace.json")
    status, _, err = command(capsys, "--quick")
    assert status == 2 and "MH_PROFILE is set" in err


# --- as a new user runs it --------------------------------------------------------------------------------------------

TINY = ["profile", "--shape", SHAPES[0], "--shape", SHAPES[1], "--seconds", "0.02", "--dtype", "f32"]


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    return kept | {"PYTHONPATH": str(Path(manyhead.__file__).parents[1])} | changes


def start(folder, *arguments, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "manyhead", *arguments], cwd=folder, **options)


def test_piped(tmp_path):
    run = start(
        tmp_path,
        *TINY,
        "--json",
        "a.json",
        env=environment(COLUMNS="80"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = (text.decode() for text in run.communicate(timeout=60))
    assert (run.returncode, err) == (0, "")
    assert is_plain(out)
    result = document.load(tmp_path / "a.json")
    assert result["complete"] and result["rows"]
    for row in result["rows"]:
        assert row["share"] > 0 and row["seconds"]["runs"] > 0
        assert set(row["phases"]) >= {"softmax", "scores", "values"}


def test_in_a_terminal(tmp_path):
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    run = start(tmp_path, *TINY, env=environment(TERM="xterm-256color"), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    data = b""
    while chunk := read(ours):
        data += chunk
    os.close(ours)
    assert run.wait(60) == 0
    text = data.decode()
    assert "\x1b[" in text, "a terminal gets colours"
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "%" in shown.partition("What this machine can do")[0], "a bar before the table"
    lines = [line for part in shown.splitlines() for line in part.split("\r")]
    assert max(map(len, lines)) <= 80


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says so where the other end is closed
        return b""


def test_interrupted(tmp_path):
    shapes = [word for i in range(1, 50) for word in ("--shape", f"b1 h8 q512 kv{512 + i} d64")]
    run = start(
        tmp_path,
        *["profile", *shapes, "--dtype", "f32", "--threads", "1", "--seconds", "3", "--json", "a.json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(4)
    run.send_signal(signal.SIGINT)
    out, err = (text.decode() for text in run.communicate(timeout=60))
    assert run.returncode == 130
    told = re.fullmatch(r"Interrupted: (\d+) of 49 rows were done\.\n", err)
    assert told
    assert is_plain(out, 100)
    if int(told[1]) == 0:  # a slow machine was still at its limits
        assert not (tmp_path / "a.json").exists()
        return
    result = document.load(tmp_path / "a.json")
    assert result["complete"] is False
    assert len(result["rows"]) == int(told[1])


def test_into_a_pipe_that_closes(tmp_path):
    run = start(tmp_path, *TINY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout and run.stderr
    run.stdout.close()
    assert run.wait(60) == 0
    assert run.stderr.read() == b""
