"""Finds, loads and checks the shared library; turns its statuses into exceptions.

Looked for, in this order: the file that the environment variable MANYHEAD_LIBRARY names (then nowhere else), the folder
of this package, the folder in which meson-python puts libraries of a wheel, the system's loader.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t
from pathlib import Path
from typing import Any, Self

from . import _abi

__version__ = "0.1.0"
FILE_NAMES = ("libmanyhead.so.0", "libmanyhead.so")  # the versioned one is what a plain install has


class Error(RuntimeError):
    """manyhead could not do what was asked, although no argument was wrong.

    `status` is the mh_status number: 2 unsupported by this build or CPU, 3 out of memory, 4 a defect of manyhead.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.status), vars(self)


class OutOfMemory(Error, MemoryError):
    """The library got no memory."""


Error.__module__ = OutOfMemory.__module__ = "manyhead"  # where users find them


class Owner:
    """What holds memory of the library, or the places of arrays. A copy would give that memory back a second time."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: it holds memory of this process")


class Immutable(Owner):
    """What never changes is its own copy, also within other objects that are copied."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def candidates() -> Iterator[str]:
    """The places to look, in order. A name without a folder is the system loader's to find."""
    chosen = os.environ.get("MANYHEAD_LIBRARY")
    if chosen:
        yield chosen
        return
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent / ".manyhead.mesonpy.libs"):
        for name in FILE_NAMES:
            yield str(folder / name)
    yield from FILE_NAMES


def compatible(version: str) -> bool:
    """While the major version is 0 the minor one counts too: it may change the meaning of a call."""
    return version.split(".")[:2] == __version__.split(".")[:2]


def load() -> tuple[ctypes.CDLL, str]:
    """The library and where it was found. Raises ImportError with every place that was tried and why it failed."""
    failures = []
    for place in candidates():
        if Path(place).is_absolute() and not Path(place).exists():
            failures.append(f"{place}: no such file")
            continue
        try:
            library = ctypes.CDLL(place)
            _abi.declare(library)
        except (OSError, AttributeError) as error:
            failures.append(str(error) if str(error).startswith(place) else f"{place}: {error}")
            continue
        version = library.mh_version().decode()
        if compatible(version):
            return library, place
        failures.append(f"{place}: is version {version}, this package is {__version__}")
    if os.environ.get("MANYHEAD_LIBRARY"):
        advice = "The environment variable MANYHEAD_LIBRARY says so: set it to a library of this version, or unset it."
    else:
        advice = (
            "Build it (meson setup build-release && meson compile -C build-release) and set MANYHEAD_LIBRARY to the "
            "file, or install the package with pip. In the project's folder ./dev manyhead does all that is needed."
        )
    raise ImportError("\n  ".join(["manyhead's shared library was not found. Tried:", *failures]) + "\n" + advice)


lib, path = load()


# What arguments of C are called in Python, where a text names their values.
_IN_PYTHON = {
    "MH_ALIGN_UNSET": "None",
    "MH_ALIGN_TOP_LEFT": "'top_left'",
    "MH_ALIGN_BOTTOM_RIGHT": "'bottom_right'",
    "MH_ALIGN_OFFSET with q_offset": "q_offset given",
    "alibi_mode is 1, but inputs lacks MH_INPUT_ALIBI": "alibi_mode is 'signed', but there are no alibi_slopes",
    "lse_base is 1, but outputs lacks MH_OUTPUT_LSE": "lse_base is '2', but return_lse is False",
    "exec.": "",
}


def raise_for(status: int) -> None:
    """Raises the exception for a status other than MH_OK, with the library's text."""
    text = lib.mh_last_error().decode(errors="replace")
    for name, here in _IN_PYTHON.items():
        text = text.replace(name, here)
    if status == _abi.INVALID_ARGUMENT:
        raise ValueError(text)
    kind = OutOfMemory if status == _abi.OUT_OF_MEMORY else Error
    raise kind(text or lib.mh_status_name(status).decode(), status)


def check(status: int) -> None:
    if status:
        raise_for(status)


def text_of(write: Callable[[ctypes.Array[ctypes.c_char] | None, int, object], int]) -> str:
    """The whole text of a C function that fills a buffer as snprintf does: write(buffer, size, &needed)."""
    needed = c_size_t()
    check(write(None, 0, byref(needed)))
    while True:  # the text may have grown since it was measured
        buffer = ctypes.create_string_buffer(needed.value)
        check(write(buffer, len(buffer), byref(needed)))
        if needed.value <= len(buffer):
            return buffer.value.decode()
