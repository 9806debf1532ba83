"""The JSON document of a profile: put together, saved, loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .._library import __version__
from .._user import UserError, read_text, write_text

FORMAT = "manyhead-profile"
VERSION = 1
SECTIONS = {"machine": dict, "limits": dict, "rows": list, "created": str, "manyhead": str}  # what readers rely on
ROW = ("series", "name", "problem", "dtype", "isa", "threads", "seconds", "share", "limit")


def make(
    *,
    machine: Mapping[str, Any],
    limits: Mapping[str, Any],
    rows: list[dict[str, Any]],
    skipped: list[dict[str, Any]],
    arguments: list[str],
    seconds: float,
    complete: bool,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "manyhead": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "arguments": arguments,
        "seconds": seconds,
        "complete": complete,
        "machine": dict(machine),
        "limits": dict(limits),
        "rows": rows,
        "skipped": skipped,
    }


def save(document: Mapping[str, Any], path: Path) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


def load(path: str | Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not a profile: it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path} is not a profile: expected a file that `manyhead profile --json` wrote")
    if document.get("format_version") != VERSION:
        raise UserError(
            f"{path} is a profile of format version {document.get('format_version')!r}, "
            f"and manyhead {__version__} reads version {VERSION}: measure again, or use the manyhead that wrote it"
        )
    for key, kind in SECTIONS.items():
        if not isinstance(document.get(key), kind):
            raise UserError(f"{path} is a damaged profile: its {key!r} is missing or not what it should be")
    noise = document["limits"].get("noise")
    if noise is not None and not _is_positive(noise, or_zero=True):
        raise UserError(f"{path} is a damaged profile: its noise is {noise!r}")
    for i, row in enumerate(document["rows"]):
        missing = [key for key in ROW if not isinstance(row, dict) or key not in row]
        if missing or not _has_times(row):
            raise UserError(f"{path} is a damaged profile: row {i} has no {', '.join(missing) or 'times'}")
    return document


def _has_times(row: dict[str, Any]) -> bool:
    times = row["seconds"]
    samples = times.get("samples") if isinstance(times, dict) else None
    if not isinstance(samples, list) or not samples:
        return False
    return all(_is_positive(value) for value in (times.get("best"), times.get("median"), *samples))


def _is_positive(value: object, or_zero: bool = False) -> bool:
    return isinstance(value, int | float) and (0 < value < math.inf or (or_zero and value == 0))
