"""Command lines: a parser with one-line errors, and the flags of GenerationParams.

Names, types, defaults and help come from sdxl/params.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

from sdxl.parameter import NEEDED, Attachment
from sdxl.params import PARAMETERS, InvalidParams, Parameter
from sdxl.presets import QUALITIES
from sdxl.provenance import CERTIFICATE, HELP, METADATA, PRIVATE_KEY, Provenance

T = TypeVar("T")
MODEL = "a folder in diffusers layout, a .safetensors file, or a hub id, org/name[@revision]"
VAE = "a .safetensors file with the VAE to use instead of the model's"
UNCHECKED = "also take engines that were never compared with the model"
QUALITY = f"steps and cache interval from the model's presets: {', '.join(QUALITIES)}"
VAE_MARK = ",vae="
"""Separates a model's name from its VAE's."""
POSITIONAL = ("prompt",)
"""Positional parameters of a command."""
METAVARS = {str: "TEXT", int: "N", float: "X"}


class Parser(argparse.ArgumentParser):
    """Raises ArgumentError instead of printing the usage: sdxl/cli.py reports errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def whole(text: str) -> int:
    return _parsed(int, text, NEEDED[int])


def number(text: str) -> float:
    return _parsed(float, text, NEEDED[float])


def check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if not getattr(options, name) > 0:
            raise InvalidParams(name, getattr(options, name), "must be more than 0")


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each parameter. Flags not given stay unset (argparse.SUPPRESS): with `--from`,
    the picture's stored values fill only these."""
    group = parser.add_argument_group("parameters of a picture")
    for each in PARAMETERS.values():
        if each.name not in POSITIONAL:
            is_repeated = each.kind is Attachment
            default = "" if each.default is None else f" (default {each.default})"
            group.add_argument(
                "--" + (each.flag or each.name).replace("_", "-"),
                dest=each.name,
                action="extend" if is_repeated else "store",
                metavar=each.needed if is_repeated else each.metavar or METAVARS[each.kind],
                type=partial(_of_parameter, each),
                help=each.help + each.flag_help + default,
                default=argparse.SUPPRESS,
            )


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that writes pictures: parameters, provenance and quality."""
    add = parser.add_argument
    add("--provenance", default=METADATA, metavar="KIND", help=f"{HELP} (default %(default)s)")
    add("--certificate", default="", metavar="FILE", help=CERTIFICATE)
    add("--private-key", default="", metavar="FILE", help=PRIVATE_KEY)
    add("--quality", metavar="NAME", choices=QUALITIES, help=QUALITY)
    add_generation_flags(parser)


def given_provenance(options: argparse.Namespace) -> Provenance:
    return Provenance(options.provenance, options.certificate, options.private_key)


def model_with(model: str, vae: str | None) -> str:
    """One name for a model and its VAE."""
    return f"{model}{VAE_MARK}{vae}" if vae else model


def given_params(options: argparse.Namespace) -> dict[str, Any]:
    """Parameters set on the command line."""
    return {name: getattr(options, name) for name in PARAMETERS if hasattr(options, name)}


def _of_parameter(each: Parameter, text: str) -> Any:
    return _parsed(each.parse, text, each.needed)


def _parsed(parse: Callable[[str], T], text: str, needed: str) -> T:
    try:
        return parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(_refusal(text, needed)) from None


def _refusal(text: str, needed: str) -> str:
    return f"must be {needed}, got {text!r}"
