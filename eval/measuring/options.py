"""Command-line options whose type follows from their default."""

from __future__ import annotations

import argparse
from typing import Any

from sdxl.arguments import number, whole

TYPES: dict[type, Any] = {int: whole, float: number}
METAVARS = {int: "N", float: "X"}


def add_option(
    place: argparse._ActionsContainer,
    flag: str,
    default: Any,
    help: str,
    metavar: str | None = None,
    **more: Any,
) -> None:
    """Add a flag to a parser or group. A list takes one value or more, False makes a switch, and
    the help ends with the default."""
    if default is False:
        place.add_argument(flag, action="store_true", help=help, **more)
        return
    first, shown = default, str(default)
    if isinstance(default, list | tuple):
        first, shown = (default[0] if default else ""), ", ".join(map(str, default))
        more.setdefault("nargs", "+")
    if default is not None:
        more.setdefault("type", TYPES.get(type(first), type(first)))
    if "choices" not in more:
        more["metavar"] = metavar or METAVARS.get(type(first))
    text = f"{help} (default {shown})" if default and help != argparse.SUPPRESS else help
    place.add_argument(flag, default=default, help=text, **more)
