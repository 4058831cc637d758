"""What a request adds to the model together with a picture: fields, text form and steps that
ControlNets and image prompts share. It knows no files and no tensors."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Self

from sdxl.attachments import MAX_NAME, NAME
from sdxl.parameter import Attachment, InvalidParams, parameter, table_of

MAX_STRENGTH = 2
MAX_PATH = 4096
NAME_AND_REST = re.compile(r"([^=:]+)(=?)(.*)", re.DOTALL)
STRENGTH = re.compile(r"-?[\d.]+", re.ASCII)
STEPS = re.compile(r"([\d.]+)-([\d.]+)", re.ASCII)


@dataclass(frozen=True)
class Pictured(Attachment):
    """A subclass has more fields; one of them is set by its values alone in the text form."""

    FORM: ClassVar[str]
    BARE: ClassVar[str]
    """the field that a part of the text form sets by its value alone"""

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
        """Names of files may have commas: several entries are a JSON list."""
        if not text.lstrip().startswith("["):
            return [text]
        return list(json.loads(text))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Names of files may have colons: the other parts are read from the end."""
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
        """Return the field that a part of the text form sets, if it is one. Raises ValueError."""
        table = table_of(cls)
        if text in table[cls.BARE].choices:
            return {cls.BARE: text}
        key, mark, value = text.partition("=")
        each = table.get(key)
        return {key: each.parse(value)} if mark and each and key not in ("name", "image") else {}

    def check(self, field: str) -> None:
        super().check(field)
        if not NAME.fullmatch(self.name or ""):
            raise InvalidParams(field, self.name, "must have names without : , < >")
        if self.start >= self.end:
            needed = f"with {self.name!r}: start must be below end, got {self.start} and {self.end}"
            raise InvalidParams(field, None, needed)


def is_within(begin: float, end: float, step: int, steps: int) -> bool:
    """Whether a step lies in a part of the steps, as in diffusers."""
    return begin <= step / steps and (step + 1) / steps <= end
