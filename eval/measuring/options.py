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
    if isinstance(default, list):
        more.setdefault("nargs", "+")
    kind = type(default[0] if isinstance(default, list | tuple) else default)
    if default is not None:
        more.setdefault("type", TYPES.get(kind, kind))
    if "choices" not in more:
        more["metavar"] = metavar or METAVARS.get(kind)
    text = f"{help} (default %(default)s)" if default not in (None, "") else help
    place.add_argument(flag, default=default, help=text, **more)
