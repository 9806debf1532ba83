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

from .._library import Error
from .errors import FAILED, INTERRUPTED, OK, WRONG_USE, UserError

COMMANDS = ("profile", "compare", "explain", "replay", "heads", "info")
DEFAULT = "info"  # without a command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="manyhead", description="Multi-head attention on CPUs.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        module = import_module(f".{name}", __name__)
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, DEFAULT)
    options = make_parser().parse_args(arguments)
    options.arguments = arguments[1:]  # as they were given, for records of a run
    try:
        return options.run(options)
    except UserError as error:
        print(f"manyhead {options.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except Error as error:  # the library cannot, although nothing was wrong: no such instruction set here, no memory
        print(f"manyhead {options.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
