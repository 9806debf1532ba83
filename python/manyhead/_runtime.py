"""The process-wide settings and the facts about the machine."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._library import __version__, check, lib, text_of
from ._plan import forget_plans


def version() -> str:
    """Version of the shared library, such as "0.1.0"."""
    return lib.mh_version().decode()


def isas() -> dict[str, bool]:
    """The instruction sets this build has kernels for, best first, and whether this machine can run each."""
    return {lib.mh_isa_name(i).decode(): bool(lib.mh_isa_supported(i)) for i in range(lib.mh_isa_count())}


def isa() -> str:
    """The instruction set that new calls and plans use. ValueError: MH_ISA asks for one that this build has not."""
    name = lib.mh_isa_current()
    if name is None:
        raise ValueError(lib.mh_last_error().decode())
    return name.decode()


def set_isa(name: str | None) -> None:
    """Forces the instruction set in the whole process; None goes back to the best one.

    Plans and layers made before keep theirs. Raises ValueError where this build has no such instruction set,
    manyhead.Error where the machine cannot run it. The environment variable MH_ISA does the same at start-up;
    MH_F32_UNIT=0 or 1 says whether f32 goes to a matrix unit (1 on machines with fewer than 16 CPUs).
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__}")
    if name is not None and "\0" in name:
        raise ValueError(f"there is no instruction set {name!r}")
    check(lib.mh_set_isa(None if name is None else name.encode()))
    forget_plans()


def threads() -> int:
    """Most threads a call uses: set_threads or MH_THREADS, else the CPUs this process may run on.

    With PyTorch's tensors a call runs on PyTorch's threads, and on no more than torch.get_num_threads(); on those of
    manyhead with the environment variable MH_OPENMP=0, where PyTorch's sleep when idle (OMP_WAIT_POLICY=PASSIVE), in
    forked processes, and while other processes keep PyTorch's waiting.
    """
    return lib.mh_threads()


_cap: int | None = None  # as set here last


def set_threads(threads: int) -> None:
    """Caps the threads of every call in the process; 0 removes the cap. Raises ValueError for a negative number."""
    try:
        threads = operator.index(threads)
    except TypeError:
        raise TypeError(f"threads must be an integer, not {type(threads).__name__}") from None
    if not -(2**31) <= threads < 2**31:
        raise ValueError(f"threads is {threads}, must fit 32 bits")
    check(lib.mh_set_threads(threads))
    global _cap
    _cap = threads


@contextmanager
def capped(threads: int) -> Iterator[None]:
    """Another cap for a while; 0 leaves the one that there is."""
    if not threads:
        yield
        return
    before = _cap if _cap is not None else lib.mh_threads() if os.environ.get("MH_THREADS") else 0
    set_threads(threads)
    try:
        yield
    finally:
        set_threads(before)


def machine() -> dict[str, Any]:
    """What manyhead knows of this computer: instruction set, threads, cache sizes in bytes, CPU name."""
    return json.loads(text_of(lib.mh_machine_describe))


def describe() -> dict[str, Any]:
    """Everything `python -m manyhead` prints."""
    from ._library import path

    return {
        "version": version(),
        "python_package": __version__,
        "library": path,
        "isa": isa(),
        "isas": isas(),
        "threads": threads(),
        "machine": machine(),
    }
