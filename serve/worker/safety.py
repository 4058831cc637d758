"""Checks finished pictures with a safety checker, and blurs or refuses flagged ones.

The checker comes from the checkpoint, in diffusers' layout, or is the operator's function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn.functional import normalize

from engines.choice import function_named
from sdxl.images import Pixels
from sdxl.params import InvalidParams
from serve.settings import BLUR, SAFETY_OFF, ServeSettings

FOLDER = "safety_checker"
SPECIAL_CARE = 0.01
"""Subtracted from the thresholds if a picture resembles a concept of special care, as diffusers
does."""
LENIENT = 0.02
"""Added to the thresholds for requests with moderation low."""
BLUR_SHARE = 1 / 16
"""The blur's radius, as a share of the picture's longer side."""

Checker = Callable[[Pixels, bool], bool]
"""Takes a picture and whether to be lenient; returns whether the picture is flagged."""


class Unsafe(Exception):
    """The checker flagged the picture."""


@dataclass(frozen=True)
class Shown:
    """A picture after the check, blurred if it was flagged."""

    pixels: Pixels
    is_flagged: bool = False


@dataclass(frozen=True)
class Safety:
    mode: str = SAFETY_OFF
    checker: Checker | None = None

    def apply(self, pixels: Pixels, *, is_lenient: bool) -> Shown:
        """Blur the picture if it is flagged. Raise Unsafe if flagged pictures are refused."""
        if self.checker is None or not self.checker(pixels, is_lenient):
            return Shown(pixels)
        if self.mode != BLUR:
            raise Unsafe
        return Shown(blurred(pixels), is_flagged=True)


UNCHECKED = Safety()


def blurred(pixels: Pixels) -> Pixels:
    radius = max(pixels.shape[:2]) * BLUR_SHARE
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


def read_safety(settings: ServeSettings, model: Path, device: torch.device) -> Safety:
    """Load the checker of the settings, or the one in the model's folder."""
    mode, name = settings.safety, settings.safety_checker
    if mode == SAFETY_OFF:
        return UNCHECKED
    folder = Path(name).expanduser() if name else model / FOLDER
    if folder.is_dir():
        return Safety(mode, ClipChecker(folder, device))
    if ":" in name:
        return Safety(mode, function_named("safety_checker", name))
    needed = "must be a folder or package.module:function"
    if not name:
        needed = f"must be given for --safety {mode}: the model has no folder {FOLDER}"
    raise InvalidParams("safety_checker", name or None, needed)


class ClipChecker:
    """Flags a picture whose similarity to a concept exceeds the concept's threshold."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from diffusers.pipelines.stable_diffusion.safety_checker import (
            StableDiffusionSafetyChecker,
        )
        from transformers import CLIPImageProcessor

        try:
            module: Any = StableDiffusionSafetyChecker.from_pretrained(folder)
        except (OSError, ValueError, RuntimeError) as error:
            needed = f"must hold diffusers' StableDiffusionSafetyChecker ({error})"
            raise InvalidParams("safety_checker", str(folder), needed) from error
        side = module.config.vision_config.image_size
        self.processor: Any = CLIPImageProcessor(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
        self.module, self.device = module.eval().to(device), device

    @torch.inference_mode()
    def __call__(self, pixels: Pixels, is_lenient: bool) -> bool:
        image = self.processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
        pooled = self.module.vision_model(image.to(self.device))[1]
        embedding = normalize(self.module.visual_projection(pooled))
        margin = LENIENT if is_lenient else 0.0
        if self._resembles(embedding, "special_care_embeds", margin):
            margin -= SPECIAL_CARE
        return self._resembles(embedding, "concept_embeds", margin)

    def _resembles(self, embedding: Tensor, concepts: str, margin: float) -> bool:
        similar = embedding @ normalize(getattr(self.module, concepts)).T
        return bool((similar > getattr(self.module, f"{concepts}_weights") + margin).any())
