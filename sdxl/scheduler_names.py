"""The schedulers' names, and other programs' names for them.

It imports nothing heavy; sdxl/schedulers makes the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Scheduler(NamedTuple):
    """The definition of a scheduler's name."""

    solver: str
    """a key of SOLVERS in sdxl/schedulers/solvers.py"""
    label: str
    """its name in other programs"""
    comfy: str
    """its name in ComfyUI"""
    levels: str = ""
    """a key of SCHEDULE_LABELS: its noise levels; empty: the checkpoint's"""


SCHEDULE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "karras": "Karras",
        "exponential": "Exponential",
        "beta": "Beta",
        "aligned": "Align Your Steps",
        "trailing": "SGM Uniform",
    }
)
"""Their names in stable-diffusion-webui; ComfyUI writes them in lower case with underscores."""
OWN_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {"DPM++ 2M": "karras", "DPM++ 2M SDE": "exponential"}
)
"""stable-diffusion-webui's automatic choice for a sampler."""


def _each(solver: str, label: str, comfy: str, names: Mapping[str, str]) -> dict[str, Scheduler]:
    """Return the solver with each of several sets of levels, by name suffix."""
    return {
        f"{solver}{end}": Scheduler(solver, label, comfy, levels) for end, levels in names.items()
    }


_SPREAD = {"": "", "_karras": "karras", "_exponential": "exponential"}

SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType(
    _each(
        "euler",
        "Euler",
        "euler",
        {**_SPREAD, "_beta": "beta", "_ays": "aligned", "_trailing": "trailing"},
    )
    | _each("euler_a", "Euler a", "euler_ancestral", {"": ""})
    | _each("ddim", "DDIM", "ddim", {"": "", "_trailing": "trailing"})
    | _each("dpmpp_2m", "DPM++ 2M", "dpmpp_2m", {**_SPREAD, "_beta": "beta"})
    | _each("dpmpp_2m_sde", "DPM++ 2M SDE", "dpmpp_2m_sde", _SPREAD)
    | _each("lcm", "LCM", "lcm", {"": ""})
    | _each("tcd", "TCD", "tcd", {"": ""})
)
