"""What users of the command line name: packages, words, files. What is wrong with it is a UserError."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType


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


def one_of(what: str, given: str, known: Iterable[str]) -> str:
    """`given`, where it is one of the known names."""
    names = list(known)
    if given in names:
        return given
    close = difflib.get_close_matches(given, names, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(f"there is no {what} {given!r}.{hint} Known: {', '.join(names)}.")


def writable(path: str | Path | None) -> Path | None:
    """The path of a file to write at the end, tried now: before a long run, not after it."""
    if path is None:
        return None
    file = Path(path)
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    if not existed:
        file.unlink()
    return file


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not a text file") from error


def write_text(path: Path, text: str) -> None:
    """Writes all of it or, where that fails, leaves what was there. Makes the folder."""
    try:
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a pipe or a device: there is nothing to replace
            target.write_text(text, encoding="utf-8")
            return
        try:
            descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".")
        except PermissionError:  # the folder is closed, the file in it may be open
            target.write_text(text, encoding="utf-8")
            return
        new = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            new.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def check_folder(folder: Path) -> None:
    """Whether the folder can be made and written, tried now; nothing is left there."""
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """All files or, where it is interrupted before the last one is complete, none."""
    was_there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
            for name, content in files.items():
                (Path(unfinished) / name).write_bytes(content)
            for name in files:
                (Path(unfinished) / name).replace(folder / name)
    except OSError as error:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
