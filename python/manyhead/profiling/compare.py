"""Profiles side by side: which rows are the same work, how their times compare, and what of that is not noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

CHANCE = 0.01  # of a difference this clear where there is none: below it, a row counts as different
LEAST = 0.02  # differences below this, or below the noise of a run, are never significant: samples of one run know
# nothing of how the machine is in another
Document = dict[str, Any]
Row = dict[str, Any]


def compare(documents: Sequence[tuple[str, Document]]) -> dict[str, Any]:
    """The comparison of labelled documents with the first one. A ratio is time of the first / time of this one."""
    joined = _join([document for _, document in documents])
    noise = [noise_of(document) for _, document in documents]
    rows = [_compare_row(rows, noise) for rows in joined]
    means: list[float | None] = []
    for i in range(len(documents)):
        ratios = [row["ratios"][i] for row in rows if row["ratios"][i] is not None]
        means.append(geometric_mean(ratios) if ratios else None)
    return {
        "documents": [{"label": label, "document": document} for label, document in documents],
        "rows": rows,
        "geomean": means,
    }


def noise_of(document: Document) -> float:
    return document["limits"].get("noise") or 0.0


def labels(paths: Sequence[str]) -> list[str]:
    """Short names of files: those without folder and ending, where that tells them apart."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def below(comparison: dict[str, Any], least: float) -> list[str]:
    """What is slower than `least` of the first document: significant rows, and geometric means. A sentence each."""
    found = []
    for i, entry in enumerate(comparison["documents"][1:], 1):
        for row in comparison["rows"]:
            if row["significant"][i] and row["ratios"][i] < least:
                found.append(f"{entry['label']}: {describe(row)}: {row['ratios'][i]:.3f} is below {least:g}")
        mean = comparison["geomean"][i]
        if mean is not None and mean < least:
            found.append(f"{entry['label']}: geometric mean: {mean:.3f} is below {least:g}")
    return found


def describe(row: Row) -> str:
    return f"{row['name']} {row['dtype']} {row['isa']} on {row['threads']} threads"


def differ(a: Sequence[float], b: Sequence[float]) -> float:
    """The chance that two samples of one distribution rank as differently as these: Mann and Whitney's test, two-sided,
    with the normal approximation."""
    both = np.concatenate([a, b])
    _, place, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # ties share the mean of their ranks
    n, m = len(a), len(b)
    total = n + m
    ties = float(((counts**3) - counts).sum()) / (total * (total - 1))
    variance = n * m / 12 * (total + 1 - ties)
    if variance <= 0:
        return 1.0
    u = float(ranks[:n].sum()) - n * (n + 1) / 2
    z = max(abs(u - n * m / 2) - 0.5, 0.0) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def _key(row: Row, machine: dict[str, Any], by_isa: bool, by_threads: bool) -> tuple[Any, ...] | None:
    """Rows of two documents with the same key are the same work. A CPU's best instruction set and all of its threads
    are the counterparts of another's, where by_isa or by_threads is false."""
    if not (by_isa or row["isa"] == machine.get("isa")) or not (by_threads or row["threads"] == machine.get("threads")):
        return None
    return row["problem"], row["dtype"], row["isa"] if by_isa else "best", row["threads"] if by_threads else "all"


def _join(documents: Sequence[Document]) -> list[list[Row | None]]:
    """Rows that are the same work, a list for each, with None where a document has no such row. Rows that are alike in
    everything find each other before those that are counterparts."""
    joined: list[list[Row | None]] = [[row] for row in documents[0]["rows"]]
    for i, document in enumerate(documents[1:], 1):
        left = list(document["rows"])
        for strictness in ((True, True), (False, True), (True, False), (False, False)):
            free: dict[tuple[Any, ...], list[list[Row | None]]] = {}
            for rows in (rows for rows in joined if len(rows) == i):
                n, row = next((n, row) for n, row in enumerate(rows) if row)
                if key := _key(row, documents[n]["machine"], *strictness):
                    free.setdefault(key, []).append(rows)
            unmatched = []
            for row in left:
                key = _key(row, document["machine"], *strictness)
                if key and free.get(key):
                    free[key].pop(0).append(row)
                else:
                    unmatched.append(row)
            left = unmatched
        for rows in joined:
            rows += [None] * (i + 1 - len(rows))
        joined += [[None] * i + [row] for row in left]
    return joined


def _compare_row(rows: list[Row | None], noise: Sequence[float]) -> Row:
    present = [row for row in rows if row]
    first = rows[0]
    isas, threads = {row["isa"] for row in present}, {row["threads"] for row in present}
    return {
        "name": present[0]["name"],
        "problem": present[0]["problem"],
        "dtype": present[0]["dtype"],
        "isa": present[0]["isa"] if len(isas) == 1 else "best",
        "threads": present[0]["threads"] if len(threads) == 1 else "all",
        "seconds": [row and row["seconds"]["best"] for row in rows],
        "ratios": [first["seconds"]["best"] / row["seconds"]["best"] if first and row else None for row in rows],
        "significant": [
            _significant(first, row, max(LEAST, noise[0], noise[i])) if first and row else None
            for i, row in enumerate(rows)
        ],
    }


def _significant(first: Row, row: Row, least: float) -> bool:
    a, b = first["seconds"], row["seconds"]
    best, middle = (math.log(a[key] / b[key]) for key in ("best", "median"))
    clear = best * middle > 0 and abs(best) > math.log1p(least)  # what is typical changed the same way
    return clear and differ(a["samples"], b["samples"]) < CHANCE
