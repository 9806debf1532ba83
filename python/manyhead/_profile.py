"""profile: what the calls of a block of code spent their time on."""

from __future__ import annotations

import json
from ctypes import byref, sizeof
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from . import _abi
from ._library import check, lib, text_of


class Profile:
    """Records the calls of manyhead in the process while it is open; see `profile`."""

    def __init__(self, options: _abi.ProfileOptions) -> None:
        self._options = options
        self._open = False
        self._summary: dict[str, Any] | None = None
        self._trace = ""

    def __enter__(self) -> Profile:
        check(lib.mh_profile_begin(byref(self._options)))
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._open = False
        check(lib.mh_profile_end())
        # Kept as text here: the library forgets them when another profile begins.
        self._trace = text_of(partial(lib.mh_profile_describe, _abi.PROFILE_TRACE))
        self._summary = None

    @property
    def summary(self) -> dict[str, Any]:
        """Everything but the trace: calls, threads, what there was no room for."""
        if self._open or not self._trace:
            raise RuntimeError("the profile has not ended: read it after its with block")
        if self._summary is None:
            self._summary = json.loads(self._trace)["manyhead"]
        return self._summary

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls in the order in which they began: problem, seconds, threads, phases (seconds of all threads), and
        for how many calls one stands."""
        return self.summary["calls"]

    @property
    def trace(self) -> str:
        """JSON that Perfetto (ui.perfetto.dev) and Chrome's tracing read."""
        self.summary  # noqa: B018  says so where it has not ended
        return self._trace

    def save(self, path: str | Path) -> None:
        """Writes the trace to a file."""
        Path(path).write_text(self.trace, encoding="utf-8")


def profile(*, calls: int = 4096, tasks: int = 65536, counters: bool = False) -> Profile:
    """Profiles the calls of the process inside a with block.

    That makes them less than 1 % slower. After a thread's first 64 calls, those of less than some milliseconds are
    kept one time in ``call["stands_for"]``, by chance; ``summary["calls_skipped"]`` counts the others.

        with manyhead.profile() as profile:
            manyhead.attention(q, k, v)
        print(profile.calls[0]["phases"])
        profile.save("trace.json")

    Args:
        calls: room for so many calls; later ones are counted (``summary["calls_dropped"]``), not kept.
        tasks: room for so many of their tasks, or runs of short tasks, which the trace shows.
        counters: also count cycles, instructions, cache and branch misses of each thread, where the system allows it;
            ``summary["counters_note"]`` says why not.

    Raises:
        ValueError: another profile is running, or a number is not from 1 to 2^24.
    """
    for name, number in (("calls", calls), ("tasks", tasks)):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= 2**24:
            raise ValueError(f"{name} is {number!r}, must be a whole number from 1 to 2^24")
    flags = _abi.PROFILE_COUNTERS if counters else 0
    return Profile(_abi.ProfileOptions(sizeof(_abi.ProfileOptions), calls, tasks, flags, 0))
