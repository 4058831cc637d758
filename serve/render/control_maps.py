"""The maps of a command's ControlNets: read before the model is loaded, and known by their digests
from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from sdxl.control_maps import FIELD, add_map
from sdxl.controls import Control
from sdxl.parameter import table_of
from sdxl.params import InvalidParams
from sdxl.source import decode


def read_maps(
    controls: Iterable[Control], read: Callable[[str, str], bytes]
) -> tuple[tuple[Control, ...], dict[str, bytes]]:
    """Return the ControlNets with the digests of their maps in place of names, and the files by
    digest. `read` takes a name and a field. Raise InvalidParams for a wrong file."""
    made, files = [], dict[str, bytes]()
    for each in controls:
        if each.image:
            file = read(each.image, FIELD)
            check_picture(file, each.image)
            each = replace(each, image=add_map(file, files))
        made.append(each)
    return tuple(made), files


def check_picture(file: bytes, name: str) -> None:
    try:
        decode(file, FIELD)
    except InvalidParams as error:
        raise InvalidParams(FIELD, name[:80], error.allowed) from error


def filled(given: Iterable[Control], stored: Iterable[Control]) -> tuple[Control, ...]:
    """Fill what flags leave at its default from a picture's ControlNets of the same names. Of
    several with one name, that with the same map counts, or the first."""
    left, made = list(stored), []
    for each in given:
        same = [old for old in left if old.name == each.name]
        old = next((old for old in same if old.image == each.image), same[0] if same else None)
        if old is not None:
            left.remove(old)
        made.append(_filled(each, old) if old else each)
    return tuple(made)


def _filled(given: Control, stored: Control) -> Control:
    fields = table_of(Control).items()
    set_ = {n: getattr(given, n) for n, each in fields if getattr(given, n) != each.default}
    return replace(stored, **{**set_, "image": given.image})


def needed_flags(controls: Sequence[Control]) -> str:
    """Return the flags that give these maps again, with the digests of their files."""
    return ", ".join(
        f"--control {each.name}=FILE" + (f" (sha256 {each.image})" if each.image else "")
        for each in controls
    )
