"""diffusers' pipelines, and its scheduler for each name here, made from a checkpoint's config."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import diffusers
import pytest
import torch

from sdxl.params import GenerationParams
from sdxl.scheduler_names import SCHEDULERS
from sdxl.schedulers.levels import aligned
from sdxl.schedulers.solvers import TCD_ETA

CLASSES = {
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "ddim": "DDIMScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "dpmpp_2m_sde": "DPMSolverMultistepScheduler",
    "lcm": "LCMScheduler",
    "tcd": "TCDScheduler",
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "": {},
    "karras": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True, "use_karras_sigmas": False},
    "beta": {"use_beta_sigmas": True, "use_karras_sigmas": False},
    "trailing": {"timestep_spacing": "trailing", "use_karras_sigmas": False},
    "aligned": {"use_karras_sigmas": False},
}
QUICK = ("euler", "euler_a", "dpmpp_2m")
"""a plain one, one that draws noise in each step, and one that keeps the last result"""


FEW = ("lcm", "tcd")
"""for models distilled to few steps; with many steps of LCM the smallest difference grows"""


def each(quick: Sequence[str]) -> list[Any]:
    """Return all schedulers: `quick` in all runs, the others in long runs."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in SCHEDULERS
    ]


EACH = each(QUICK)
EACH_KIND = each(QUICK[:1])
"""for tests of pictures, when other tests cover every scheduler"""
TEN_ALIGNED = (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113)


def each_at(sizes: Sequence[tuple[int, int]]) -> list[Any]:
    """Pair schedulers and sizes: one pair for every size in quick runs, all pairs in long runs."""
    quick = set(zip(QUICK, sizes, strict=True))
    return [
        pytest.param(
            *pair,
            marks=() if pair in quick else pytest.mark.long,
            id="{}-{}x{}".format(pair[0], *pair[1]),
        )
        for pair in itertools.product(SCHEDULERS, sizes)
    ]


def pipe_of(kind: str, base: Any, **parts: Any) -> Any:
    """Return diffusers' pipeline of this kind with the networks of another, and other parts."""
    pipe = getattr(diffusers, f"StableDiffusionXL{kind}Pipeline")(**{**base.components, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def their_scheduler(name: str, config: Mapping[str, Any]) -> Any:
    each = SCHEDULERS[name]
    kind = getattr(diffusers, CLASSES[each.solver])
    values = {k: v for k, v in config.items() if k != "_class_name"} | OPTIONS[each.levels]
    if each.solver == "dpmpp_2m_sde":
        values["algorithm_type"] = "sde-dpmsolver++"
    known = inspect.signature(kind.__init__).parameters
    made = kind.from_config({k: v for k, v in values.items() if k in known})
    if each.levels == "aligned":
        made.set_timesteps = partial(_set_aligned, made, made.set_timesteps)
    return made


def _set_aligned(made: Any, set_timesteps: Any, steps: int, **rest: Any) -> None:
    """The scheduler takes these levels from its caller."""
    levels = TEN_ALIGNED if steps == len(TEN_ALIGNED) else aligned(0, 0, steps)
    lowest = float(((1 - made.alphas_cumprod[0]) / made.alphas_cumprod[0]) ** 0.5)
    last = 0.0 if made.config.final_sigmas_type == "zero" else lowest
    set_timesteps(sigmas=[*levels, last], **rest)
    made.num_inference_steps = steps


def eta_of(name: str) -> float:
    """Return the eta for diffusers' pipelines, which would replace a scheduler's default by 0."""
    return TCD_ETA if name == "tcd" else 0.0


def asked_of(params: GenerationParams, output_type: str) -> dict[str, Any]:
    """Return the arguments that all of diffusers' pipelines share."""
    assert params.seed is not None
    return {
        "prompt": params.prompt,
        "num_inference_steps": params.steps,
        "guidance_scale": params.guidance,
        "eta": eta_of(params.scheduler),
        "generator": torch.Generator("cpu").manual_seed(params.seed),
        "output_type": output_type,
    }
