"""One parameter of a picture: its name and bounds, and how its values are parsed and checked."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin

MAX_STEPS = 1000
FEW_STEPS = 8
"""A schedule with fewer steps is for models trained for few: its steps are far apart."""
USUAL_INTERVAL = 2
"""The default cache interval, except with few steps."""
SIZE = "size"
"""The REST field for width and height together."""


class InvalidParams(ValueError):
    """A refused request: the field, its value, and what it must be ("must be 1 to 100")."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(self.message(field))

    def message(self, field: str, longest: int = sys.maxsize) -> str:
        """The text with the caller's name of the field, and of the value its first characters."""
        if self.value is None or not self.allowed.startswith("must"):
            return f"{field} {self.allowed}"
        shown = repr(self.value)
        shown = shown if len(shown) <= longest else shown[:longest] + "…"
        return f"{field} {self.allowed}, got {shown}"

    def __reduce__(self) -> Any:
        return InvalidParams, (self.field, self.value, self.allowed)


@dataclass(frozen=True)
class Parameter:
    """One line of the table."""

    label: str
    """Shown on the page."""
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    rest: str = ""
    """The REST name, if it differs."""
    infotext: str = ""
    """The name in the `parameters` text that other programs read; empty if it has its own line."""
    metavar: str = ""
    placeholder: str = ""
    """Shown on the page while the field is empty."""
    is_for_edits: bool = False
    """Used by edits only."""
    is_for_masks: bool = False
    """Used by edits with a mask only."""
    edit_defaults: tuple[Any, ...] = ()
    """Defaults of an edit without a mask and with one."""
    is_stored_if_set: bool = False
    """Stored in metadata only if the request set it, so other pictures stay byte-identical."""
    name: str = ""
    kind: type = str
    """str, int, float, or tuple for several numbers."""
    item: type = int
    """int or float: the type of a tuple's numbers."""
    default: Any = None

    @property
    def column(self) -> str:
        """The batch column: the REST name, but width and height have a column each."""
        return self.rest if self.rest and self.rest != SIZE else self.name

    @property
    def client_name(self) -> str:
        return self.rest or self.name

    def check(self, value: object) -> None:
        if value is not None or self.default is not None:
            _CHECKS[self.kind](self, value)

    def parse(self, text: str) -> Any:
        """Parse text of a command line or CSV file. Raises ValueError."""
        if self.kind is tuple:
            return tuple(self.item(number) for number in text.split(","))
        return self.kind(text)

    @property
    def stored_kind(self) -> Any:
        """The type in JSON and tables, which have no tuples."""
        return GenericAlias(list, (self.item,)) if self.kind is tuple else self.kind


def kind_of(hint: Any) -> dict[str, type]:
    """`int | None` gives int; `tuple[int, ...]` gives tuple and int."""
    if isinstance(hint, UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    kind = get_origin(hint)
    return {"kind": kind, "item": get_args(hint)[0]} if kind else {"kind": hint}


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _check_whole(p: Parameter, value: Any) -> None:
    # Whole numbers without bounds have the model's, which `resolve` checks.
    if not math.isinf(p.high) and not (is_int(value) and p.low <= value <= p.high):
        raise InvalidParams(p.name, value, f"must be a whole number from {p.low} to {p.high}")


def _check_number(p: Parameter, value: Any) -> None:
    if not (_is_number(value) and p.low <= value <= p.high):
        raise InvalidParams(p.name, value, f"must be a number from {p.low} to {p.high}")


def _check_text(p: Parameter, value: object) -> None:
    if p.choices:
        if value not in p.choices:
            raise InvalidParams(p.name, value, f"must be one of {', '.join(p.choices)}")
        return
    if not isinstance(value, str):
        raise InvalidParams(p.name, value, "must be text")
    if len(value) > p.high:
        raise InvalidParams(p.name, len(value), f"must have at most {p.high} characters")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise InvalidParams(p.name, value, "must be valid Unicode, without lone surrogates")


def _check_numbers(p: Parameter, value: Any) -> None:
    """Check step numbers, or the two ends of a range."""
    of_its_kind = is_int if p.item is int else _is_number
    is_numbers = bool(value) and all(map(of_its_kind, value))
    is_rising = is_numbers and value[0] >= 0 and all(a < b for a, b in itertools.pairwise(value))
    if p.item is int and not is_rising:
        raise InvalidParams(p.name, value, needed_steps(MAX_STEPS))
    if p.item is float and not (is_rising and len(value) == 2 and value[1] <= 1):
        raise InvalidParams(p.name, value, "must be two rising numbers from 0 to 1")


def needed_steps(steps: int) -> str:
    return f"must be rising step numbers from 0 to {steps - 1}"


_CHECKS: Mapping[type, Callable[[Parameter, Any], None]] = {
    str: _check_text,
    int: _check_whole,
    float: _check_number,
    tuple: _check_numbers,
}
