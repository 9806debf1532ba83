"""Runs the problems of a log again, and puts the times side by side. MH_VERBOSE=1 makes a program log its calls on
stderr, so that `MH_VERBOSE=1 python app.py 2> log.txt` here and `manyhead replay log.txt` there say what differs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from .._runtime import machine
from .._user import UserError, need, read_text
from ..profiling import replay
from ..profiling.run import available_memory
from .errors import interrupted, no_other_profile
from .options import explain_lines, isas_of, seconds_of, single, threads_of

SUMMARY = "run the calls of a log of MH_VERBOSE=1 again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain_lines(parser)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="logs, among other output or alone, or problem lines (see below), one a line; - for standard input",
    )
    parser.add_argument("--isa", metavar="NAME", help="instruction set (default: the best one)")
    parser.add_argument("--threads", metavar="N", help="most threads (default: as logged, or one for each CPU)")
    parser.add_argument("--seconds", metavar="S", help=f"time for each problem (default: {replay.EFFORT.seconds:g})")
    parser.add_argument("--top", metavar="N", help="only the N problems that took most of the logged time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    from .. import _measure

    if not options.json:
        need("rich", "the table")
    no_other_profile()
    from ..profiling import show, show_replay

    facts = machine()
    isa = facts["isa"] if options.isa is None else single("--isa", isas_of(options.isa), options.isa)
    threads = (
        None if options.threads is None else single("--threads", threads_of(options.threads, facts), options.threads)
    )
    effort = replay.EFFORT
    if options.seconds is not None:
        effort = dataclasses.replace(effort, seconds=seconds_of(options.seconds))
    log = replay.read_log([(_name(file), _text(file)) for file in options.files], _measure)
    if options.top is not None:
        log = log.top(_count(options.top))
    again = replay.Replay(log, _measure, facts, isa=isa, threads=threads, effort=effort, available=available_memory())
    stopped = False
    with show.progress() as watch:
        try:
            again.run(watch)
        except KeyboardInterrupt:
            stopped = True
    result = again.document()
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        with show.console() as console:
            show_replay.show_replay(console, result)
    done = sum(row["now"] is not None for row in result["rows"])
    if stopped:
        return interrupted(done, len(result["rows"]), "problems")
    return 0 if done else 1  # all were left out; the notes say why


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def _text(file: str) -> str:
    if file != "-":
        return read_text(file)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError("standard input is not text") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--top {text}: expected a number of problems, at least 1")
    return int(text)
