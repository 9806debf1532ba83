"""Explanations and their table as text; the console and its tables are those of show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..report import units
from ..report.phases import PHASES
from .explain import HOLDS, QUIET, Explanation
from .show import Column, giga, print_table

if TYPE_CHECKING:
    from rich.console import Console


def show_explanation(console: Console, found: Explanation) -> None:
    console.print(found["problem"], style="bold")
    _print_pairs(console, found["words"])
    predicted, measured = found["predicted"], found["measured"]
    if predicted:
        _show_terms(console, found)
        rates = found["rates"]
        console.print()
        time = predicted["seconds"]
        threads = units.plural(found["threads"], "thread")
        lines = [
            (
                "predicted",
                f"{units.duration(time)} on {threads}: {giga(found['plan']['flops'] / time)} GFLOP/s, "
                f"{giga(found['plan']['bytes'] / time)} GB/s",
            ),
            ("binds", _limit(predicted["limit"])),
            (
                "rates",
                f"{giga(rates['arithmetic'])} GFLOP/s of multiply-adds, {giga(rates['clock'])} GHz, "
                f"{giga(rates['read'])} GB/s of reading {units.size(rates['moved'])} again and again "
                f"({rates['level']}); {rates['origin']}",
            ),
        ]
        if measured:
            best = f"{units.duration(measured['best'])}, the fastest of {units.plural(measured['runs'], 'run')}"
            lines.insert(1, ("measured", f"{best}; median {units.duration(measured['median'])}"))
            lines.insert(2, ("ratio", f"{found['ratio']:.2f}, predicted over measured{_verdict(found)}"))
        _print_pairs(console, lines)
    if found["advice"]:
        console.print()
        for sentence in found["advice"]:
            console.print(sentence)


def _print_pairs(console: Console, pairs: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, text in pairs:
        grid.add_row(name, text)
    console.print(grid)


def _limit(limit: str) -> str:
    if limit.startswith("read"):
        level = limit.partition(" ")[2]
        return f"reading from {level if level != 'memory' else 'memory, beyond the caches'}"
    return {
        "arithmetic": "the multiply-adds of the two products",
        "softmax": "the softmax: an exponential for each score",
        "masks": "masks and biases: passes over the scores",
        "weights": "the second pass",
        "overhead": "what is neither products nor softmax: bringing Q, K and V into order, storing, the call",
    }[limit]


def _holds(found: Explanation) -> bool:
    return bool(1 / (1 + HOLDS) <= found["ratio"] <= 1 + HOLDS)


def _verdict(found: Explanation) -> str:
    said = "" if _holds(found) else f": not within {HOLDS:.0%}"
    return said if found["measured"]["quiet"] else f"{said}; the machine was not quiet"


def _show_terms(console: Console, found: Explanation) -> None:
    terms, total = found["predicted"]["terms"], found["predicted"]["seconds"]
    phases = found["measured"]["phases"] if found["measured"] else None
    rows: list[dict[str, Any]] = [
        {
            "label": phase.words + (f" from {found['rates']['level']}" if key == "read" else ""),
            "predicted": terms.get(key),
            "measured": (phases or {}).get(key),
        }
        for key, phase in PHASES.items()
        if terms.get(key) or (phases or {}).get(key)
    ]
    columns = [
        Column("a thread's time", lambda row: row["label"], left=True),
        Column("predicted", lambda row: units.duration(row["predicted"])),
        Column("share", lambda row: units.percent(row["predicted"] and row["predicted"] / total)),
    ]
    if phases:
        columns.append(Column("measured", lambda row: units.duration(row["measured"])))
    print_table(console, "Where the time goes", columns, rows)
    console.print(
        "Reading goes on beside the rest, so shares add up to more than 100%."
        + (" Measured phases include waiting for what is read." if phases else "")
    )


def show_table(console: Console, found: Sequence[Explanation]) -> None:
    measured = [row for row in found if row["measured"]]
    columns = [
        Column("name", lambda row: row["name"], left=True),
        Column("predicted", lambda row: units.duration(row["predicted"]["seconds"])),
        Column("measured", lambda row: units.duration(row["measured"] and row["measured"]["best"])),
        Column("ratio", lambda row: _ratio(row), style="bold"),
        Column("binds", lambda row: row["predicted"]["limit"], left=True),
        Column("threads", lambda row: str(row["threads"]), 1),
        Column("route", lambda row: row["route"], 2, left=True),
        Column("problem", lambda row: row["problem"], 3, left=True),
    ]
    first = found[0]
    title = f"Predicted and measured: {first['problem'].split()[0]} on {first['isa']}"
    print_table(console, title, columns, found)
    quiet = [row for row in measured if row["measured"]["quiet"]]
    good = [row for row in quiet if _holds(row)]
    console.print(
        f"\n{len(good)} of {units.plural(len(quiet), 'row')} within {HOLDS:.0%}; * marks the others. "
        "ratio: predicted over measured, the fastest run."
    )
    if len(quiet) < len(measured):
        console.print(
            f"? marks {units.plural(len(measured) - len(quiet), 'row')} more, during which the machine was not quiet: "
            f"in most rounds rates or times were below {QUIET:.0%} of their best, so these ratios say little."
        )
    missing = [row["name"] for row in found if not row["measured"]]
    if missing:
        console.print(f"Not run, because their tensors take more than half of the free memory: {', '.join(missing)}.")


def _ratio(row: Explanation) -> str:
    if not row["measured"]:
        return f"{units.ABSENT} "
    mark = "?" if not row["measured"]["quiet"] else " " if _holds(row) else "*"
    return f"{row['ratio']:.2f}{mark}"
