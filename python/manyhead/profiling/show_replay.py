"""A replay as text; the console and its tables are those of show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..report import units
from .replay import isas_differ
from .show import Column, print_notes, print_table, warn_of_noise

if TYPE_CHECKING:
    from rich.console import Console


def _logged(key: str) -> Column:
    return Column(f"logged {key}", lambda row: units.duration(row["logged"] and row["logged"][key]))


COLUMNS = [
    Column("share", lambda row: units.percent(row["share"])),
    Column("calls", lambda row: f"{row['calls']:,}"),
    _logged("median"),
    _logged("best")._replace(rank=2),
    Column("now", lambda row: units.duration(row["now"] and row["now"]["median"]), style="bold"),
    Column("best now", lambda row: units.duration(row["now"] and row["now"]["best"]), 3),
    Column("ratio", lambda row: units.ABSENT if row["ratio"] is None else f"{row['ratio']:.2f}"),
    Column("threads", lambda row: str(row["threads"]), 1),
    Column("problem", lambda row: row["problem"], left=True),
]


def show_replay(console: Console, document: dict[str, Any]) -> None:
    rows = document["rows"]
    print_table(console, f"Replay of {', '.join(document['files'])}", COLUMNS, rows)
    console.print()
    console.print(_total(document))
    if document["compared"]:
        console.print(
            "share: of the logged time. now: the median, back to back with warm caches, which calls in a program may "
            "not find. ratio: logged median over that; above 1 is faster now. The total has all calls, first ones too."
        )
    if different := isas_differ(rows):
        console.print(different)
    print_notes(console, [(note, row["problem"]) for row in rows for note in row["notes"]])
    for kind, count in document["others"].items():
        lines = units.plural(count, "line")
        console.print(f"{lines} of {kind or 'comments'} not replayed" + (_attention(kind)))
    if document["limits"]:
        warn_of_noise(console, document["limits"])


def _attention(kind: str) -> str:
    return ": the attention inside has lines of its own." if kind == "layer" else "."


def _total(document: dict[str, Any]) -> str:
    text = f"{units.plural(document['calls'], 'call')} in the log"
    replayed = sum(row["calls"] for row in document["rows"] if row["now"])
    if replayed < document["calls"]:
        text += f", {replayed:,} of them replayed"
    if not document["logged"]:
        return f"{text}; it has no times."
    text += f": {units.duration(document['logged'])} as logged"
    if not document["compared"]:
        return f"{text}."
    if document["compared"] < 0.9999 * document["logged"]:
        text += f", {units.duration(document['compared'])} without what was not replayed"
    ratio = document["compared"] / document["replayed"]
    return f"{text}, {units.duration(document['replayed'])} now: ratio {ratio:.2f}."
