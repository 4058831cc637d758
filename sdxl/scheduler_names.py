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
    diffusers: str
    """its class in diffusers, with other levels by an option"""
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


def _each(
    solver: str, label: str, comfy: str, diffusers: str, names: Mapping[str, str]
) -> dict[str, Scheduler]:
    """Return the solver with each of several sets of levels, by name suffix."""
    return {
        f"{solver}{end}": Scheduler(solver, label, comfy, diffusers, levels)
        for end, levels in names.items()
    }


_SPREAD = {"": "", "_karras": "karras", "_exponential": "exponential"}

SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType(
    _each(
        *("euler", "Euler", "euler", "EulerDiscreteScheduler"),
        {**_SPREAD, "_beta": "beta", "_ays": "aligned", "_trailing": "trailing"},
    )
    | _each("euler_a", "Euler a", "euler_ancestral", "EulerAncestralDiscreteScheduler", {"": ""})
    | _each("ddim", "DDIM", "ddim", "DDIMScheduler", {"": "", "_trailing": "trailing"})
    | _each(
        *("dpmpp_2m", "DPM++ 2M", "dpmpp_2m", "DPMSolverMultistepScheduler"),
        {**_SPREAD, "_beta": "beta"},
    )
    | _each("dpmpp_2m_sde", "DPM++ 2M SDE", "dpmpp_2m_sde", "", _SPREAD)
    | _each("lcm", "LCM", "lcm", "LCMScheduler", {"": ""})
    | _each("tcd", "TCD", "tcd", "TCDScheduler", {"": ""})
)


def _other_names() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, each in SCHEDULERS.items():
        others = [name, full_label(name)]
        if each.levels:
            others.append(f"{each.comfy}_{SCHEDULE_LABELS[each.levels].replace(' ', '_')}")
        else:
            others += [each.comfy, f"k_{each.comfy}", each.diffusers]
        found |= {other.lower(): name for other in others if other}
    return found


def full_label(name: str) -> str:
    """Return its name with its levels, as older versions of stable-diffusion-webui write it."""
    each = SCHEDULERS[name]
    return f"{each.label} {SCHEDULE_LABELS[each.levels]}" if each.levels else each.label


OTHER_NAMES: Mapping[str, str] = MappingProxyType(_other_names())
"""Our names by those of stable-diffusion-webui, ComfyUI and diffusers, in lower case."""
