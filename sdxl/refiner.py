"""SDXL's refiner: a second model that takes the last steps of a picture in the same loop.

Podell et al., "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis",
arXiv:2307.01952. The refiner has its own UNet and text encoder, and continues from the same
latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sdxl import schedulers
from sdxl.checkpoint import Checkpoint
from sdxl.conditioning import Conditioning, encode, tokenize_rows
from sdxl.engine import Engines
from sdxl.model_names import MINI_NAME, MINI_NAMES
from sdxl.params import REFINER_SWITCH_AT, GenerationParams, InvalidParams, value_or
from sdxl.rows import Stage
from sdxl.schedulers import SchedulerConfig


@dataclass
class Refiner:
    """A refiner on the model's device."""

    checkpoint: Checkpoint
    engines: Engines
    given: str = ""
    """what it was loaded by: a name, a folder, a file or a hub id"""

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it. A request's text is only compared, never taken for a path."""
        return self.name, self.given, *(MINI_NAMES if self.name == MINI_NAME else ())

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
        """Add the refiner's conditioning to the requests that name the refiner. With
        `embeds_guidance` they have no negative row."""
        checkpoint = self.checkpoint
        refined = [each for each in params if each.refiner is not None]
        rows = [
            tokenize_rows(
                each,
                checkpoint.tokenizers,
                checkpoint.force_zeros,
                embeds_guidance=embeds_guidance,
            )
            for each in refined
        ]
        encoded = iter(encode(refined, rows, self.engines, fixed_chunks=fixed_chunks))
        return [
            each if request.refiner is None else replace(each, refined=next(encoded))
            for each, request in zip(conditionings, params, strict=True)
        ]


def refined_from(leg: GenerationParams, config: SchedulerConfig) -> int | None:
    """Return the refiner's first step, chosen by timestep as in diffusers, since a refiner is
    trained for little noise. None without a refiner or a step for it."""
    if leg.refiner is None:
        return None
    timesteps = config.num_train_timesteps
    cutoff = round(timesteps - value_or(leg.refiner_switch_at, REFINER_SWITCH_AT) * timesteps)
    table = schedulers.table(leg.scheduler, leg.steps, config)
    step = max(table.steps_before(cutoff) - leg.first_step, 0)
    return step if step < leg.taken_steps else None


def check_refiner(refiner: Refiner | None, params: GenerationParams) -> None:
    """Raise InvalidParams if the request names a refiner that is not loaded."""
    if params.refiner is None or (refiner is not None and params.refiner == refiner.name):
        return
    if refiner is None:
        needed = "cannot be used: no refiner is loaded (start with --refiner MODEL)"
        raise InvalidParams("refiner", None, needed)
    raise InvalidParams("refiner", params.refiner, f"must be {refiner.name}")
