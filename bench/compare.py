"""Compares two measurements: JSON files of bench (--benchmark_out) or of peers.py (--json), row by row.

    python compare.py OLD NEW [--threshold 0.05] [--filter REGEX]

OLD and NEW are each a file or a folder of files: of several runs (alternated with the other side's, as a noisy machine
needs it) and of several repetitions in a run the fastest counts. The ratio is old time / new time: above 1 is faster.
`machine` is the same ratio for the machine itself, the multiply-add rate measured beside the rows: where it is far from
1, the two sides did not see the same machine. Exit status 1 when a row is slower by more than the threshold.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Row(NamedTuple):
    seconds: float
    peak: float | None  # FLOP/s of the machine beside it


def rows_of(document: dict[str, Any]) -> list[tuple[str, Row]]:
    if document.get("kind") == "peers":
        return [
            (row["name"], Row(row["results"]["manyhead"]["seconds"], row["probe"]["fma"] * 1e9))
            for row in document["rows"]
            if "manyhead" in row["results"]
        ]
    return [
        (b["run_name"].removesuffix("/real_time"), Row(b["real_time"] * SECONDS[b["time_unit"]], b.get("FMA_peak")))
        for b in document["benchmarks"]
        if b["run_type"] == "iteration" and not b.get("error_occurred")
    ]


def load(path: Path) -> dict[str, Row]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise SystemExit(f"compare.py: no .json files in {path}")
    best: dict[str, Row] = {}
    for file in files:
        for name, row in rows_of(json.loads(file.read_text())):
            if name not in best or row.seconds < best[name].seconds:
                best[name] = row
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05, help="share by which a row may be slower")
    parser.add_argument("--filter", default="", help="only rows that match this regular expression")
    options = parser.parse_args()
    old, new = load(options.old), load(options.new)
    names = [n for n in old if n in new and re.search(options.filter, n)]
    if not names:
        print("no row is in both", file=sys.stderr)
        return 2
    width = max(map(len, names))
    print(f"{'row':{width}}  {'old us':>10}  {'new us':>10}  {'ratio':>6}  {'machine':>7}")
    ratios, slower = [], []
    for name in names:
        a, b = old[name], new[name]
        ratio = a.seconds / b.seconds
        machine = f"{b.peak / a.peak:7.2f}" if a.peak and b.peak else f"{'-':>7}"
        mark = ""
        if ratio < 1 / (1 + options.threshold):
            slower.append(name)
            mark = "  slower"
        elif ratio > 1 + options.threshold:
            mark = "  faster"
        ratios.append(ratio)
        print(f"{name:{width}}  {a.seconds * 1e6:10.2f}  {b.seconds * 1e6:10.2f}  {ratio:6.3f}  {machine}{mark}")
    mean = statistics.geometric_mean(ratios)
    print(f"\n{len(names)} rows, geometric mean {mean:.3f}, slower by more than {options.threshold:.0%}: {len(slower)}")
    for side, only in (("old", set(old) - set(new)), ("new", set(new) - set(old))):
        only = {n for n in only if re.search(options.filter, n)}
        if only:
            print(f"only in {side}: {len(only)} rows, e.g. {min(only)}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
