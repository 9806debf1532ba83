"""A whole profile: limits, then rows, into one document; also where it is interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import document
from .cases import ITEM_SIZE, Row
from .instruments import Instruments
from .limits import Limits, Steadiness
from .sweep import Effort, Sweep, Watch


def profile(
    rows: Sequence[Row],
    effort: Effort,
    *,
    tools: Instruments,
    machine: Mapping[str, Any],
    available: int,
    phases: bool,
    arguments: Sequence[str],
    watch: Watch,
) -> dict[str, Any]:
    """The document of all rows, or of those that were done before Ctrl-C."""
    begin = time.monotonic()
    most = max(row.threads for row in rows)
    steadiness = Steadiness(tools, machine["isa"], most)
    limits = Limits(tools, machine, available, effort.looks)
    sweep = Sweep(rows, tools, limits, steadiness, effort, available=available, phases=phases)
    steadiness.look()
    complete = True
    try:
        watch.now("what the machine can do")
        limits.survey(
            [name for name, runs in machine["isas"].items() if runs],
            ITEM_SIZE,
            {1, most},
        )
        sweep.run(watch)
    except KeyboardInterrupt:
        complete = False
    done, skipped = sweep.document()
    return document.make(
        machine=machine,
        limits=limits.document() | steadiness.document(),
        rows=done,
        skipped=skipped,
        arguments=list(arguments),
        seconds=time.monotonic() - begin,
        complete=complete,
    )


def available_memory() -> int:
    """Bytes that can be taken without swapping, about."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 << 30
