"""Attachments with a picture: the fields, text form and steps that ControlNets and image prompts
share. It knows no files and no tensors."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Self

from sdxl.parameter import MAX_NAME, Attachment, InvalidParams, parameter, table_of

MAX_STRENGTH = 2
MAX_PATH = 4096
NAME_AND_REST = re.compile(r"([^=:]+)(=?)(.*)", re.DOTALL)
STRENGTH = re.compile(r"-?[\d.]+", re.ASCII)
STEPS = re.compile(r"([\d.]+)-([\d.]+)", re.ASCII)


@dataclass(frozen=True)
class Pictured(Attachment):
    """A ControlNet or an image prompt of a request."""

    FIELD: ClassVar[str]
    """the request's field"""
    FORM: ClassVar[str]
    """the text form, for help and errors"""
    BARE: ClassVar[str]
    """the field whose value the text form gives without its key"""

    name: str = parameter(MISSING, "Name", "its name, as the model lists it", high=MAX_NAME)
    image: str = parameter("", "Picture", "a picture", high=MAX_PATH)
    strength: float = parameter(
        1.0, "Strength", "1 = full strength, 0 = none", low=0, high=MAX_STRENGTH
    )
    start: float = parameter(0.0, "Start", "share of the steps at which it begins", low=0, high=1)
    end: float = parameter(1.0, "End", "share of the steps at which it ends", low=0, high=1)

    @classmethod
    def form(cls) -> str:
        return cls.FORM

    @classmethod
    def entries(cls, text: str) -> list[Any]:
        """Read one entry, or a JSON list of several: file names may have commas."""
        if not text.lstrip().startswith("["):
            return [text]
        return list(json.loads(text))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form. The options are read from the end: file names may have colons."""
        match = NAME_AND_REST.fullmatch(text)
        if match is None:
            raise ValueError(f"must be {cls.FORM}, got {text!r}")
        name, mark, rest = match.groups()
        parts, given = rest.split(":"), dict[str, Any]()
        while len(parts) > 1 and (option := cls._option(parts[-1])):
            given = option | given
            parts.pop()
        steps = STEPS.fullmatch(parts[-1]) if len(parts) > 1 else None
        if steps is not None:
            given |= {"start": float(steps[1]), "end": float(steps[2])}
            parts.pop()
        if len(parts) > 1 and STRENGTH.fullmatch(parts[-1]):
            given["strength"] = float(parts.pop())
        elif len(parts) > 1 and steps is not None and not parts[-1]:
            parts.pop()
        image = ":".join(parts).strip()
        if image and not mark:
            raise ValueError(f"must be {cls.FORM}, got {text!r}")
        return cls(name.strip(), image, **given)

    @classmethod
    def _option(cls, text: str) -> dict[str, Any]:
        """Return the field that a part of the text form sets; empty if it sets none. Raise
        ValueError for a wrong value."""
        table = table_of(cls)
        if text in table[cls.BARE].choices:
            return {cls.BARE: text}
        key, mark, value = text.partition("=")
        each = table.get(key)
        return {key: each.parse(value)} if mark and each and key not in ("name", "image") else {}

    def check(self, field: str) -> None:
        super().check(field)
        if self.start >= self.end:
            raise self.refused(f"start must be below end, got {self.start} and {self.end}")

    def refused(self, needed: object) -> InvalidParams:
        """Return the error of a request with this attachment."""
        return InvalidParams(self.FIELD, None, f"with {self.name!r}: {needed}")


def is_within(begin: float, end: float, step: int, steps: int) -> bool:
    """True if a step lies between these shares of the steps, as in diffusers."""
    return begin <= step / steps and (step + 1) / steps <= end
