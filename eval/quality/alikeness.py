"""How alike two pictures are, pixel by pixel: PSNR and SSIM, by torchmetrics."""

from __future__ import annotations

import torch
from torchmetrics.functional.image import (
    peak_signal_noise_ratio,
    structural_similarity_index_measure,
)

from sdxl.images import Pixels

MOST_DB = 100.0
"""of equal pictures, whose PSNR has no bound"""


def psnr(picture: Pixels, other: Pixels) -> float:
    a, b = (torch.from_numpy(p).double() for p in (picture, other))
    return min(float(peak_signal_noise_ratio(a, b, data_range=255.0)), MOST_DB)


def ssim(picture: Pixels, other: Pixels) -> float:
    a, b = (torch.from_numpy(p).movedim(-1, 0)[None].float() for p in (picture, other))
    found = structural_similarity_index_measure(a, b, data_range=255.0)
    assert isinstance(found, torch.Tensor)
    return float(found)
