"""The pictures of a command's ControlNets and image prompts: read before the model is loaded, and
known by their digests from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from sdxl.control_maps import add_map
from sdxl.parameter import table_of
from sdxl.params import PICTURED, InvalidParams
from sdxl.pictured import Pictured
from sdxl.source import decode

P = TypeVar("P", bound=Pictured)


def read_pictures(
    field: str, given: Iterable[P], read: Callable[[str, str], bytes]
) -> tuple[tuple[P, ...], dict[str, bytes]]:
    """Return the entries of a list with the digests of their pictures in place of names, and the
    files by digest. `read` takes a name and a field. Raise InvalidParams for a wrong file."""
    made, files = [], dict[str, bytes]()
    for each in given:
        if each.image:
            file = read(each.image, field)
            check_picture(file, field, each.image)
            each = replace(each, image=add_map(file, files))
        made.append(each)
    return tuple(made), files


def check_picture(file: bytes, field: str, name: str) -> None:
    try:
        decode(file, field)
    except InvalidParams as error:
        raise InvalidParams(field, name[:80], error.allowed) from error


def filled(given: Iterable[P], stored: Iterable[P]) -> tuple[P, ...]:
    """Fill what flags leave at its default from a picture's entries of the same names. If several
    have one name, take the one with the same picture, or else the first."""
    left, made = list(stored), []
    for each in given:
        same = [old for old in left if old.name == each.name]
        old = next((old for old in same if old.image == each.image), same[0] if same else None)
        if old is not None:
            left.remove(old)
        made.append(_filled(each, old) if old else each)
    return tuple(made)


def _filled(given: P, stored: P) -> P:
    fields = table_of(type(given)).items()
    set_ = {n: getattr(given, n) for n, each in fields if getattr(given, n) != each.default}
    return replace(stored, **{**set_, "image": given.image})


def needed_flags(field: str, entries: Sequence[Pictured]) -> str:
    """Return the flags that give these pictures again, with the digests of their files."""
    flag = PICTURED[field].flag
    return ", ".join(
        f"--{flag} {each.name}=FILE" + (f" (sha256 {each.image})" if each.image else "")
        for each in entries
    )
