"""Measures this machine, then attention on it: how fast each workload runs, and how near it comes to what the machine
can do. Without options: the built-in table, one shape at growing lengths, and one on growing numbers of threads."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from .._runtime import machine
from .._user import UserError, need, writable
from ..profiling import cases, document, sweep
from ..profiling.limits import Limits
from ..profiling.model import model_cases
from ..profiling.run import available_memory, profile
from .errors import interrupted, no_other_profile
from .options import explain_lines, isas_of, names, seconds_of, threads_of, words

SUMMARY = "measure attention on this machine, and what the machine could do"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain_lines(parser)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME,...",
        help=f"workloads of a model or a question: {', '.join(cases.presets())} (default: {','.join(cases.DEFAULT)})",
    )
    what.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="LINE",
        help="a problem line, such as 'b1 h32/8 q2048 kv2048 d128 causal', see below; may begin with a dtype",
    )
    what.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="FILE",
        help="config.json of a Hugging Face model, or its folder",
    )
    what.add_argument(
        "--dtype", metavar="NAME,...", help=f"{', '.join(cases.ITEM_SIZE)} or all (default: f32,bf16; --quick: f32)"
    )
    what.add_argument("--isa", metavar="NAME,...", help="instruction sets or all (default: the best one)")
    what.add_argument(
        "--threads", metavar="N,...", help="numbers of threads; all: one for each CPU (default: 1,all; --quick: all)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--quick", action="store_true", help="under half a minute: fewer and shorter measurements")
    how.add_argument(
        "--seconds", metavar="S", help=f"time for each row (default: {sweep.FULL.seconds:g}; --quick: less)"
    )
    how.add_argument("--no-phases", action="store_true", help="leave out where the time of a call goes")
    how.add_argument("--list", action="store_true", help="only show what would be measured and how long it takes")
    out = parser.add_argument_group("results, besides the table")
    out.add_argument("--json", metavar="FILE", help="write everything as JSON, for manyhead compare")
    out.add_argument("--html", metavar="FILE", help="write a page with charts")


def run(options: argparse.Namespace) -> int:
    from .. import _measure

    need("rich", "the table")
    no_other_profile()
    from ..profiling import show

    facts = machine()
    rows = _rows(options, facts, _measure)
    effort = _effort(options, len(rows))
    available = available_memory()
    if options.list:
        limits = Limits(_measure, facts, available, 3)
        planned = sweep.Sweep(
            rows,
            _measure,
            limits,
            sweep.Steadiness(_measure, facts["isa"], 1),
            effort,
            available=available,
            phases=False,
        )
        with show.console() as console:
            show.show_plan(console, rows, [planned.expected(row) for row in rows])
        return 0
    json, html = writable(options.json), writable(options.html)
    if json and html and json.resolve() == html.resolve():
        raise UserError(f"--json and --html are one file: {json}")
    if html:
        need("plotly", "the page of --html")
        need("jinja2", "the page of --html")
    with show.progress() as watch:
        result = profile(
            rows,
            effort,
            tools=_measure,
            machine=facts,
            available=available,
            phases=not options.no_phases,
            arguments=options.arguments,
            watch=watch,
        )
    if not result["rows"]:
        json = html = None  # an older file says more than one without figures
    try:
        if json:
            document.save(result, json)
        if html:
            from ..report.page import write_profile_page

            write_profile_page(result, html)
    finally:  # whatever becomes of the files, the figures are shown
        with show.console() as console:
            show.show_profile(console, result)
    for file in (json, html):
        if file:
            print(f"Wrote {file}.")
    if result["complete"]:
        return 0 if result["rows"] else 1  # all were left out; the notes say why
    return interrupted(len(result["rows"]), len(rows), "rows")


def _rows(options: argparse.Namespace, facts: dict[str, Any], tools: Any) -> list[cases.Row]:
    chosen = cases.preset_cases(name for text in options.preset for name in words("--preset", text))
    chosen += [case for path in options.model for case in model_cases(path)]
    chosen += cases.shape_cases(options.shape)
    if not (options.preset or options.model or options.shape):
        chosen = cases.preset_cases(cases.DEFAULT)
    quick = options.quick
    dtype = ("f32" if quick else "f32,bf16") if options.dtype is None else options.dtype
    dtypes = names("--dtype", dtype, "dtype", list(cases.ITEM_SIZE))
    if options.dtype is not None:
        cases.check_dtype(options.shape, dtypes)
    chosen_isas = [facts["isa"]] if options.isa is None else isas_of(options.isa)
    threads = threads_of(("all" if quick else "1,all") if options.threads is None else options.threads, facts)
    return cases.make_rows(list(dict.fromkeys(chosen)), dtypes, chosen_isas, threads, tools)


def _effort(options: argparse.Namespace, rows: int) -> sweep.Effort:
    effort = sweep.FULL
    if options.quick:
        effort = dataclasses.replace(sweep.QUICK, seconds=min(sweep.QUICK.seconds, sweep.QUICK_TOTAL / rows))
    if options.seconds is None:
        return effort
    return dataclasses.replace(effort, seconds=seconds_of(options.seconds))
