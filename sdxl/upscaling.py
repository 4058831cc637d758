"""From the first leg of an upscaled picture to what its second leg begins with.

The picture of the first leg is an edit's source at the larger size, so its enlarging is that of any
source; latents are interpolated, without a decoder or an encoder.
"""

from __future__ import annotations

from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from sdxl.editing import SourceLatents
from sdxl.images import Pixels
from sdxl.params import GenerationParams
from sdxl.source import SHARP, SourceImage


def enlarged_picture(pixels: Pixels, leg: GenerationParams) -> SourceImage:
    """Of the size that `leg`, with its size filled, is made in."""
    assert leg.width and leg.height
    return SourceImage(Image.fromarray(pixels).resize((leg.width, leg.height), SHARP), None)


def enlarged_latents(latents: Tensor, height: int, width: int) -> SourceLatents:
    """Bilinear, as stable-diffusion-webui's "Latent"."""
    whole = interpolate(latents.cpu()[None], (height, width), mode="bilinear")
    return SourceLatents(whole[0])
