"""`manyhead compare`: profiles of a machine that does what it is told."""

from __future__ import annotations

import copy
import json
import math
import re

import numpy as np
import pytest
from fake_measure import SHAPES, FakeMeasure, is_plain, make_rows, profile, runner
from manyhead.profiling import compare as comparing
from manyhead.profiling import document

pytest.importorskip("rich")

command = runner("compare")


def make(slower: float = 1.0, seed: int = 0, threads=(1,), **options):
    tools = FakeMeasure(slower=slower, seed=seed)
    return profile(tools, make_rows(tools, threads=threads, **options))


def compare(*documents):
    return comparing.compare([(f"file {i}", made) for i, made in enumerate(documents)])


# --- significance -----------------------------------------------------------------------------------------------------


def test_chances_of_the_rank_test():
    """Published values: 20 v 20 without overlap, and the example of Mann and Whitney's test in textbooks."""
    assert comparing.differ(range(20), range(20, 40)) == pytest.approx(math.erfc(5.3964 / math.sqrt(2)), rel=1e-3)
    assert comparing.differ([1, 2, 3], [1, 2, 3]) == 1.0
    assert comparing.differ([5, 5], [5, 5]) == 1.0
    assert comparing.differ([19, 22, 16, 29, 24], [20, 11, 17, 12]) == pytest.approx(0.1113, abs=1e-3)


def test_few_false_alarms():
    random = np.random.default_rng(0)
    alarms = sum(comparing.differ(*random.lognormal(size=(2, 40))) < comparing.CHANCE for _ in range(1000))
    assert alarms < 30, "1 % of a thousand is 10"


@pytest.mark.parametrize(("slower", "expected"), [(1.0, False), (1.1, True), (0.9, True), (1.01, False)])
def test_differences_that_count(slower, expected):
    result = compare(make(), make(slower, seed=1))
    assert [row["significant"][1] for row in result["rows"]] == [expected] * 3
    assert result["geomean"] == pytest.approx([1.0, 1 / slower], rel=0.02)
    assert result["rows"][0]["ratios"][1] == pytest.approx(1 / slower, rel=0.02)


def test_differences_within_the_noise_do_not_count():
    slow = make(1.1, seed=1)
    slow["limits"]["noise"] = 0.2
    assert not any(row["significant"][1] for row in compare(make(), slow)["rows"])
    assert not any(row["significant"][1] for row in compare(slow, make())["rows"])


def test_three_runs_each_prove_nothing():
    one, other = make(), make(2.0)
    for row in one["rows"] + other["rows"]:
        row["seconds"]["samples"] = row["seconds"]["samples"][:3]
    assert not any(row["significant"][1] for row in compare(one, other)["rows"])


# --- which rows are the same work -------------------------------------------------------------------------------------


def test_rows_of_one_file_only():
    first, second = make(), make()
    extra = first["rows"].pop(0)
    second["rows"].pop(1)
    result = compare(first, second)
    assert [row["problem"] for row in result["rows"]][2] == extra["problem"]
    seconds = [[time is not None for time in row["seconds"]] for row in result["rows"]]
    assert seconds == [[True, False], [True, True], [False, True]]
    assert result["rows"][2]["ratios"] == [None, None]
    assert result["rows"][0]["significant"] == [False, None]
    assert result["geomean"][1] == pytest.approx(1.0, rel=0.02)


def test_nothing_in_common():
    result = compare(make(dtypes=["f32"]), make(dtypes=["bf16"]))
    assert len(result["rows"]) == 6
    assert result["geomean"] == [pytest.approx(1.0), None]


def on(made, isa: str, cpus: int):
    """The same profile on another CPU."""
    made = copy.deepcopy(made)
    made["machine"] |= {"isa": isa, "threads": cpus, "cpus": cpus}
    for row in made["rows"]:
        row["isa"] = isa
        row["threads"] = cpus if row["threads"] > 1 else 1
    return made


def test_another_cpus_best_and_all_its_threads_are_counterparts():
    first = on(make(threads=[1, 4]), "avx2", 4)
    result = compare(first, on(first, "avx512", 16))
    assert len(result["rows"]) == 6
    assert {(row["isa"], row["threads"]) for row in result["rows"]} == {("best", 1), ("best", "all")}
    assert all(None not in row["ratios"] for row in result["rows"])


def test_equal_rows_come_before_counterparts():
    first = on(make(shapes=SHAPES[:1]), "avx2", 4)
    second = make(shapes=SHAPES[:1], isas=["avx512", "avx2"])
    second["machine"]["isa"] = "avx512"
    result = compare(first, second)
    assert [(row["isa"], row["seconds"][0] is not None) for row in result["rows"]] == [
        ("avx2", True),
        ("avx512", False),
    ]


def test_three_files():
    result = compare(make(), make(2.0), make(0.5))
    assert result["geomean"] == pytest.approx([1.0, 0.5, 2.0], rel=0.03)
    assert [entry["label"] for entry in result["documents"]] == ["file 0", "file 1", "file 2"]


def test_labels():
    assert comparing.labels(["old/a.json", "b.json"]) == ["a", "b"]
    assert comparing.labels(["old/a.json", "new/a.json"]) == ["old/a.json", "new/a.json"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, slower in (("same", 1.0), ("slow", 1.2), ("fast", 0.8)):
        document.save(make(slower, seed=len(name) + int(10 * slower)), tmp_path / f"{name}.json")
    document.save(make(), tmp_path / "old.json")
    return tmp_path


def test_the_table(files, capsys):
    status, out, err = command(capsys, "old.json", "slow.json")
    assert (status, err) == (0, "")
    assert is_plain(out)
    assert "B  slow: A CPU, manyhead" in out
    assert re.search(r"^b1 h2 q32 kv32 d16 +f32 +avx2 +1 +[\d.]+ us +[\d.]+ us +0\.8\d\*$", out, re.M)
    assert re.search(r"Geometric mean: B 0\.8\d\d\.", out)


def test_the_page(files, capsys):
    status, out, _ = command(capsys, "old.json", "slow.json", "fast.json", "--html", "a.html")
    assert status == 0 and "Wrote a.html." in out
    assert "slow" in (files / "a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [3, 4, 8])
def test_many_files_fit_80_columns(files, capsys, number):
    status, out, _ = command(capsys, "old.json", *["slow.json"] * (number - 1))
    assert status == 0
    assert is_plain(out)
    assert f"A/{chr(ord('A') + number - 1)}" in out


def test_what_only_one_has(files, capsys):
    document.save(make(dtypes=["bf16"]), files / "other.json")
    status, out, _ = command(capsys, "old.json", "other.json", "--fail-below", "0.9")
    assert status == 0
    assert "No row is in more than one of them" in out
    assert "Only in B: b1 h2 q32 kv32 d16 bf16 avx2" in out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["same.json", "--fail-below", "0.95"], 0, ""),
        (["fast.json", "--fail-below", "0.95"], 0, ""),
        (["slow.json", "--fail-below", "0.5"], 0, ""),
        (["slow.json", "--fail-below", "0.95"], 1, "slow: b1 h2 q32 kv32 d16 f32 avx2"),
        (["slow.json", "--fail-below", "0.95"], 1, "slow: geometric mean: 0.8"),
        (["fast.json", "slow.json", "--fail-below", "0.95"], 1, "slow: "),
        (["slow.json"], 0, ""),
    ],
)
def test_exit_status_for_ci(files, capsys, arguments, status, said):
    found, _, err = command(capsys, "old.json", *arguments)
    assert found == status
    assert said in err and bool(said) == bool(err)


def test_profiles_to_be_wary_of_are_marked(files, capsys):
    document.save(make() | {"complete": False}, files / "part.json")
    noisy = make()
    noisy["limits"]["noise"] = 0.5
    document.save(noisy, files / "noisy.json")
    _, out, _ = command(capsys, "old.json", "part.json", "noisy.json")
    assert "not steady during C (50%)" in out
    assert re.search("^B  part: .*interrupted$", out, re.M)
    assert "interrupted" not in out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["old.json"], "there is nothing to compare old.json with: give two files or more"),
        (["old.json", "none.json"], "cannot read none.json: No such file or directory"),
        (["old.json", "text.json"], "text.json is not a profile: it is not JSON"),
        (["old.json", "list.json"], "list.json is not a profile: expected a file that `manyhead profile --json` wrote"),
        (["old.json", "next.json"], "next.json is a profile of format version 2"),
        (["old.json", "same.json", "--fail-below", "much"], "--fail-below much: expected a ratio above 0"),
        (["old.json", "same.json", "--fail-below", "0"], "--fail-below 0: expected a ratio above 0"),
        (["old.json", "same.json", "--html", "no/a.html"], "cannot write no/a.html: No such file or directory"),
    ],
)
def test_bad_input_is_a_sentence(files, capsys, arguments, said):
    (files / "text.json").write_text("{not json")
    (files / "list.json").write_text("[]")
    (files / "next.json").write_text(json.dumps(make() | {"format_version": 2}))
    status, out, err = command(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("manyhead compare: ") and said in err
