"""SDXL's refiner: a second model that takes the last steps of a picture in the same loop.

Podell et al., "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis",
arXiv:2307.01952. It has its own UNet and reads the prompt with its own text encoder; the latents go
over as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sdxl import schedulers
from sdxl.checkpoint import Checkpoint
from sdxl.conditioning import Conditioning, encode, tokenize_rows
from sdxl.engine import Engines
from sdxl.params import REFINER_SWITCH_AT, GenerationParams, InvalidParams, usual
from sdxl.rows import Stage
from sdxl.schedulers import SchedulerConfig


@dataclass
class Refiner:
    """One refiner on the device of the model."""

    checkpoint: Checkpoint
    engines: Engines

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @cached_property
    def stage(self) -> Stage:
        return Stage(self.engines)

    def added(
        self,
        conditionings: Sequence[Conditioning],
        params: Sequence[GenerationParams],
        fixed_chunks: int | None,
        *,
        embeds_guidance: bool,
    ) -> list[Conditioning]:
        """Add its own conditioning to those of requests that name it. `embeds_guidance`: the model
        needs no negative row, so there is none here."""
        known, how = self.checkpoint, embeds_guidance
        asked = [each for each in params if each.refiner is not None]
        given = known.tokenizers, known.force_zeros
        rows = [tokenize_rows(each, *given, embeds_guidance=how) for each in asked]
        own = iter(encode(asked, rows, self.engines, fixed_chunks=fixed_chunks))
        return [
            made if each.refiner is None else replace(made, refined=next(own))
            for made, each in zip(conditionings, params, strict=True)
        ]


def refined_from(leg: GenerationParams, config: SchedulerConfig) -> int | None:
    """The refiner's first step, by timestep as in diffusers: it knows little noise alone. None
    without a refiner, or if no step is left for it."""
    if leg.refiner is None:
        return None
    timesteps = config.num_train_timesteps
    cutoff = round(timesteps - usual(leg.refiner_switch_at, REFINER_SWITCH_AT) * timesteps)
    table = schedulers.table(leg.scheduler, leg.steps, config)
    step = max(table.steps_before(cutoff) - leg.first_step, 0)
    return step if step < leg.taken_steps else None


def check_refiner(refiner: Refiner | None, params: GenerationParams) -> None:
    """Check that the request names the refiner that is loaded, if any."""
    if params.refiner is None or (refiner is not None and params.refiner == refiner.name):
        return
    if refiner is None:
        needed = "cannot be used: no refiner is loaded (start with --refiner MODEL)"
        raise InvalidParams("refiner", None, needed)
    raise InvalidParams("refiner", params.refiner, f"must be {refiner.name}")
