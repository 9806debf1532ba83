"""The JSON document of a profile: put together, saved, loaded."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .._library import __version__
from ..commands.errors import UserError, read_text

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
    """Writes all of it or, where that fails, leaves what was there."""
    text = json.dumps(document, indent=1) + "\n"
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: nothing to replace
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=target.name, delete=False
        ) as file:
            file.write(text)
        new = Path(file.name)
        new.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        new.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
    for i, row in enumerate(document["rows"]):
        missing = [key for key in ROW if not isinstance(row, dict) or key not in row]
        times = row.get("seconds") if not missing else None
        if not isinstance(times, dict) or not times.get("samples") or not times.get("best"):
            raise UserError(f"{path} is a damaged profile: row {i} has no {', '.join(missing) or 'times'}")
    return document
