"""Computes the noise of each timestep of a checkpoint's training."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from sdxl.scheduler_config import SchedulerConfig
from sdxl.schedulers.tables import Array


def final_level(config: SchedulerConfig) -> float:
    return 0.0 if config.final_sigmas_type == "zero" else float(trained_levels(config)[0])


def trained_levels(config: SchedulerConfig) -> Array:
    """Return sigma/alpha at every trained timestep."""
    # torch's and numpy's float32 roots differ in the last bit, and Karras timesteps depend on it.
    products = torch.tensor(alphas_cumprod(config, is_floored=True), dtype=torch.float32)
    return (((1 - products) / products) ** 0.5).double().numpy()


@lru_cache(maxsize=16)
def alphas_cumprod(config: SchedulerConfig, is_floored: bool) -> Array:
    """Return alpha**2 at every trained timestep, computed in float32 as in training."""
    betas = _betas(config)
    if config.rescale_betas_zero_snr:
        betas = _rescale_zero_snr(betas)
    products = torch.cumprod(1.0 - betas, dim=0)
    if config.rescale_betas_zero_snr and is_floored:
        products[-1] = 2**-24  # keeps the first noise level finite
    shared: Array = products.double().numpy()
    shared.setflags(write=False)
    return shared


def _betas(config: SchedulerConfig) -> Tensor:
    count, low, high = config.num_train_timesteps, config.beta_start, config.beta_end
    if config.trained_betas is not None:
        return torch.tensor(config.trained_betas, dtype=torch.float32)
    if config.beta_schedule == "linear":
        return torch.linspace(low, high, count, dtype=torch.float32)
    if config.beta_schedule == "scaled_linear":
        return torch.linspace(low**0.5, high**0.5, count, dtype=torch.float32) ** 2
    # Nichol & Dhariwal 2021 (2102.09672), capped at 0.999.
    kept = [math.cos((i / count + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(count + 1)]
    capped = [min(1 - kept[i + 1] / kept[i], 0.999) for i in range(count)]
    return torch.tensor(capped, dtype=torch.float32)


def _rescale_zero_snr(betas: Tensor) -> Tensor:
    """Lin et al. 2023 (2305.08891), algorithm 1: shift sqrt(alpha) so that the last one is zero."""
    roots = torch.cumprod(1.0 - betas, dim=0).sqrt()
    first, last = roots[0].clone(), roots[-1].clone()
    products = ((roots - last) * (first / (first - last))) ** 2
    return 1 - torch.cat([products[:1], products[1:] / products[:-1]])
