"""Numbers as people read them: three digits that count, and a unit that keeps them short. Nothing for an absent one."""

from __future__ import annotations

import math
from datetime import datetime

ABSENT = "-"
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
RATES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def known(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: float | None) -> str:
    """1234 -> 1,234; 12.34 -> 12.3; 1.234 -> 1.23; 0.01234 -> 0.0123."""
    if value is None or not known(value):
        return ABSENT
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:.{digits}f}" if digits < 7 else f"{value:.2e}"


def _scaled(value: float | None, scales: tuple[tuple[float, str], ...], unit: str = "") -> str:
    if value is None or not known(value):
        return ABSENT
    factor, prefix = next((scale for scale in scales if abs(value) >= scale[0] * 0.9995), scales[-1])
    return f"{number(value / factor)} {prefix}{unit}".rstrip()


def duration(seconds: float | None) -> str:
    if seconds is not None and known(seconds) and seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return _scaled(seconds, SECONDS)


def size(count: float | None) -> str:
    """Bytes; whole numbers as such: 48 KiB, not 48.0 KiB."""
    text = _scaled(count, SIZES)
    digits, _, unit = text.partition(" ")
    return f"{digits.rstrip('0').rstrip('.')} {unit}" if "." in digits else text


def rate(per_second: float | None, unit: str) -> str:
    return _scaled(per_second, RATES, unit)


def percent(share: float | None) -> str:
    if share is None or not known(share):
        return ABSENT
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:.0f} %"


def date(created: object) -> str:
    """The document's UTC time stamp; whatever else stands there is shown as it is."""
    try:
        return f"{datetime.fromisoformat(str(created)):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return str(created or "unknown date")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
