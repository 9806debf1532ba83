"""What a head attends to most, said in words from its weights.

`HeadHabits` adds up, over sentences, the share of each head's attention that goes to: a relative position (the token
itself, the 1st to 3rd one before or after), [CLS], [SEP], and punctuation. Only queries that are part of a word count:
what [SEP] itself looks at says little. `strongest_pair` finds, in one sentence, the two words with the largest weight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from manyhead.head_analysis.encoder import Tokens, is_word
from manyhead.head_analysis.report import HABIT

_OFFSETS = {
    -3: "3 tokens back",
    -2: "2 tokens back",
    -1: "previous token",
    0: "the token itself",
    1: "next token",
    2: "2 tokens ahead",
    3: "3 tokens ahead",
}
_PAIR = 0.3  # a single pair this strong, and twice as strong as the habit, names it instead

# A pair of these says little, so they are left out where there are other words. Pronouns are not among them.
_FUNCTION_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "because", "been", "but", "by", "did", "didn't", "do", "does", "for",
    "from", "had", "has", "have", "if", "in", "is", "not", "of", "on", "or", "so", "than", "that", "the", "then",
    "this", "to", "too", "very", "was", "were", "will", "with"
})  # fmt: skip


class HeadHabits:
    """Running sums for the heads of one layer."""

    def __init__(self, heads: int) -> None:
        self.rows = 0
        self.shares = {name: np.zeros(heads) for name in (*_OFFSETS.values(), "[CLS]", "[SEP]", "punctuation")}

    def add(self, weights: np.ndarray, tokens: Tokens) -> None:
        """weights [heads, len, len] of one sentence without its padding."""
        words = np.zeros(len(tokens), bool)
        words[[place for _, places in join_words(tokens) for place in places]] = True
        special = np.array([word is None for word in tokens.words])
        queries = np.flatnonzero(words)
        length = len(tokens)
        rows = weights[:, queries, :].astype(np.float64)
        for offset, name in _OFFSETS.items():
            inside = (queries + offset >= 0) & (queries + offset < length)
            self.shares[name] += rows[:, np.flatnonzero(inside), (queries + offset)[inside]].sum(axis=1)
        self.shares["[CLS]"] += rows[:, :, 0].sum(axis=1)
        self.shares["[SEP]"] += rows[:, :, length - 1].sum(axis=1)
        self.shares["punctuation"] += rows[:, :, ~words & ~special].sum(axis=(1, 2))
        self.rows += queries.size

    def strongest(self, head: int) -> tuple[str, float]:
        """The habit with the largest share, and the share."""
        name = max(self.shares, key=lambda key: self.shares[key][head])
        return name, float(self.shares[name][head]) / max(self.rows, 1)

    def name(self, head: int, pair: Pair | None) -> str:
        """What the head attends to most, with its share of the attention; spread out where no habit names it."""
        habit, share = self.strongest(head)
        if pair and pair.share >= max(_PAIR, 2 * share):
            return str(pair)
        if share >= HABIT:
            return f"{habit} {share:.0%}"
        return f"spread out ({habit} {share:.0%})"


class Pair(NamedTuple):
    """Attention from one word to another."""

    source: str
    target: str
    share: float

    def __str__(self) -> str:
        return f"'{self.source}' -> '{self.target}' {self.share:.0%}"


def join_words(tokens: Tokens) -> list[tuple[str, list[int]]]:
    """The words of a sentence, without punctuation and special tokens, each with the positions of its pieces."""
    places: dict[int, list[int]] = {}
    for position, word in enumerate(tokens.words):
        if word is not None:
            places.setdefault(word, []).append(position)
    words = [("".join(tokens.pieces[p].removeprefix("##") for p in spots), spots) for spots in places.values()]
    return [(text, spots) for text, spots in words if is_word(text)]


def strongest_pair(weights: np.ndarray, tokens: Tokens) -> Pair | None:
    """The largest attention between two different words of one sentence; None with fewer than two.

    weights [len, len] of one head. Attention to a word is the sum over its pieces, attention of a word their mean.
    """
    words = join_words(tokens)
    content = [word for word in words if word[0] not in _FUNCTION_WORDS]
    if len(content) >= 2:
        words = content
    if len(words) < 2:
        return None
    member = np.zeros((len(words), len(tokens)))
    for row, (_, places) in zip(member, words, strict=True):
        row[places] = 1.0
    between = member @ weights @ member.T / member.sum(axis=1, keepdims=True)
    np.fill_diagonal(between, -1.0)
    source, target = np.unravel_index(int(between.argmax()), between.shape)
    return Pair(words[source][0], words[target][0], float(between[source, target]))
