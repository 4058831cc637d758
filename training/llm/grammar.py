"""Parses a full caption of `sdxl.mini.scenes.caption` into its scene.

Only the exact wording is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sdxl.mini.scenes import COLOURS, COUNTS, PLACES, RELATIONS, SHAPES, Scene, Thing, caption


def _either(words: Iterable[str], name: str) -> str:
    return f"(?P<{name}>{'|'.join(map(re.escape, words))})"


def _noun(number: str) -> str:
    size = _either(("small", "large"), f"size{number}")
    shape = _either(SHAPES, f"shape{number}")
    return f"(?:{size} )?{_either(COLOURS, f'colour{number}')} {shape}(?:s|es)?"


_FULL = re.compile(
    f"(?P<count>an|{'|'.join(COUNTS.values())}) {_noun('')}"
    f"(?: {_either(PLACES, 'place')}| (?:and|{_either(RELATIONS, 'relation')}) an? {_noun('2')})?"
    f" on an? {_either(COLOURS, 'background')} background"
)
_COUNTED = {word: count for count, word in COUNTS.items()} | {"an": 1}


def parse(text: str) -> Scene | None:
    """Return the scene, or None if this is no full caption."""
    match = _FULL.fullmatch(text)
    if match is None:
        return None
    things = tuple(
        Thing(match[f"shape{n}"], match[f"colour{n}"], match[f"size{n}"] or "medium")
        for n in ("", "2")
        if match[f"shape{n}"]
    )
    count = _COUNTED[match["count"]]
    scene = Scene(things, match["background"], count, match["place"], match["relation"])
    # The expression accepts wrong plurals and articles; this comparison does not.
    return scene if caption(scene) == text else None
