"""The schedulers' names: what each stands for, and what other programs call it. Without any heavy
import; the tables themselves are made in sdxl/schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Scheduler(NamedTuple):
    """What a scheduler's name stands for."""

    solver: str
    """a key of SOLVERS in sdxl/schedulers/solvers.py"""
    label: str
    """what other programs call it"""
    comfy: str
    """what ComfyUI calls it"""
    levels: str = ""
    """a key of SCHEDULE_LABELS: which noise levels it steps through; else the checkpoint's own"""


SCHEDULE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "karras": "Karras",
        "exponential": "Exponential",
        "beta": "Beta",
        "aligned": "Align Your Steps",
        "trailing": "SGM Uniform",
    }
)
"""What stable-diffusion-webui calls them; ComfyUI writes the same small, with underscores."""
OWN_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {"DPM++ 2M": "karras", "DPM++ 2M SDE": "exponential"}
)
"""What stable-diffusion-webui takes for a sampler where it is to choose."""


def _each(solver: str, label: str, comfy: str, names: Mapping[str, str]) -> dict[str, Scheduler]:
    """The same solver on several sets of levels, by the ends of its name."""
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
