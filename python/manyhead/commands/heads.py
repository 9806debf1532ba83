"""What each attention head does: heat maps, entropy, distance, sinks, similarity,
and the effect of removing it. Measured tile by tile, so that long texts need
little memory. Writes pictures and one HTML page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .._user import UserError, check_folder, need, writable, write_files, write_text
from ..head_analysis.recording import FORMAT

if TYPE_CHECKING:
    from rich.console import Console

    from ..head_analysis.recording import Recording
    from ..head_analysis.report import Report
    from ..profiling.sweep import Watch

SUMMARY = "what each attention head does: heat maps, entropy, sinks, redundancy"

_ROWS = 36  # of the table in the terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = FORMAT
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.npz", help="saved tensors, see below")
    parser.add_argument(
        "--demo",
        nargs="?",
        const="",
        metavar="TEXT",
        help="instead of files: the layers of the sentence encoder MiniLM on this text",
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another BERT encoder for --demo")
    parser.add_argument("--layers", type=_numbers, metavar="LIST", help="layers to look at, such as 0,5 (default all)")
    parser.add_argument("--batch", type=_number, metavar="N", help="which text of a batch (default 0)")
    parser.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="token i attends tokens 0..i (default: what the file says, else no)",
    )
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="one a line, or a .json list of strings")
    parser.add_argument("--max-cells", type=_cells, default=128, metavar="N", help="side of a heat map (default 128)")
    parser.add_argument(
        "--out", type=Path, default=Path("heads-report"), metavar="FOLDER", help="default: heads-report"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(part.strip()) for part in text.split(",")]


def _cells(text: str) -> int:
    number = _number(text)
    if not 2 <= number <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 2 to 1024")
    return number


def run(options: argparse.Namespace) -> int:
    for package in ("matplotlib", "jinja2", "rich"):
        need(package, "the report")
    from ..head_analysis.page import make_page
    from ..head_analysis.pictures import draw
    from ..head_analysis.report import analyse, to_json
    from ..profiling import show

    if options.demo and options.demo.endswith(".npz") and Path(options.demo).exists():
        raise UserError(f"{options.demo} is a file: --demo takes a text, or give the file without --demo")
    check_folder(options.out)
    if options.json and options.json.exists():
        writable(options.json)
    elif options.json:
        check_folder(options.json.parent)
    with show.progress("reading") as watch:
        watch.plan(2.0 if options.demo is None else 3.0)
        recording = _read(options, _step(watch, "removing heads"))
        report = analyse(recording, max_cells=options.max_cells, progress=_step(watch, "measuring heads"))
        drawing = _step(watch, "drawing")
        pictures = []
        notes: list[str] = []
        for picture in draw(report, notes.append):
            pictures.append(picture)
            drawing(len({p.layer for p in pictures}) / (1 + len(report.layers)))
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)
    files = {picture.name: picture.png for picture in pictures}
    files["index.html"] = make_page(report, pictures).encode()
    write_files(options.out, files)
    if options.json:
        write_text(options.json, json.dumps(to_json(report), indent=1))
    with show.console() as console:
        _print_table(console, report)
    print(f"Wrote {options.out / 'index.html'} and {len(pictures)} pictures.")
    return 0


def _read(options: argparse.Namespace, progress: Callable[[float], None]) -> Recording:
    from ..head_analysis.demo_model import TEXT, record_demo
    from ..head_analysis.recording import read_recording

    if options.demo is None:
        if not options.files:
            raise UserError("nothing to look at: give an .npz file with q, k and v, or --demo")
        if options.model:
            raise UserError("--model goes with --demo")
        return read_recording(
            options.files,
            batch=options.batch or 0,
            layers=options.layers,
            causal=options.causal,
            tokens=options.tokens,
        )
    for name in ("files", "batch", "causal", "tokens"):
        if getattr(options, name) not in (None, []):
            given = options.files[0] if name == "files" else f"--{name}"
            raise UserError(f"--demo and {given} cannot be used together")
    return record_demo(options.demo.strip() or TEXT, layers=options.layers, model=options.model, progress=progress)


def _step(watch: Watch, name: str) -> Callable[[float], None]:
    """A part of the plan, which is told the share of it that is done."""
    reached = 0.0

    def reach(share: float) -> None:
        nonlocal reached
        watch.now(name)
        watch.done(share - reached)
        reached = share

    return reach


def _print_table(console: Console, report: Report) -> None:
    from rich.table import Table

    from ..head_analysis.report import head_rows

    rows = head_rows(report)
    change, of_what, form = "output_change", "the layer's output", "{:.0%}"
    if report.recording.embedding_change:
        change, of_what, form = "embedding_change", "the embedding", "{:.4f}"
    shown = rows
    if len(rows) > _ROWS:
        strongest = sorted(rows, key=lambda row: -row[change])[:_ROWS]
        shown = [row for row in rows if row in strongest]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("layer", "head", "entropy", "distance", "first", "change", "closest"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("habit", overflow="ellipsis", no_wrap=True)
    for row in shown:
        table.add_row(
            f"{row['layer']}",
            f"{row['head']}",
            f"{row['entropy_share']:.0%}",
            f"{row['distance']:.1f}",
            f"{row['first_key']:.0%}",
            form.format(row[change]),
            "" if row["closest_head"] is None else f"{row['closest_head']} ({row['similarity']:.2f})",
            row["habit"],
        )
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"These are {len(shown)} of {len(rows)} heads, those whose removal changes {of_what} most.")
    console.print(f"first: weight on the first key; change: of {of_what} without the head.")
