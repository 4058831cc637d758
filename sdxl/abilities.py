"""Checks requests against a model's networks and scheduler; errors name the field."""

from __future__ import annotations

from sdxl import schedulers
from sdxl.engine import Engines
from sdxl.image_codec import ENCODER
from sdxl.params import LATENT, GenerationParams, InvalidParams
from sdxl.schedulers import SchedulerConfig


def check_able(engines: Engines, params: GenerationParams) -> None:
    """Raise InvalidParams for guidance, adapters or an image that the engines do not support."""
    for name in ("guidance_interval", "guided_steps"):
        value = getattr(params, name)
        if value is not None and engines.arch.embeds_guidance:
            needed = "cannot be set: this model reads the guidance in every step"
            raise InvalidParams(name, value, needed)
    for name, what, shelf in (
        ("loras", "LoRAs", engines.adapters),
        ("controls", "ControlNets", engines.controls),
        ("image_prompts", "image prompts", engines.image_prompts),
    ):
        if getattr(params, name) and shelf is None:
            needed = f"cannot be applied: these engines have no networks with {what}"
            raise InvalidParams(name, None, needed)
    is_encoded = params.is_upscaled and params.upscaler != LATENT
    if ENCODER in engines.by_name or not (params.is_edit or is_encoded):
        return
    needed = f"needs engines with {ENCODER} (run sdxl export and sdxl build again)"
    if params.is_edit:
        raise InvalidParams("image", "an edit", needed)
    raise InvalidParams("upscale", params.upscale, f"{needed}; or upscaler {LATENT}")


def check_schedules(params: GenerationParams, config: SchedulerConfig) -> None:
    """Raise InvalidParams if the scheduler cannot take the steps of a leg of a resolved request."""
    for field, leg in zip(("steps", "upscale_steps"), params.legs, strict=False):
        try:
            schedulers.table(leg.scheduler, leg.steps, config)
        except InvalidParams as error:
            if error.field != "steps":
                raise
            raise InvalidParams(field, error.value, error.allowed) from None
