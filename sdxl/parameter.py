"""One parameter of a picture: its name and bounds, and the parsing and checking of its values."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import GenericAlias, MappingProxyType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from sdxl.suggestions import did_you_mean

MAX_STEPS = 1000
FEW_STEPS = 8
"""Schedules with fewer steps are for models trained for few steps; their steps are far apart."""
USUAL_INTERVAL = 2
"""The default cache interval, except with few steps."""
SIZE = "size"
"""The REST field for width and height together."""
MAX_ATTACHMENTS = 16
"""The most attachments in one list."""
MAX_NAME = 200
NAME = re.compile(r"[^:,<>\x00-\x1f\x7f\ud800-\udfff]+")
"""An attachment's name. Other characters separate the parts of a text form or of a tag."""
NEEDED: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list[int]: "step numbers with commas between",
    list[float]: "two numbers with a comma between",
}


class InvalidParams(ValueError):
    """A refused request: the field, the value, the allowed values ("must be 1 to 100"), and a hint
    at the end of the message."""

    def __init__(self, field: str, value: object, allowed: str, hint: str = "") -> None:
        self.field, self.value, self.allowed, self.hint = field, value, allowed, hint
        super().__init__(self.message(field))

    @classmethod
    def unknown(cls, field: str, value: object, known: Iterable[str]) -> Self:
        """Return the error for a value that is not a known one, with the most similar one."""
        known = list(known)
        return cls(field, value, f"must be one of {', '.join(known)}", did_you_mean(value, known))

    @classmethod
    def unknown_field(cls, field: str, known: Iterable[str]) -> Self:
        known = list(known)
        return cls(field, None, f"must be one of {', '.join(known)}", did_you_mean(field, known))

    def message(self, field: str, longest: int = sys.maxsize) -> str:
        """Return the message for the caller's field name, with the value cut to `longest`."""
        if self.value is None or not self.allowed.startswith("must"):
            return f"{field} {self.allowed}{self.hint}"
        shown = repr(self.value)
        shown = shown if len(shown) <= longest else shown[:longest] + "…"
        return f"{field} {self.allowed}, got {shown}{self.hint}"

    def __reduce__(self) -> Any:
        return InvalidParams, (self.field, self.value, self.allowed, self.hint)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the table."""

    label: str
    """the label on the page"""
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """other programs' labels of choices, shown on the page"""
    other_choices: Mapping[str, str] = field(default_factory=dict)
    """choices by their names in other programs, in lower case"""
    rest: str = ""
    """the REST name, if it differs from `name`"""
    aliases: tuple[str, ...] = ()
    """the parameter's names in other programs, which flags, fields and columns accept too"""
    infotext: str = ""
    """the name in the `parameters` text of other programs; empty: not in the list of facts"""
    metavar: str = ""
    flag: str = ""
    """the flag's name, if it differs from `name`"""
    flag_help: str = ""
    """more help for the command line"""
    group: str = ""
    """the group on the page and in --help-all; empty: the first group"""
    placeholder: str = ""
    """text on the page while the field is empty"""
    switch: str = ""
    """label of the page's checkbox that sets the parameter; unticked: not sent"""
    switch_value: int | None = None
    """the value that the checkbox sets"""
    is_for_edits: bool = False
    """True: only for edits"""
    is_for_masks: bool = False
    """True: only for edits with a mask"""
    edit_defaults: tuple[Any, ...] = ()
    """defaults of an edit without and with a mask"""
    is_always_stored: bool = False
    """True: stored in metadata also if it is None. A new parameter is not, so that pictures without
    it keep their bytes"""
    name: str = ""
    kind: type = str
    """str, int, float, tuple for several numbers, or Attachment for several attachments"""
    item: type = int
    """the type of an entry of several: int, float or a class of attachments"""
    default: Any = None

    @property
    def column(self) -> str:
        """The batch column: the REST name, but width and height have their own columns."""
        return self.rest if self.rest and self.rest != SIZE else self.name

    @property
    def client_name(self) -> str:
        return self.rest or self.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a client may use."""
        return tuple(dict.fromkeys((self.name, self.column, *self.aliases)))

    @property
    def is_list(self) -> bool:
        return self.kind in (tuple, Attachment)

    def chosen(self, value: Any) -> Any:
        """Replace another program's name of a choice."""
        is_other = isinstance(value, str) and value not in self.choices
        return self.other_choices.get(value.strip().lower(), value) if is_other else value

    def check(self, value: object) -> None:
        if value is not None or self.default is not None:
            _CHECKS[self.kind](self, value)

    def parse(self, text: str) -> Any:
        """Parse text of a command line or CSV file. Raise ValueError."""
        if not self.is_list:
            return self.kind(text)
        if issubclass(self.item, Attachment):
            return self.read_list(self.item.entries(text))
        parse_one: Callable[[str], Any] = self.item
        return tuple(parse_one(entry) for entry in text.split(","))

    def read_list(self, value: object) -> tuple[Any, ...]:
        """Read a JSON list."""
        if not isinstance(value, list | tuple):
            entries = self.needed if self.kind is Attachment else "numbers"
            raise InvalidParams(self.name, value, f"must be a list of {entries}")
        if issubclass(self.item, Attachment):
            return tuple(self.item.read(each, self.name) for each in value)
        return tuple(value)

    @property
    def needed(self) -> str:
        """The needed form of text on a command line or in a CSV file."""
        return self.item.form() if issubclass(self.item, Attachment) else NEEDED[self.stored_kind]

    @property
    def stored_kind(self) -> Any:
        """The type in JSON and tables, which have no tuples."""
        return GenericAlias(list, (self.item,)) if self.is_list else self.kind


class Attachment:
    """An addition of a request to the model: a name in the catalogue, and options. A subclass is a
    dataclass whose fields are parameters, the name first."""

    name: str

    @classmethod
    def form(cls) -> str:
        """Return the text form, such as NAME[:WEIGHT]."""
        first, *others = (name.upper() for name in table_of(cls))
        return "[:".join((first, *others)) + "]" * len(others)

    @classmethod
    def entries(cls, text: str) -> list[Any]:
        """Split the text of a flag or CSV field into entries of a JSON list. Raise ValueError."""
        return text.split(",")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form. Raise ValueError."""
        table, parts = table_of(cls).values(), [part.strip() for part in text.split(":")]
        if not parts[0] or len(parts) > len(table):
            raise ValueError(f"must be {cls.form()}, got {text!r}")
        make: Callable[..., Self] = cls
        return make(*(each.parse(part) for each, part in zip(table, parts, strict=False)))

    @classmethod
    def read(cls, value: Any, field: str) -> Self:
        """Read an entry of a JSON list: text, or an object of the fields."""
        if isinstance(value, cls):
            return value
        make: Callable[..., Any] = cls
        try:
            return cls.parse(value) if isinstance(value, str) else make(**value)
        except (TypeError, ValueError):
            names = ", ".join(table_of(cls))
            needed = f"must be a list of {cls.form()}, or of objects with {names}"
            raise InvalidParams(field, value, needed) from None

    def check(self, field: str) -> None:
        for name, each in table_of(type(self)).items():
            try:
                each.check(getattr(self, name))
            except InvalidParams as error:
                shown = f"{str(self.name)[:60]!r}: {error.message(name, longest=60)}"
                raise InvalidParams(field, None, f"with {shown}") from None
        if not NAME.fullmatch(self.name or ""):
            raise InvalidParams(field, self.name, "must have names without : , < >")


def parameter(default: Any, label: str, text: str, **facts: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(label, text, **facts)})


_tables: dict[type, Mapping[str, Parameter]] = {}


def table_of(cls: type[Any]) -> Mapping[str, Parameter]:
    """Return the parameters that a dataclass declares as its fields."""
    if cls not in _tables:
        hints = get_type_hints(cls)
        _tables[cls] = MappingProxyType(
            {
                f.name: replace(
                    f.metadata["parameter"],
                    name=f.name,
                    default=None if f.default is MISSING else f.default,
                    **kind_of(hints[f.name]),
                )
                for f in fields(cls)
            }
        )
    return _tables[cls]


def kind_of(hint: Any) -> dict[str, type]:
    """Return kind and item: int for `int | None`, tuple and int for `tuple[int, ...]`."""
    if isinstance(hint, UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is None:
        return {"kind": hint}
    item = get_args(hint)[0]
    return {"kind": Attachment if issubclass(item, Attachment) else tuple, "item": item}


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _check_whole(p: Parameter, value: Any) -> None:
    # `resolve` checks whole numbers without bounds against the model's bounds.
    if not math.isinf(p.high) and not (is_int(value) and p.low <= value <= p.high):
        raise InvalidParams(p.name, value, f"must be a whole number from {p.low} to {p.high}")


def _check_number(p: Parameter, value: Any) -> None:
    if not (_is_number(value) and p.low <= value <= p.high):
        raise InvalidParams(p.name, value, f"must be a number from {p.low} to {p.high}")


def _check_text(p: Parameter, value: object) -> None:
    if p.choices:
        if value not in p.choices:
            raise InvalidParams.unknown(p.name, value, p.choices)
        return
    if not isinstance(value, str):
        raise InvalidParams(p.name, value, "must be text")
    if len(value) > p.high:
        raise InvalidParams(p.name, len(value), f"must have at most {p.high} characters")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise InvalidParams(p.name, value, "must be valid Unicode, without lone surrogates")


def _check_numbers(p: Parameter, value: Any) -> None:
    """Check step numbers, or the two ends of a range."""
    is_item = is_int if p.item is int else _is_number
    is_numbers = bool(value) and all(map(is_item, value))
    is_rising = is_numbers and value[0] >= 0 and all(a < b for a, b in itertools.pairwise(value))
    if p.item is int and not is_rising:
        raise InvalidParams(p.name, value, needed_steps(MAX_STEPS))
    if p.item is float and not (is_rising and len(value) == 2 and value[1] <= 1):
        raise InvalidParams(p.name, value, "must be two rising numbers from 0 to 1")


def _check_attachments(p: Parameter, value: Any) -> None:
    if len(value) > MAX_ATTACHMENTS:
        raise InvalidParams(p.name, len(value), f"must have at most {MAX_ATTACHMENTS} entries")
    for each in value:
        each.check(p.name)


def needed_steps(steps: int) -> str:
    return f"must be rising step numbers from 0 to {steps - 1}"


_CHECKS: Mapping[type, Callable[[Parameter, Any], None]] = {
    str: _check_text,
    int: _check_whole,
    float: _check_number,
    tuple: _check_numbers,
    Attachment: _check_attachments,
}
