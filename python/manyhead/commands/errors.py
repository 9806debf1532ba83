"""What a command says where it does not end as it should: exit statuses, and sentences on what the user gave."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

OK, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


class UserError(ValueError):
    """Something the user gave is wrong. The text says what it was and what was expected."""


def need(package: str, what: str) -> ModuleType:
    """Imports a package of the extra `profile`, or says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{what} needs the Python package {package}: pip install {package}, or 'manyhead[profile]' for all of them"
        ) from error


def no_other_profile() -> None:
    """Commands that measure take profiles of their own."""
    if os.environ.get("MH_PROFILE"):
        raise UserError("the environment variable MH_PROFILE is set, and there can be one profile at a time: unset it")


def interrupted(done: int, of: int, what: str) -> int:
    """Says how far a command came, and returns its exit status."""
    print(f"Interrupted: {done} of {of} {what} were done.", file=sys.stderr)
    return INTERRUPTED


def one_of(what: str, given: str, known: Iterable[str]) -> str:
    """`given`, where it is one of the known names."""
    names = list(known)
    if given in names:
        return given
    close = difflib.get_close_matches(given, names, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(f"there is no {what} {given!r}.{hint} Known: {', '.join(names)}.")
