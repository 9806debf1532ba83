"""How a command ends where it does not end as it should."""

from __future__ import annotations

import os
import sys

from .._user import UserError

OK, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def no_other_profile() -> None:
    """Commands that measure take profiles of their own."""
    if os.environ.get("MH_PROFILE"):
        raise UserError("the environment variable MH_PROFILE is set, and there can be one profile at a time: unset it")


def interrupted(done: int, of: int, what: str) -> int:
    """Says how far a command came, and returns its exit status."""
    print(f"Interrupted: {done} of {of} {what} were done.", file=sys.stderr)
    return INTERRUPTED
