"""Fields of JSON that anybody may have changed: their types, before anything is made of them.

It does not know what the file is; the caller's error says that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar

from sdxl.specs import brief

T = TypeVar("T")
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What taking such a file apart may raise."""
TYPES: Mapping[Any, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, NoneType),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "Mapping[str, Any]": (dict,),
}


def check_fields(record: T) -> T:
    """The dataclass, if its plain fields hold what they are declared to."""
    for field in fields(record):  # type: ignore[arg-type]
        value, needed = getattr(record, field.name), TYPES.get(field.type)
        if needed is not None and type(value) not in needed:
            raise TypeError(f"{field.name} is {brief(value)}, needed {field.type}")
    return record


def check_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        shown = str(allowed) if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise ValueError(f"{name} {brief(value)}, needed one of {shown}")
