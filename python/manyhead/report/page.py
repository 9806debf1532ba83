"""The pages: what stands on them, from a profile's document or a comparison of several. templates/ says how it looks.

A page is one file that asks the network for nothing, so that it can be mailed, archived and opened years later; its
content security policy makes the browser hold it to that. The price is its size: plotly's script is 4.8 MB and is
inside each page, once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .._user import need, write_text
from . import charts, units
from .charts import Figure
from .roofline import KIND_COLOURS, has_place, roofline
from .rows import NOISY, Row, best, beyond_limit, commonest_threads, curves, kind, of_series

TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class Cell:
    text: str
    detail: str = ""  # a smaller line below
    share: float | None = None  # drawn as a bar behind the text
    mood: str = ""  # "faster" or "slower"


@dataclass
class Column:
    title: str
    cell: Callable[[Any], Cell | str]
    numeric: bool = True
    wraps: bool = False


@dataclass
class Table:
    """The first column names the row."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]]
    folded: bool = False


@dataclass
class Chart:
    name: str
    summary: str  # for those who cannot see it
    figure: str  # JSON


@dataclass
class Section:
    name: str
    title: str
    text: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def table(caption: str, columns: list[Column], rows: Iterable[Any], folded: bool = False) -> Table:
    cells = [[column.cell(row) for column in columns] for row in rows]
    return Table(caption, columns, [[Cell(c) if isinstance(c, str) else c for c in row] for row in cells], folded)


def chart(name: str, figure: Figure, summary: str) -> Chart:
    return Chart(name, summary, figure.to_json())


# --- a profile -----------------------------------------------------------------------------------------------------


def _cpu(document: dict[str, Any]) -> str:
    return document.get("machine", {}).get("cpu") or "an unknown CPU"


def _spread(row: Row) -> str:
    seconds = row["seconds"]
    return f"+{units.percent(seconds['p90'] / seconds['best'] - 1)}" if seconds["runs"] > 1 else units.ABSENT


NAME = Column(
    "workload",
    lambda row: Cell(row["name"], "; ".join(filter(None, (row.get("what"), row.get("note"))))),
    numeric=False,
)
TIME = Column("time", lambda row: units.duration(best(row)))
SPREAD = Column("spread", _spread)
SPEED = Column("GFLOP/s", lambda row: units.number(row["flops_rate"] / 1e9))
DTYPE = Column("dtype", lambda row: row["dtype"], numeric=False)
# What is wide or often the same in each row stands last: a phone shows the first few columns.
HOW = [
    Column("ISA", lambda row: row["isa"], numeric=False),
    Column("threads", lambda row: str(row["threads"])),
    Column("problem", lambda row: row["problem"], numeric=False, wraps=True),
]
LIMIT = [
    Column("GB/s", lambda row: units.number(row["bytes_rate"] / 1e9)),
    Column("of limit", lambda row: Cell(units.percent(row.get("share")), share=row.get("share"))),
    Column("limit", lambda row: row.get("limit") or units.ABSENT, numeric=False),
]
RESULT = [TIME, SPREAD, SPEED, *LIMIT]


def _on_axis(title: str) -> Column:
    return Column(title, lambda row: f"{row['x']:g}")


def _phase_columns(rows: list[Row]) -> list[Column]:
    def column(name: str) -> Column:
        return Column(
            charts.phase_title(name),
            lambda row: units.percent(charts.phase_share(row, name)) if row["phases"] else units.ABSENT,
        )

    return [column(name) for name in charts.shown_phases(rows)]


def _roofline(document: dict[str, Any]) -> list[Section]:
    rows = list(filter(has_place, of_series(document["rows"], "table")))
    if not rows:
        return []
    fastest = max(rows, key=lambda row: row["flops_rate"])
    limits = document.get("limits", {})
    text = [
        "Each point is a workload: how much arithmetic it does for each byte of its tensors, and how fast it ran. "
        "Sloping lines are what the machine can read, level ones what it can compute"
        f", with {units.plural(commonest_threads(rows) or 1, 'thread')}."
        if limits.get("arithmetic") or limits.get("read")
        else "The limits of the machine were not measured, so the points stand without a roof."
    ]
    summary = (
        f"Roofline, both axes logarithmic: {units.plural(len(rows), 'point')} of speed over arithmetic intensity. "
        f"The fastest is {fastest['name']} ({fastest['problem']}) with {units.rate(fastest['flops_rate'], 'FLOP/s')}. "
        "The table of workloads has the same figures."
    )
    return [Section("roofline", "Roofline", text, [chart("roofline", roofline(rows, limits), summary)])]


def _workloads(document: dict[str, Any]) -> list[Section]:
    rows = of_series(document["rows"], "table")
    if not rows:
        return []
    text = ["Time is the best run's. Spread is how much longer one run in ten took.", *beyond_limit(rows)]
    workloads = table("Workloads", [NAME, DTYPE, *RESULT, *HOW], rows)
    return [Section("workloads", "Workloads", text, tables=[workloads])]


def _phases(document: dict[str, Any]) -> list[Section]:
    rows = [row for row in of_series(document["rows"], "table") if row["phases"]]
    if not charts.shown_phases(rows):
        return []
    return [
        Section(
            "phases",
            "Where the time goes",
            ["The time of all threads together, from one run with clocks inside. Idle is waiting for the others."],
            [
                chart(
                    "phases",
                    charts.phases(rows),
                    f"Stacked bars, one for each of {units.plural(len(rows), 'workload')}: the shares of the phases. "
                    "The table below the chart has the same figures.",
                )
            ],
            tables=[table("Shares of the phases", [NAME, DTYPE, *_phase_columns(rows), *HOW], rows, folded=True)],
        )
    ]


def _sequence(document: dict[str, Any]) -> list[Section]:
    rows = of_series(document["rows"], "sequence")
    if not rows:
        return []
    summary = (
        f"Lines: speed in GFLOP/s over sequence lengths from {rows[0]['x']:g} to {rows[-1]['x']:g}. "
        "The table below the chart has the same figures."
    )
    return [
        Section(
            "sequence",
            "Speed over sequence length",
            charts=[chart("sequence", charts.sequence(rows), summary)],
            tables=[table("Speed over sequence length", [_on_axis("length"), DTYPE, *RESULT, *HOW], rows, folded=True)],
        )
    ]


def _threads(document: dict[str, Any]) -> list[Section]:
    rows = of_series(document["rows"], "threads")
    if not rows:
        return []
    first = {id(row): best(group[0]) for group in curves(rows, "threads").values() for row in group}
    faster = Column("speed-up", lambda row: f"{units.number(first[id(row)] / best(row))}x")
    most = max(first[id(row)] / best(row) for row in rows)
    summary = (
        f"Lines: speed-up over threads from {rows[0]['x']:g} to {rows[-1]['x']:g}; the best is "
        f"{units.number(most)} times. The table below the chart has the same figures."
    )
    columns = [_on_axis("threads"), DTYPE, TIME, faster, SPREAD, SPEED, *LIMIT, *HOW]
    several = rows[0]["x"] < rows[-1]["x"]  # a chart of one number of threads would be a dot
    return [
        Section(
            "threads",
            "Thread scaling",
            charts=[chart("threads", charts.threads(rows), summary)] if several else [],
            tables=[table("Thread scaling", columns, rows, folded=several)],
        )
    ]


def _heads(document: dict[str, Any]) -> list[Section]:
    rows = of_series(document["rows"], "heads")
    if not rows:
        return []
    sections = []
    found = curves(rows, "heads")
    for index, (label, group) in enumerate(found.items()):
        alone = len(found) == 1
        title, here = ("Number of heads", f"Here: {label}. ") if alone else (f"Number of heads: {label}", "")
        one = best(group[0])
        worst = max(group, key=best)
        relative = Column("relative", lambda row, one=one: f"{units.number(best(row) / one)}x")  # type: ignore[misc]
        columns = [_on_axis("heads"), TIME, relative, SPREAD, SPEED, *_phase_columns(group), *HOW]
        summary = (
            f"Bars: time over the number of heads for {label}. The slowest, {worst['x']:g} heads, takes "
            f"{units.number(best(worst) / one)} times as long as {group[0]['x']:g}. The table has the same figures."
        )
        sections.append(
            Section(
                f"heads-{index}",
                title,
                [
                    "The same width cut into more heads: h heads of d/h do the same arithmetic as one head of d. "
                    f"{here}Relative is to the time of the first row."
                ],
                [chart(f"heads-{index}", charts.heads(group), summary)],
                tables=[table(title, columns, group)],
            )
        )
    return sections


def _counters(document: dict[str, Any]) -> list[Section]:
    rows = [row for row in of_series(document["rows"], "table") if row.get("counters")]
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row["counters"]))
    notes = dict.fromkeys(f"Note: {row['counters_note']}." for row in rows if row.get("counters_note"))
    columns = [
        Column(name.replace("_", " "), lambda row, name=name: units.rate(row["counters"].get(name), ""))  # type: ignore[misc]
        for name in names
    ]
    return [
        Section(
            "counters",
            "Hardware counters",
            ["Of one run of each workload.", *notes],
            tables=[table("Hardware counters", [NAME, DTYPE, *columns, *HOW], rows)],
        )
    ]


def _skipped(document: dict[str, Any]) -> list[Section]:
    if not document.get("skipped"):
        return []
    columns = [
        Column("workload", lambda case: case["name"], numeric=False),
        DTYPE,
        Column("why", lambda case: case["why"], numeric=False),
        *HOW,
    ]
    return [Section("skipped", "Left out", tables=[table("Left out", columns, document["skipped"])])]


def facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of the machine and of the run, in words."""
    machine, limits = document.get("machine", {}), document.get("limits", {})
    clock = limits.get("clock") or {}
    isas = machine.get("isas") or {}
    entries = [
        ("CPU", machine.get("cpu")),
        ("instruction set", machine.get("isa")),
        ("also runs", ", ".join(name for name, runs in isas.items() if runs and name != machine.get("isa"))),
        ("not on this CPU", ", ".join(name for name, runs in isas.items() if not runs)),
        ("cores", machine.get("cores")),
        ("CPUs", machine.get("cpus")),
        ("threads", machine.get("threads")),
        ("NUMA nodes", machine.get("numa_nodes")),
        *((f"L{level} cache", _size(machine.get(f"l{level}_bytes"))) for level in (1, 2, 3)),
        ("memory", _size(machine.get("memory_bytes"))),
        ("operating system", machine.get("os")),
        ("clock", _clock(clock)),
        ("noise of the machine", units.percent(limits["noise"]) if units.known(limits.get("noise")) else None),
        ("manyhead", document.get("manyhead")),
        ("measured", f"{units.date(document.get('created'))}, in {units.duration(document.get('seconds'))}"),
        ("arguments", shlex.join(document.get("arguments") or [])),
    ]
    return [(term, str(value)) for term, value in entries if value]


def _size(count: float | None) -> str | None:
    return units.size(count) if count else None


def _clock(clock: dict[str, float]) -> str | None:
    if not units.known(clock.get("first")):
        return None
    least, most = units.rate(clock["least"], "Hz"), units.rate(clock["most"], "Hz")
    return most if least == most else f"{least} to {most}"


def _machine(document: dict[str, Any]) -> list[Section]:
    limits = document.get("limits", {})
    section = Section("machine", "The machine", facts=facts(document))
    arithmetic = [
        Column("ISA", lambda limit: limit["isa"], numeric=False),
        Column("dtype", lambda limit: limit["dtype"], numeric=False),
        Column("threads", lambda limit: str(limit["threads"])),
        Column("GFLOP/s", lambda limit: units.number(limit["rate"] / 1e9)),
    ]
    read = [
        Column("level", lambda limit: limit["level"], numeric=False),
        Column("block", lambda limit: units.size(limit["bytes"])),
        Column("threads", lambda limit: str(limit["threads"])),
        Column("GB/s", lambda limit: units.number(limit["rate"] / 1e9)),
    ]
    if limits.get("arithmetic"):
        section.tables.append(table("Multiply-adds in registers", arithmetic, limits["arithmetic"]))
    if limits.get("read"):
        section.tables.append(table("Reading", read, limits["read"]))
    if not section.tables:
        section.text.append("Its limits were not measured.")
    return [section]


def _notices(document: dict[str, Any], whose: str = "This profile") -> list[str]:
    notices = []
    if not document.get("complete", True):
        notices.append(f"{whose} is incomplete: the run was interrupted, and what it had not reached is missing.")
    noise = document.get("limits", {}).get("noise")
    if units.known(noise) and noise >= NOISY:
        notices.append(
            f"{whose} comes from a noisy machine: the same short work took {units.percent(noise)} longer at times."
        )
    return notices


def _tiles(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = of_series(document["rows"], "table")
    tiles = []
    if rows:
        fastest = max(rows, key=lambda row: row["flops_rate"])
        tiles.append(("fastest", units.rate(fastest["flops_rate"], "FLOP/s"), fastest["name"]))
    for of_kind in KIND_COLOURS:
        shares = [row["share"] for row in rows if kind(row) == of_kind and units.known(row.get("share"))]
        if shares:
            tiles.append((of_kind, units.percent(median(shares)), "of the limit, median"))
    return tiles


# Each gives its sections, none where the document has nothing for it, and what is then said to be missing.
PARTS: list[tuple[Callable[[dict[str, Any]], list[Section]], str]] = [
    (_roofline, ""),
    (_workloads, "the table of workloads"),
    (_phases, "phases"),
    (_sequence, "sequence lengths"),
    (_threads, "thread scaling"),
    (_heads, "the number of heads"),
    (_counters, "hardware counters"),
    (_skipped, ""),
    (_machine, ""),
]


def write_profile_page(document: dict[str, Any], path: Path) -> None:
    """Writes the page of one profile."""
    found = [(part(document), words) for part, words in PARTS]
    missing = [words for sections, words in found if words and not sections]
    _write(
        path,
        title=f"manyhead on {_cpu(document)}, {units.date(document.get('created'))}",
        heading=_cpu(document),
        subtitle=f"manyhead {document.get('manyhead', '')} profile, {units.date(document.get('created'))}",
        notices=_notices(document),
        tiles=_tiles(document),
        sections=[section for sections, _ in found for section in sections],
        closing=f"Not measured in this run: {', '.join(missing)}." if missing else "",
    )


# --- a comparison --------------------------------------------------------------------------------------------------


def _ratio_cell(row: Row, index: int) -> Cell:
    ratio, significant = row["ratios"][index], row["significant"][index]
    if not units.known(ratio):
        return Cell(units.ABSENT)
    text = f"{units.number(ratio)}x"
    if not significant:
        return Cell(f"({text})")
    return Cell(text, mood="faster" if ratio > 1 else "slower")


def _compared(comparison: dict[str, Any], names: list[str]) -> list[Section]:
    rows = comparison["rows"]
    if not rows:
        return [Section("workloads", "Workloads", ["The documents have no workload in common."])]
    columns = [Column("workload", lambda row: row["name"], numeric=False), DTYPE]
    for index, name in enumerate(names):
        columns.append(Column(name, lambda row, index=index: units.duration(row["seconds"][index])))  # type: ignore[misc]
        if index:
            columns.append(Column("speed", lambda row, index=index: _ratio_cell(row, index)))  # type: ignore[misc]
    columns += HOW
    note = f"Speed is a multiple of that of {names[0]}; in brackets where the difference is within the noise."
    sections = []
    if any(units.known(ratio) for row in rows for ratio in row["ratios"][1:]):
        summary = (
            f"Points: the speed of {units.plural(len(rows), 'workload')} as a multiple of that in {names[0]}. "
            "The table of workloads has the same figures."
        )
        text = [f"Beside {names[0]}: right of the line is faster, left is slower. Hollow points are within the noise."]
        sections.append(Section("ratios", "Speed", text, [chart("ratios", charts.ratios(rows, names), summary)]))
    return [*sections, Section("workloads", "Workloads", [note], tables=[table("Workloads", columns, rows)])]


def _machines(documents: list[dict[str, Any]], names: list[str]) -> Section:
    """The facts side by side: what was the same and what was not."""
    by_name = [dict(facts(document)) for document in documents]
    terms = list(dict.fromkeys(term for known in by_name for term in known))
    columns = [Column("fact", lambda term: term, numeric=False)]
    for name, known in zip(names, by_name, strict=True):
        columns.append(Column(name, lambda term, known=known: known.get(term, units.ABSENT), numeric=False))  # type: ignore[misc]
    return Section("machines", "The machines", tables=[table("The machines", columns, terms)])


def write_compare_page(comparison: dict[str, Any], path: Path) -> None:
    """Writes the page of a comparison: each document beside the first."""
    names = [entry["label"] for entry in comparison["documents"]]
    documents = [entry["document"] for entry in comparison["documents"]]
    cpus = list(dict.fromkeys(_cpu(document) for document in documents))
    dates = list(dict.fromkeys(units.date(document.get("created")) for document in documents))
    _write(
        path,
        title=f"manyhead compared on {' and '.join(cpus)}, {dates[-1]}",
        heading=" / ".join(names),
        subtitle=f"manyhead comparison on {' and '.join(cpus)}, {' / '.join(dates)}",
        notices=[text for name, doc in zip(names, documents, strict=True) for text in _notices(doc, name)],
        tiles=[
            (name, f"{units.number(ratio)}x", f"the speed of {names[0]}, geometric mean")
            for name, ratio in list(zip(names, comparison["geomean"], strict=True))[1:]
            if units.known(ratio)
        ],
        sections=[*_compared(comparison, names), _machines(documents, names)],
        closing="",
    )


def _write(path: Path, **content: Any) -> None:
    jinja2 = need("jinja2", "the HTML page")
    offline = need("plotly.offline", "the HTML page")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    drawn = any(section.charts for section in content["sections"])
    page = environment.get_template("page.html").render(**content, plotly=offline.get_plotlyjs() if drawn else "")
    write_text(path, page)
