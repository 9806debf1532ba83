"""The command line: `manyhead COMMAND`, or `python -m manyhead COMMAND`. One module a command.

A command's module has SUMMARY (a line for --help), `add_arguments(parser)` and `run(options) -> int`, the exit status.
It is imported to build the parser, so it imports what is slow or optional inside its functions. Whatever is wrong with
what the user gave is a UserError, whose text is all that is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from .._library import Error, __version__
from .._measure import check_problem, parse_problem
from .._user import UserError
from .errors import FAILED, INTERRUPTED, OK, WRONG_USE

COMMANDS = ("profile", "compare", "explain", "replay", "heads", "info")
DEFAULT = "info"  # without a command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="manyhead", description="Multi-head attention on CPUs.")
    parser.add_argument("--version", action="version", version=f"manyhead {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        module = import_module(f".{name}", __name__)
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run, refuse=command.error)
    return parser


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments.insert(0, DEFAULT)
    options, unknown = make_parser().parse_known_args(arguments)
    if unknown:  # the command's own usage, not that of all commands
        hint = "; a problem's line goes in quotes" if options.command == "explain" else ""
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.arguments = arguments[1:]  # as they were given, for records of a run
    if sys.stdout is None:
        print(f"manyhead {options.command}: standard output is closed", file=sys.stderr)
        return FAILED
    try:
        _check_environment()
        status = options.run(options)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"manyhead {options.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except Error as error:  # the library cannot, although nothing was wrong: no such instruction set here, no memory
        print(f"manyhead {options.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:  # the text cannot be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            return OK
        print(f"manyhead {options.command}: {error.strerror}", file=sys.stderr)
        return FAILED


def _check_environment() -> None:
    """The library says what is wrong with the variables MH_... where a plan is made: here, before anything is done."""
    try:
        check_problem(parse_problem("f32 b1 h1 q1 kv1 d1"))
    except ValueError as error:
        raise UserError(str(error)) from error
