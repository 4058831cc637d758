"""Enlarges the first leg's result to the source of an upscaled picture's second leg."""

from __future__ import annotations

from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from sdxl.editing import SourceLatents
from sdxl.images import Pixels
from sdxl.params import GenerationParams
from sdxl.source import SHARP, SourceImage


def enlarged_picture(pixels: Pixels, leg: GenerationParams) -> SourceImage:
    """Return the picture as a source of the leg's size."""
    assert leg.width and leg.height
    return SourceImage(Image.fromarray(pixels).resize((leg.width, leg.height), SHARP), None)


def enlarged_latents(latents: Tensor, height: int, width: int) -> SourceLatents:
    """Interpolate bilinearly, as stable-diffusion-webui's "Latent" does."""
    whole = interpolate(latents.cpu()[None], (height, width), mode="bilinear")
    return SourceLatents(whole[0])
