"""Options that several commands have, read the same way."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from .._runtime import isas
from .._user import UserError, one_of
from ..profiling.cases import LINES


def explain_lines(parser: argparse.ArgumentParser) -> None:
    """Ends the help with the words of problem lines. What is not to be wrapped has to be wrapped already."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", 79)
    parser.epilog = LINES


def words(option: str, text: str) -> list[str]:
    """Names with commas between them, each once."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise UserError(f"{option} {text!r}: expected names with commas between them")
    return list(dict.fromkeys(found))


def names(option: str, text: str, what: str, known: list[str], everything: list[str] | None = None) -> list[str]:
    found = words(option, text)
    if found == ["all"]:
        return everything or known
    return [one_of(what, word, known) for word in found]


def isas_of(text: str) -> list[str]:
    present = isas()
    usable = [name for name in present if present[name]]
    found = names("--isa", text, "instruction set", list(present), usable)
    for name in found:
        if not present[name]:
            raise UserError(f"--isa {name}: this CPU cannot run it. It can run {', '.join(usable)}.")
    return found


def threads_of(text: str, facts: dict[str, Any]) -> list[int]:
    numbers = set()
    for word in words("--threads", text):
        number = min(facts["threads"], facts["cpus"]) if word == "all" else int(word) if word.isdecimal() else 0
        if not 1 <= number <= facts["cpus"]:
            raise UserError(
                f"--threads {text}: {word!r} is not a number from 1 to {facts['cpus']}, the CPUs here, and not 'all'"
            )
        numbers.add(number)
    return sorted(numbers)


def single(option: str, values: list[Any], text: str) -> Any:
    """The value of an option that takes one, where the rules are those of a list."""
    if len(values) != 1:
        raise UserError(f"{option} {text}: expected one")
    return values[0]


def seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise UserError(f"--seconds {text}: expected a number of seconds above 0, at most 3600")
    return seconds
