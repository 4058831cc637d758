"""The picture files that a command's flags name, read before the model is loaded.

Pictures of ControlNets and image prompts are known by their digests from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from sdxl.control_maps import add_map
from sdxl.parameter import table_of
from sdxl.params import PICTURED, InvalidParams
from sdxl.pictured import Pictured
from sdxl.source import GivenImage, decode

P = TypeVar("P", bound=Pictured)


def read_file(name: str, field: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        needed = f"must be a readable file ({error.strerror})"
        raise InvalidParams(field, name, needed) from error


def read_image(image: str | None, mask: str | None) -> GivenImage | None:
    if image is None:
        if mask is not None:
            raise InvalidParams("mask", mask, "needs --image")
        return None
    return GivenImage.read(read_file(image, "image"), read_file(mask, "mask") if mask else None)


def read_pictures(
    field: str, given: Iterable[P], read: Callable[[str, str], bytes]
) -> tuple[tuple[P, ...], dict[str, bytes]]:
    """Return the entries of a list, their pictures' names replaced by digests, and the files by
    digest. `read` takes a name and a field. Raise InvalidParams for a file that is no picture."""
    entries, files = [], dict[str, bytes]()
    for entry in given:
        if entry.image:
            file = read(entry.image, field)
            try:
                decode(file, field)
            except InvalidParams as error:
                raise InvalidParams(field, entry.image[:80], error.allowed) from error
            entry = replace(entry, image=add_map(file, files))
        entries.append(entry)
    return tuple(entries), files


def filled(given: Iterable[P], stored: Iterable[P]) -> tuple[P, ...]:
    """Fill the fields that flags leave at their defaults from a picture's stored entry of the same
    name. Of several such entries, take the one with the same picture, or else the first."""
    left, entries = list(stored), []
    for entry in given:
        same = [old for old in left if old.name == entry.name]
        old = next((old for old in same if old.image == entry.image), same[0] if same else None)
        if old is not None:
            left.remove(old)
            fields = table_of(type(entry)).items()
            set_ = {n: getattr(entry, n) for n, f in fields if getattr(entry, n) != f.default}
            entry = replace(old, **{**set_, "image": entry.image})
        entries.append(entry)
    return tuple(entries)


def needed_flags(field: str, entries: Sequence[Pictured]) -> str:
    """Return the flags that name these pictures, with the digests of the files."""
    flag = PICTURED[field].flag
    return ", ".join(
        f"--{flag} {each.name}=FILE" + (f" (sha256 {each.image})" if each.image else "")
        for each in entries
    )
