"""Encodes source images and masks with the VAE, and decodes latents to pictures.

It knows no schedulers and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sdxl.editing import MaskedPicture, SourceLatents
from sdxl.engine import Engines, call, to_host, torch_dtype
from sdxl.images import BrokenImage, Pixels, rounded
from sdxl.source import SourceImage

ENCODER = "vae_encoder"
MOST_GREYS = 64
"""sizes whose grey latents are cached"""
Encoded = tuple[Tensor, Tensor]
"""mean and deviation, [channels, h, w] each"""
BROKEN = "the decoded image holds NaN or infinity"


@dataclass(frozen=True)
class ImageEncoder:
    engines: Engines
    _grey: dict[tuple[int, int], Encoded] = field(default_factory=dict)
    """latents of a grey image by height and width"""

    def latents(self, source: SourceImage, *, is_sampled: bool, is_full: bool) -> SourceLatents:
        """Encode a source. `is_full`: the strength is 1, and diffusers hides the masked part."""
        picture, mask = _pixels(source.image), source.mask
        is_hidden = mask is not None and is_full
        masked = self._masked(picture, mask, is_sampled=is_sampled)
        if masked is not None and is_hidden:
            return SourceLatents(masked.mean, is_hidden=True, masked=masked)
        mean, deviation = self._encoded(picture)
        scale = self.engines.arch.vae_scale
        soft = _white(mask.reduce(scale)) if mask is not None and masked is None else None
        return SourceLatents(mean, deviation if is_sampled else None, soft, is_hidden, masked)

    def completed(
        self, source: SourceLatents | None, height: int, width: int
    ) -> SourceLatents | None:
        """Add an inpainting UNet's extra input to a request without a mask: everything is masked,
        so that the UNet also makes pictures from text."""
        if not self.engines.arch.masked_channels or (source and source.masked):
            return source
        masked = self._all_masked(height, width)
        if source is None:
            return SourceLatents(masked.mean, is_hidden=True, masked=masked)
        return replace(source, masked=masked)

    def _all_masked(self, height: int, width: int, *, is_sampled: bool = False) -> MaskedPicture:
        """Return the latents of a grey image under a mask that covers it."""
        encoded = self._grey.get((height, width))
        if encoded is None:
            if len(self._grey) >= MOST_GREYS:
                self._grey.clear()
            scale, channels = self.engines.arch.vae_scale, self.engines.arch.image_channels
            encoded = self._encoded(torch.zeros(channels, height * scale, width * scale))
            self._grey[height, width] = encoded
        mean, deviation = encoded
        return MaskedPicture(torch.ones(1, height, width), mean, deviation if is_sampled else None)

    def _masked(
        self, picture: Tensor, mask: Image.Image | None, *, is_sampled: bool
    ) -> MaskedPicture | None:
        """Round the mask to 0 or 1 and hide the image under it, as diffusers does."""
        if not self.engines.arch.masked_channels:
            return None
        scale = self.engines.arch.vae_scale
        if mask is None:
            height, width = (side // scale for side in picture.shape[1:])
            return self._all_masked(height, width, is_sampled=is_sampled)
        hole = _white(mask).round()
        mean, deviation = self._encoded(picture * (1 - hole))
        return MaskedPicture(hole[:, ::scale, ::scale], mean, deviation if is_sampled else None)

    def _encoded(self, picture: Tensor) -> Encoded:
        """Encode [channels, height, width] in -1..1."""
        engine, arch = self.engines[ENCODER], self.engines.arch
        dtype = torch_dtype(engine.spec.inputs[0])
        with self.engines.on_stream():
            inputs = {"image": picture[None].to(self.engines.device, dtype).contiguous()}
            outputs = call(engine, arch, inputs)
            mean, deviation = (
                to_host(outputs[name][0].float(), self.engines) for name in ("mean", "deviation")
            )
            self.engines.fence().wait()
        return mean, deviation


def _pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).movedim(-1, 0).float() / 127.5 - 1


def _white(mask: Image.Image) -> Tensor:
    """Return the mask as [1, height, width] in 0..1."""
    return torch.from_numpy(np.array(mask))[None].float() / 255


@dataclass(frozen=True)
class ImageDecoder:
    engines: Engines

    def image(self, latents: Tensor) -> Tensor:
        """Decode [channels, h, w] to [3, height, width] in -1..1."""
        return checked(self.launch([latents])()[0])

    def pixels(self, latents: Tensor) -> Pixels:
        """Decode [channels, h, w] to 8 bits, [height, width, 3]. The device rounds before the
        copy, which has a quarter of the bytes then."""
        with self.engines.on_stream():
            image, is_finite = rounded(self._decoded([latents])[0])
            host, is_host_finite = to_host(image, self.engines), to_host(is_finite, self.engines)
            self.engines.fence().wait()
        if not is_host_finite:
            raise BrokenImage(BROKEN)
        return host.numpy()

    def launch(self, latents: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start to decode images of one size. Return a function that waits for the images."""
        with self.engines.on_stream():
            host = to_host(self._decoded(latents).float(), self.engines)
            fence = self.engines.fence()

        def images() -> Tensor:
            fence.wait()
            return host

        return images

    def _decoded(self, latents: Sequence[Tensor]) -> Tensor:
        engine = self.engines["vae_decoder"]
        dtype = torch_dtype(engine.spec.inputs[0])
        batch = torch.stack(list(latents)).to(self.engines.device, dtype)
        return call(engine, self.engines.arch, {"latents": batch})["image"]


def checked(image: Tensor) -> Tensor:
    # numpy's isfinite: PyTorch's would wake threads, which spin while other threads have work.
    if not np.isfinite(image.numpy()).all():
        raise BrokenImage(BROKEN)
    return image
