"""Decodes latents to pictures with the VAE.

It knows no schedulers and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sdxl.engine import Engines, call, to_host, torch_dtype
from sdxl.images import BrokenImage, Pixels, rounded

BROKEN = "the decoded image holds NaN or infinity"


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
