"""Command lines: a parser whose errors are one line, and the flags that fill GenerationParams.

Names, types and defaults come from the dataclass. It knows no command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from sdxl.params import SCHEDULERS, GenerationParams

T = TypeVar("T")
MODEL = "a folder in diffusers layout or a hub id, org/name or org/name@revision"
"""what a flag that names a model says of it"""
DEFAULTS = {field.name: field.default for field in fields(GenerationParams)}


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit: the front door reports errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def whole(text: str) -> int:
    return _parsed(int, text, "a whole number")


def number(text: str) -> float:
    return _parsed(float, text, "a number")


def step_list(text: str) -> tuple[int, ...]:
    def parse(value: str) -> tuple[int, ...]:
        return tuple(int(step) for step in value.split(","))

    return _parsed(parse, text, "step numbers with commas between")


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """A flag per parameter. One that isn't given isn't set, so that it can be told from one that
    is: what an image says about itself gives way to what the user says."""

    def add(name: str, metavar: str, type: Callable[[str], Any], text: str) -> None:
        default = DEFAULTS[name]
        shown = text if default is None else f"{text} (default {default})"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, metavar=metavar, type=type, help=shown, default=argparse.SUPPRESS)

    group = parser.add_argument_group("parameters of a picture")
    add("negative_prompt", "TEXT", str, "what to keep out of it")
    add("width", "PIXELS", whole, "the model's own size unless given")
    add("height", "PIXELS", whole, "the model's own size unless given")
    add("steps", "N", whole, "denoising steps")
    add("guidance", "X", number, "how closely to follow the prompt; 1 or less for no guidance")
    add("seed", "N", whole, "start of the noise; image i of n uses seed + i; random unless given")
    add("scheduler", "NAME", str, f"one of {', '.join(SCHEDULERS)}")
    add("cache_interval", "N", whole, "run the whole UNet in one step of N; 1 is the exact model")
    add("deep_steps", "I,J,…", step_list, "the very steps that run the whole UNet, from 0")


def given_params(options: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were on the command line."""
    return {name: getattr(options, name) for name in DEFAULTS if hasattr(options, name)}


def _parsed(parse: Callable[[str], T], text: str, needed: str) -> T:
    try:
        return parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(_refusal(text, needed)) from None


def _refusal(text: str, needed: str) -> str:
    return f"{text!r} is not allowed; needed {needed}"
