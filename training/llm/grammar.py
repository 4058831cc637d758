"""Reads what `sdxl.mini.scenes.caption` writes: from a full caption back to its scene.

It accepts only the plain wording: a text is a caption to the letter, or none.
"""

from __future__ import annotations

import re

from sdxl.mini.scenes import COLOURS, COUNTS, PLACES, RELATIONS, SHAPES, Scene, Thing, caption


def _either(words: object, name: str) -> str:
    return f"(?P<{name}>{'|'.join(map(re.escape, words))})"  # type: ignore[call-overload]


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
    found = _FULL.fullmatch(text)
    if found is None:
        return None
    things = tuple(
        Thing(found[f"shape{n}"], found[f"colour{n}"], found[f"size{n}"] or "medium")
        for n in ("", "2")
        if found[f"shape{n}"]
    )
    count = _COUNTED[found["count"]]
    scene = Scene(things, found["background"], count, found["place"], found["relation"])
    # Plurals and articles are right if the scene would be written so.
    return scene if caption(scene) == text else None
