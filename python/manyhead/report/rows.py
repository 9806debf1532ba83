"""What the rows of a document say about themselves: their series, kind, labels and curves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from . import units

Row = dict[str, Any]

NOISY = 0.1  # noise above which times of different rows cannot be compared

# What changes along the axis of a series. A curve is the rows that agree in all the rest. One query is a decode step,
# which stays so at every length of the keys.
ALONG = {
    "sequence": re.compile(r"\b(q(?!1\b)\d+|kv\d+)\b"),
    "threads": re.compile(r"(?!)"),
    "heads": re.compile(r"\b(h\d+(/\d+)?|d\d+|v\d+)\b"),
}


def of_series(rows: Iterable[Row], series: str) -> list[Row]:
    """In the order of the axis, where the series has one."""
    chosen = [row for row in rows if row["series"] == series and (row.get("x") is not None or series == "table")]
    return chosen if series == "table" else sorted(chosen, key=lambda row: row["x"])


def kind(row: Row) -> str:
    return "decode" if re.search(r"\bq1\b", row["problem"]) else "prefill"


def best(row: Row) -> float:
    return row["seconds"]["best"]


def beyond_limit(rows: Iterable[Row]) -> list[str]:
    """A sentence where there are shares above 100 %, which no limit allows."""
    count = sum(round(100 * row["share"]) > 100 for row in rows if units.known(row.get("share")))
    if not count:
        return []
    return [
        f"{units.plural(count, 'row')} above 100% of the limit: it was measured in slower moments than the row itself, "
        "so it is too low there."
    ]


def commonest_threads(rows: Iterable[Row]) -> int | None:
    """That most rows ran with; the larger number where two are as common."""
    counts = Counter(row["threads"] for row in rows)
    return max(counts, key=lambda threads: (counts[threads], threads), default=None)


def labels(rows: list[Row]) -> list[tuple[str, str]]:
    """What each row is called and, where names repeat, as little as tells it from its namesakes."""
    found = [(row["name"], "") for row in rows]
    for key, form in (("dtype", "{}"), ("isa", "{}"), ("threads", "t{}")):
        if len(set(found)) < len(rows) and len({row[key] for row in rows}) > 1:
            found = [
                (name, f"{more} {form.format(row[key])}".strip()) for (name, more), row in zip(found, rows, strict=True)
            ]
    return found


def curves(rows: list[Row], series: str) -> dict[str, list[Row]]:
    """The rows of a series by curve, each called by its name, or by the words that not every curve has."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        problem = ALONG[series].sub("", row["problem"]).replace(" q1 ", " decode ")
        threads = () if series == "threads" else (units.plural(row["threads"], "thread"),)
        groups.setdefault((*problem.split(), row["isa"], *threads), []).append(row)
    named = {group[0]["name"]: group for group in groups.values() if len({row["name"] for row in group}) == 1}
    if len(named) == len(groups):
        return named
    shared = set.intersection(*(set(words) for words in groups)) if len(groups) > 1 else set()
    return {
        " ".join(word for index, word in enumerate(words) if index == 0 or word not in shared): group
        for words, group in groups.items()
    }
