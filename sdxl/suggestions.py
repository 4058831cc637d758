"""Finds the known names that are most similar to an unknown one, for error messages."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 200
"""the characters of a name that are compared"""


def nearest(name: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the most similar names, the best first. Case does not matter, nor - or _."""
    # Imported here: most commands need no suggestion.
    import difflib

    if not isinstance(name, str):
        return []
    by_spelling = {_spelling(each): each for each in reversed(list(known))}
    spellings = difflib.get_close_matches(_spelling(name[:LONGEST]), by_spelling, count, cutoff)
    return [by_spelling[each] for each in spellings]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of an error message; empty if no name is similar."""
    return "".join(f"; did you mean {each}?" for each in nearest(name, known))


def _spelling(name: str) -> str:
    return name.lower().replace("-", "_")
