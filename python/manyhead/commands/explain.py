"""What the library plans for a problem, how long that should take on this machine, and what it spends the time on.
The rates that the prediction needs are measured first, in about a second; --limits takes them from a saved profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from .._runtime import machine
from .._user import UserError, need, one_of
from ..profiling import cases, document, explain
from ..profiling.run import available_memory
from .errors import interrupted, no_other_profile
from .options import explain_lines, isas_of, seconds_of, single, threads_of

SUMMARY = "the plan for a problem, and the time it should take"
SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain_lines(parser)
    parser.add_argument(
        "problem",
        nargs="?",
        metavar="LINE",
        help="a problem line in quotes, such as 'f32 b1 h32/8 q2048 kv2048 d128 causal', see below",
    )
    parser.add_argument(
        "--table",
        nargs="?",
        const="table",
        metavar="PRESET",
        help="all rows of a preset of manyhead profile, predicted and measured (default: the built-in table)",
    )
    parser.add_argument(
        "--dtype", help=f"of --table, or of a line without one: {', '.join(cases.ITEM_SIZE)} (default: f32)"
    )
    parser.add_argument("--isa", metavar="NAME", help="instruction set (default: the best one)")
    parser.add_argument("--threads", metavar="N", help="most threads (default: one for each CPU)")
    parser.add_argument("--limits", metavar="FILE", help="take rates from this file of manyhead profile --json")
    parser.add_argument("--plan-only", action="store_true", help="only the plan: nothing is measured or predicted")
    parser.add_argument(
        "--run", dest="measure", action="store_true", help="run it as well, and put the times side by side"
    )
    parser.add_argument("--seconds", metavar="S", help=f"time for the runs of each problem (default: {SECONDS:g})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    from .. import _measure

    if not options.json:
        need("rich", "the table")
    if not options.plan_only:
        no_other_profile()
    from ..profiling import show, show_explain

    _check(options)
    facts = machine()
    rows = _rows(options, facts, _measure)
    found: list[explain.Explanation] = []
    stopped = False
    try:
        found.extend(_explained(options, rows, facts, _measure))
    except KeyboardInterrupt:
        if not found:
            raise
        stopped = True
    if options.json:
        print(json.dumps(found if options.table else found[0], indent=2))
    else:
        with show.console() as console:
            if options.table:
                show_explain.show_table(console, found)
            else:
                show_explain.show_explanation(console, found[0])
    if stopped:
        return interrupted(len(found), len(rows), "rows")
    return 0


def _check(options: argparse.Namespace) -> None:
    if bool(options.table) == (options.problem is not None):
        raise UserError("expected either a problem line, such as 'f32 b1 h8 q128 kv128 d64', or --table")
    if options.plan_only:
        for name, given in (("table", options.table), ("run", options.measure), ("limits", options.limits)):
            if given:
                raise UserError(f"--plan-only measures nothing, so --{name} has no meaning with it")
    if options.seconds is not None and not (options.measure or options.table):
        raise UserError("--seconds is the time of runs: give --run or --table as well")


def _rows(options: argparse.Namespace, facts: dict[str, Any], tools: Any) -> list[cases.Row]:
    dtype = one_of("dtype", options.dtype or "f32", cases.ITEM_SIZE)
    if options.dtype is not None and options.problem is not None:
        cases.check_dtype([options.problem], [dtype])
    isa = facts["isa"] if options.isa is None else single("--isa", isas_of(options.isa), options.isa)
    given = "all" if options.threads is None else options.threads
    threads = single("--threads", threads_of(given, facts), given)
    chosen = cases.preset_cases([options.table]) if options.table else cases.shape_cases([options.problem])
    return cases.make_rows(chosen, [dtype], [isa], [threads], tools)


def _explained(
    options: argparse.Namespace, rows: list[cases.Row], facts: dict[str, Any], tools: Any
) -> Iterator[explain.Explanation]:
    from ..profiling import show

    row = rows[0]
    if options.plan_only:
        yield explain.explain(row, tools, facts, None)
        return
    available = available_memory()
    source: explain.RateSource = explain.MeasuredRates(tools, facts, available)
    if options.limits:
        source = explain.SavedRates(document.load(options.limits), options.limits)
    seconds = SECONDS if options.seconds is None else seconds_of(options.seconds)
    if options.table:
        with show.progress() as watch:
            yield from explain.table(rows, tools, facts, source, available=available, seconds=seconds, watch=watch)
    elif options.measure:
        yield explain.measure(row, tools, facts, source, available=available, seconds=seconds, phases=True)
    else:
        yield explain.explain(row, tools, facts, source)
