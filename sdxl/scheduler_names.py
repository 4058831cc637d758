"""The schedulers' names, here and in other programs. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Scheduler(NamedTuple):
    """A scheduler: a solver with noise levels."""

    solver: str
    """a key of SOLVERS in sdxl/schedulers/solvers.py"""
    label: str
    """the solver's name in stable-diffusion-webui"""
    comfy: str
    """the solver's name in ComfyUI"""
    diffusers: str
    """the solver's class in diffusers"""
    levels: str = ""
    """a key of SCHEDULE_LABELS; empty: the checkpoint's levels"""


SCHEDULE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "karras": "Karras",
        "exponential": "Exponential",
        "beta": "Beta",
        "aligned": "Align Your Steps",
        "trailing": "SGM Uniform",
    }
)
"""the levels' names in stable-diffusion-webui; ComfyUI writes them as align_your_steps"""
OWN_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {"DPM++ 2M": "karras", "DPM++ 2M SDE": "exponential"}
)
"""the levels of stable-diffusion-webui's automatic choice, by sampler"""


def _each(
    solver: str, label: str, comfy: str, diffusers: str, names: Mapping[str, str]
) -> dict[str, Scheduler]:
    """Return a solver's schedulers; `names` are the levels by the suffix of the name."""
    return {
        f"{solver}{suffix}": Scheduler(solver, label, comfy, diffusers, levels)
        for suffix, levels in names.items()
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
    names: dict[str, str] = {}
    for name, each in SCHEDULERS.items():
        others = [name, full_label(name)]
        if each.levels:
            others.append(f"{each.comfy}_{SCHEDULE_LABELS[each.levels].replace(' ', '_')}")
        else:
            others += [each.comfy, f"k_{each.comfy}", each.diffusers]
        names |= {other.lower(): name for other in others if other}
    return names


def full_label(name: str) -> str:
    """Return the label with its levels, as in older versions of stable-diffusion-webui."""
    each = SCHEDULERS[name]
    return f"{each.label} {SCHEDULE_LABELS[each.levels]}" if each.levels else each.label


OTHER_NAMES: Mapping[str, str] = MappingProxyType(_other_names())
"""names here by the names in stable-diffusion-webui, ComfyUI and diffusers, in lower case"""
