"""Puts profiles side by side: files of `manyhead profile --json` from several CPUs, or of several versions. Ratios are
to the first file; above 1 is faster. With --fail-below the exit status is 1 where something became slower."""

from __future__ import annotations

import argparse
import math
import sys

from .._user import UserError, need, writable
from ..profiling.compare import below, compare, labels
from ..profiling.document import load

SUMMARY = "compare the JSON files of several profiles"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="files that manyhead profile --json wrote, two or more"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with charts")
    parser.add_argument(
        "--fail-below",
        metavar="RATIO",
        help="exit with status 1 where a significant ratio, or the geometric mean of all, is below this, such as 0.95",
    )


def run(options: argparse.Namespace) -> int:
    if len(options.files) < 2:
        raise UserError(f"there is nothing to compare {options.files[0]} with: give two files or more")
    least = _ratio(options.fail_below)
    comparison = compare(
        [(label, load(path)) for label, path in zip(labels(options.files), options.files, strict=True)]
    )
    html = writable(options.html)
    need("rich", "the table")
    from ..profiling import show

    if html:
        need("plotly", "the page of --html")
        need("jinja2", "the page of --html")
        from ..report.page import write_compare_page

        write_compare_page(comparison, html)
    with show.console() as console:
        show.show_comparison(console, comparison)
    if html:
        print(f"Wrote {html}.")
    slower = below(comparison, least) if least is not None else []
    for sentence in slower:
        print(sentence, file=sys.stderr)
    return 1 if slower else 0


def _ratio(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < math.inf:
        raise UserError(f"--fail-below {text}: expected a ratio above 0, such as 0.95")
    return ratio
