"""Profiles and comparisons as text: with colours and lines in a terminal, plain ASCII in a pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..report import units
from ..report.rows import NOISY, beyond_limit
from .cases import Row as PlannedRow
from .compare import describe, noise_of
from .sweep import Watch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 100  # of a pipe, where COLUMNS does not say
DRIFTED = 0.05
BAR = 15  # characters
ONLY_NAMED = 5  # rows that only one file has

Row = dict[str, Any]
T = TypeVar("T")


class Column(NamedTuple):
    title: str
    cell: Callable[[Row], str]
    rank: int = 0  # columns of the highest rank go first where there is no room; those of 0 stay
    left: bool = False
    style: str | None = None


def giga(rate: float) -> str:
    return units.number(rate / 1e9)


# --- tables -----------------------------------------------------------------------------------------------------------


@contextmanager
def console() -> Iterator[Console]:
    """Where to print: a terminal as it is, or a pipe, whose lines end with their last character."""
    from rich.console import Console

    if sys.stdout.isatty():
        yield Console(highlight=False, markup=False, emoji=False)
        return
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else PIPE_WIDTH
    text = io.StringIO()
    yield Console(file=text, width=width, highlight=False, markup=False, emoji=False, force_terminal=False)
    for line in text.getvalue().splitlines():
        print(line.rstrip())


def print_table(console: Console, title: str, columns: Iterable[Column], rows: Sequence[Row]) -> None:
    """The table with as many of its columns as there is room for, and without those that say nothing."""
    from rich.measure import Measurement

    kept = [column for column in columns if any(column.cell(row) != units.ABSENT for row in rows)]
    wide = console.options.update(width=10_000)
    while True:
        table = _table(console, kept, rows)
        worst = max(kept, key=lambda column: column.rank)
        if worst.rank == 0 or Measurement.get(console, wide, table).maximum <= console.width:
            break
        kept.remove(worst)
    console.print()
    console.print(title, style="bold")
    console.print(table)


def _table(console: Console, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table

    lines = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(
        box=lines, pad_edge=False, show_edge=False, header_style="bold" if console.is_terminal else "", padding=(0, 1)
    )
    for column in columns:
        table.add_column(column.title, justify="left" if column.left else "right", style=column.style, overflow="fold")
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


# --- a profile --------------------------------------------------------------------------------------------------------

TIME = Column("time", lambda row: units.duration(row["seconds"]["best"]), style="bold")
NAME = [Column("name", lambda row: row["name"], left=True), TIME]
WAY = [
    Column("dtype", lambda row: row["dtype"], left=True),
    Column("isa", lambda row: row["isa"], left=True),
    Column("threads", lambda row: str(row["threads"])),
    TIME,
]
FIGURES = [
    Column("p90", lambda row: slowest_tenth(row), 3),
    Column("GFLOP/s", lambda row: giga(row["flops_rate"]), 1),
    Column("GB/s", lambda row: giga(row["bytes_rate"]), 2),
    Column("share", lambda row: f"{row['share']:.0%}", style="cyan"),
    Column("limit", lambda row: row["limit"], 1, left=True),
]
DETAILS = [
    Column("most in", lambda row: longest_phase(row), 4, left=True),
    Column("route", lambda row: row["route"], 5, left=True),
    Column("problem", lambda row: " ".join(row["problem"].split()[1:]), 6, left=True),
    Column("what it stands for", lambda row: row["what"], 7, left=True),
]
TITLES = {
    "table": "Workloads",
    "sequence": "Growing lengths",
    "threads": "Growing numbers of threads",
    "heads": "Growing numbers of heads",
}


def way(row: Row) -> str:
    return f"{row['dtype']} on {row['isa']}, {units.plural(row['threads'], 'thread')}"


def show_profile(console: Console, document: dict[str, Any]) -> None:
    show_machine(console, document["machine"])
    show_limits(console, document["limits"])
    for series, rows in _grouped(document["rows"], lambda row: row["series"]).items():
        if series == "threads":
            for table in _grouped(rows, lambda row: (row["name"], row["dtype"], row["isa"])).values():
                show_threads(console, table)
            continue
        ways, names = _grouped(rows, way), _grouped(rows, lambda row: row["name"])
        if series == "heads":
            for title, table in ways.items():
                show_heads(console, f"{TITLES[series]}: {title}", table)
        elif series == "table" and len(ways) > len(names):  # few problems in many ways
            for title, table in names.items():
                print_table(console, title, WAY + FIGURES + DETAILS, table)
        else:
            for title, table in ways.items():
                print_table(console, f"{TITLES.get(series, series)}: {title}", NAME + FIGURES + DETAILS, table)
    show_notes(console, document)


def _grouped(rows: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def show_machine(console: Console, machine: dict[str, Any]) -> None:
    facts = [machine["cpu"], units.plural(machine["cpus"], "CPU")]
    if machine.get("cores"):
        facts.append(units.plural(machine["cores"], "core"))
    if machine.get("numa_nodes", 1) > 1:
        facts.append(units.plural(machine["numa_nodes"], "NUMA node"))
    for level in (1, 2, 3):
        if machine.get(f"l{level}_bytes"):
            facts.append(f"L{level} {units.size(machine[f'l{level}_bytes'])}")
    if machine.get("memory_bytes"):
        facts.append(f"{units.size(machine['memory_bytes'])} of memory")
    console.print(f"{', '.join(facts)}. manyhead {machine['version']}.")


def show_limits(console: Console, limits: dict[str, Any]) -> None:
    kinds = list(dict.fromkeys(entry["dtype"] for entry in limits["arithmetic"]))
    counts = sorted({entry["threads"] for entry in limits["read"]})
    outer = {counts[0], counts[-1]} if counts else set()
    columns = [
        Column("isa", lambda row: row["isa"], left=True),
        Column("threads", lambda row: str(row["threads"])),
        *(_rate_column(kind, kind) for kind in kinds),
    ]
    rates = _grouped(limits["arithmetic"], lambda entry: (entry["isa"], entry["threads"]))
    rows = [
        {"isa": isa, "threads": number} | {entry["dtype"]: entry["rate"] for entry in entries}
        for (isa, number), entries in rates.items()
        if number in outer
    ]
    if rows:
        print_table(console, "What this machine can do: multiply-adds, GFLOP/s", columns, rows)
    columns = [Column("where", lambda row: row["level"], left=True), Column("bytes", lambda row: row["size"])]
    columns += [_rate_column(str(n), units.plural(n, "thread"), 0 if n in outer else i) for i, n in enumerate(counts)]
    levels = _grouped(limits["read"], lambda entry: entry["level"])
    rows = [
        {"level": level, "size": units.size(entries[0]["bytes"])}
        | {str(entry["threads"]): entry["rate"] for entry in entries}
        for level, entries in levels.items()
    ]
    if rows:
        print_table(console, "What this machine can do: reading, GB/s", columns, rows)


def _rate_column(key: str, title: str, rank: int = 0) -> Column:
    return Column(title, lambda row: giga(row[key]) if key in row else units.ABSENT, rank)


def show_threads(console: Console, rows: list[Row]) -> None:
    first = rows[0]
    one = first["seconds"]["best"] * first["threads"]
    columns = [
        Column("threads", lambda row: str(row["threads"])),
        TIME,
        Column("speed-up", lambda row: f"{one / row['seconds']['best']:.2f}"),
        Column("of ideal", lambda row: f"{one / row['seconds']['best'] / row['threads']:.0%}", 2),
    ]
    title = f"{TITLES['threads']}: {first['dtype']} on {first['isa']}, {first['what']}"
    print_table(console, title, columns + FIGURES, rows)


def show_heads(console: Console, title: str, rows: list[Row]) -> None:
    first = rows[0]
    longest = max(row["seconds"]["best"] for row in rows)
    columns = [
        Column("heads", lambda row: str(row["x"])),
        Column("of size", lambda row: _word(row, "d"), 1),
        TIME,
        Column(f"vs {first['x']}", lambda row: f"{row['seconds']['best'] / first['seconds']['best']:.2f}x"),
        Column("softmax", lambda row: f"{work(row).get('softmax', 0):.0%}" if work(row) else units.ABSENT),
        Column("", lambda row: "#" * round(BAR * row["seconds"]["best"] / longest), left=True),
    ]
    print_table(console, title, columns + FIGURES, rows)
    if len(rows) > 1:
        console.print(heads_verdict(rows))


def _word(row: Row, letter: str) -> str:
    """A number of the problem line, such as that of d64."""
    return next((word[1:] for word in row["problem"].split() if word[0] == letter and word[1:].isdecimal()), "")


def work(row: Row) -> dict[str, float]:
    """The shares of the phases in the time that the threads worked; none where they were not measured."""
    spent = {name: seconds for name, seconds in (row["phases"] or {}).items() if name != "idle"}
    total = sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()} if total else {}


def slowest_tenth(row: Row) -> str:
    times = row["seconds"]
    return f"+{times['p90'] / times['best'] - 1:.0%}" if times["runs"] > 1 else units.ABSENT


def longest_phase(row: Row) -> str:
    shares = work(row)
    return "{} {:.0%}".format(*max(shares.items(), key=itemgetter(1))) if shares else units.ABSENT


def heads_verdict(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    ratio = last["seconds"]["best"] / first["seconds"]["best"]
    said = (
        f"{last['x']} heads of {_word(last, 'd')} take {ratio:.2f} times as long as {first['x']} of {_word(first, 'd')}"
    )
    text = (
        f"Textbooks: h heads of d/h cost what one head of d costs. Here {said}. The products have as many FLOPs, "
        f"but there are {last['x'] / first['x']:g} times as many scores for the softmax"
    )
    if not (work(first) and work(last)):
        return text + "."
    return (
        text
        + f": {work(last).get('softmax', 0):.0%} of the time goes there, after {work(first).get('softmax', 0):.0%}."
    )


def show_notes(console: Console, document: dict[str, Any]) -> None:
    rows, limits = document["rows"], document["limits"]
    console.print()
    if rows:
        console.print(
            "time: the fastest run. p90: how much longer the slowest tenth takes, at least. share: of the limit, which "
            "is multiply-adds or the reading of what a call moves, from where K and V lie; whichever takes longer. "
            "overhead: a call too short for either to explain its time."
        )
    for sentence in beyond_limit(rows):
        console.print(sentence)
    notes = [(row["note"], row["name"]) for row in rows if row["note"]]
    notes += [
        (
            f"left out: {skipped['why']}",
            f"{skipped['name']} ({skipped['dtype']}, {units.plural(skipped['threads'], 'thread')})",
        )
        for skipped in document.get("skipped", [])
    ]
    print_notes(console, notes)
    if not limits.get("clock"):
        return
    clock = limits["clock"]
    waited = f"; threads waited for a CPU {limits['waited']:.0%} of the time" if limits.get("waited") else ""
    console.print(
        f"The clock was between {giga(clock['least'])} and {giga(clock['most'])} GHz "
        f"({limits['drift']:+.0%} from first to last). "
        f"Work usually took up to {limits['noise']:.0%} longer than in its best moment{waited}. "
        f"{units.plural(len(rows), 'row')} in {units.duration(document['seconds'])}."
    )
    warn_of_noise(console, limits)


def print_notes(console: Console, notes: Iterable[tuple[str, str]]) -> None:
    """Each note once, behind the names of all that it is about."""
    for note, pairs in _grouped(notes, itemgetter(0)).items():
        console.print(f"{', '.join(dict.fromkeys(name for _, name in pairs))}: {note}.")


def warn_of_noise(console: Console, limits: dict[str, Any]) -> None:
    if limits["noise"] > NOISY or abs(limits["drift"]) > DRIFTED:
        console.print(
            "Warning: the machine was not steady while this ran, so differences of such a size mean nothing. "
            "Close what else runs, and measure again.",
            style="yellow",
        )


# --- what would run ---------------------------------------------------------------------------------------------------


def show_plan(console: Console, rows: Sequence[PlannedRow], seconds: Sequence[float]) -> None:
    table = [{"row": row, "seconds": time} for row, time in zip(rows, seconds, strict=True)]
    columns = [
        Column("name", lambda row: row["row"].case.name, left=True),
        Column("dtype", lambda row: row["row"].dtype, left=True),
        Column("isa", lambda row: row["row"].isa, left=True),
        Column("threads", lambda row: str(row["row"].threads)),
        Column("problem", lambda row: " ".join(row["row"].line.split()[1:]), 1, left=True),
        Column("takes", lambda row: units.duration(row["seconds"]) if row["seconds"] else "left out", 2),
        Column("what it stands for", lambda row: row["row"].case.what, 3, left=True),
    ]
    print_table(console, "What would be measured", columns, table)
    console.print(f"\n{units.plural(len(rows), 'row')}, about {units.duration(sum(seconds))} in all.")


# --- a comparison -----------------------------------------------------------------------------------------------------


def show_comparison(console: Console, comparison: dict[str, Any]) -> None:
    documents, rows = comparison["documents"], comparison["rows"]
    letters = _letters(len(documents))
    noisy: list[str] = []
    for letter, entry in zip(letters, documents, strict=True):
        document = entry["document"]
        machine = document["machine"]
        unfinished = "" if document["complete"] else ", interrupted"
        if noise_of(document) > NOISY:
            noisy.append(f"{letter} ({noise_of(document):.0%})")
        console.print(
            f"{letter}  {entry['label']}: {machine.get('cpu', 'an unknown CPU')}, manyhead {document['manyhead']}, "
            f"{units.date(document['created'])}{unfinished}"
        )
    shared = [row for row in rows if sum(time is not None for time in row["seconds"]) > 1]
    if shared:
        print_table(console, "Times, and how many times faster than A", _comparison_columns(letters), shared)
        means = zip(letters[1:], comparison["geomean"][1:], strict=True)
        texts = [f"{letter} {mean:.3f}" for letter, mean in means if mean is not None]
        console.print(f"\nGeometric mean: {', '.join(texts) or units.ABSENT}.")
        console.print(
            "Above 1 is faster than A. * is significant: more than 2 %, more than the noise of either file, in the "
            "fastest and in the median run, and unlikely (p < 0.01) by chance."
        )
    else:
        console.print("\nNo row is in more than one of them: they measured different problems.")
    if noisy:
        console.print(f"Warning: the machine was not steady during {', '.join(noisy)}: measure again.", style="yellow")
    for i, letter in enumerate(letters):
        only = [row for row in rows if row["seconds"][i] is not None and row not in shared]
        if only:
            named = "; ".join(describe(row) for row in only[:ONLY_NAMED])
            more = f"; and {len(only) - ONLY_NAMED} more" if len(only) > ONLY_NAMED else ""
            console.print(f"Only in {letter}: {named}{more}.")


def _letters(number: int) -> list[str]:
    """A, B, ..., Z, 27, 28, ..."""
    return [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(number)]


def _comparison_columns(letters: Sequence[str]) -> list[Column]:
    def time(i: int) -> Column:
        return Column(
            letters[i],
            lambda row: units.ABSENT if row["seconds"][i] is None else units.duration(row["seconds"][i]),
            1 if i == 0 else 2,
        )

    def ratio(i: int) -> Column:
        def cell(row: Row) -> str:
            ratio = row["ratios"][i]
            return f"{units.ABSENT} " if ratio is None else f"{ratio:.2f}{'*' if row['significant'][i] else ' '}"

        return Column(f"A/{letters[i]} ", cell, style="bold")

    def word(key: str) -> Column:
        return Column(key, lambda row: str(row[key]), left=key != "threads")

    columns = [word(key) for key in ("name", "dtype", "isa", "threads")]
    columns += [time(i) for i in range(len(letters))]
    return columns + [ratio(i) for i in range(1, len(letters))]


# --- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def progress(first: str = "the machine") -> Iterator[Watch]:
    """A bar with the time left on stderr, where that is a terminal and rich is there, which not every command needs;
    `first` is what it says at first."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield Watch()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column as Cell

    bar = Progress(
        BarColumn(20),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=Cell(no_wrap=True, overflow="ellipsis"), markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(first, total=None)
        yield Watch(
            plan=lambda seconds: bar.reset(task, total=seconds),
            now=lambda what: bar.update(task, description=what),
            done=lambda seconds: bar.advance(task, seconds),
        )
