"""diffusers' pipelines, and its scheduler for each name here, made from a checkpoint's config."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sdxl.checkpoint import MINI
from sdxl.params import GenerationParams
from sdxl.scheduler_names import SCHEDULERS
from sdxl.schedulers.levels import aligned
from sdxl.schedulers.solvers import TCD_ETA

CONFIG = json.loads((MINI / "scheduler" / "scheduler_config.json").read_text())
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
    pipe = _class_of(kind)(**{**base.components, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def opened_pipe(kind: str, folder: Path) -> Any:
    """Return diffusers' pipeline of this kind with the checkpoint in a folder."""
    pipe = _class_of(kind).from_pretrained(str(folder), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _class_of(kind: str) -> Any:
    return getattr(diffusers, f"StableDiffusionXL{kind}Pipeline")


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


@torch.inference_mode()
def diffusers_image(
    pipe: Any, params: GenerationParams, output_type: str = "pt", **more: Any
) -> Tensor:
    """Return the pipeline's picture in -1..1, or with the type "latent" its latents."""
    assert params.seed is not None
    pipe.scheduler = their_scheduler(params.scheduler, CONFIG)
    found: Tensor = pipe(
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        width=params.width,
        height=params.height,
        num_inference_steps=params.steps,
        guidance_scale=params.guidance,
        # The pipelines would replace a scheduler's default by 0.
        eta=TCD_ETA if params.scheduler == "tcd" else 0.0,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        output_type=output_type,
        **more,
    ).images[0]
    return found * 2 - 1 if output_type == "pt" else found


@torch.inference_mode()
def encoded(pipe: Any, image: Image.Image, hidden: Image.Image | None = None) -> Tensor:
    """Return the mean of an image's latents, because the pipelines would sample them. `hidden`: a
    mask, under which the image is grey."""
    pixels = pipe.image_processor.preprocess(image)
    if hidden is not None:
        pixels = pixels * (torch.from_numpy(np.array(hidden) / 255) < 0.5)
    return pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor
