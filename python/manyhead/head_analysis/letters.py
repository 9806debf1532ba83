"""What tokens need besides themselves: isolates around those that run from right to left, and fonts that have their
letters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cache

_ISOLATE, _END = "\u2068", "\u2069"  # between them, text runs as its own letters do


def isolated(text: str) -> str:
    """The text for the middle of a sentence, which letters of another direction would turn around."""
    turned = any(unicodedata.bidirectional(letter) in ("R", "AL", "AN") for letter in text)
    return f"{_ISOLATE}{text}{_END}" if turned else text


def in_pictures(text: str) -> str:
    """Matplotlib knows directions from 3.11 on; before, it draws isolates as boxes."""
    import matplotlib

    if matplotlib.__version_info__ >= (3, 11):
        return text
    return text.replace(_ISOLATE, "").replace(_END, "")


def fonts_for(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Families besides Matplotlib's usual one that have letters which that lacks, and the letters that none has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    letters = {letter for text in texts for letter in text if letter.isprintable() and letter != " "}
    missing = letters - _held(findfont(FontProperties()), frozenset(letters))
    families: list[str] = []
    while missing:
        font = max(_installed(), key=lambda font: (len(_held(font, frozenset(missing))), "Regular" in font), default="")
        held = _held(font, frozenset(missing))
        if not held:
            break
        fontManager.addfont(font)  # which may be newer than Matplotlib's list
        families.append(fontManager.ttflist[-1].name)
        missing -= held
    return families, sorted(missing)


@cache
def _installed() -> list[str]:
    from matplotlib.font_manager import findSystemFonts

    return sorted(findSystemFonts())


def _held(font: str, letters: frozenset[str]) -> set[str]:
    """Which of the letters a file of a font can draw."""
    from matplotlib.ft2font import FT2Font

    try:
        face = FT2Font(font)
    except (OSError, RuntimeError):
        return set()
    return {letter for letter in letters if face.scalable and face.get_char_index(ord(letter))}
