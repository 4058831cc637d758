"""The timesteps and noise levels of a checkpoint's training and of a schedule. A level is
sigma/alpha.

Karras: Karras et al. 2022 (arXiv 2206.00364), equation 5. Beta: Lee et al. 2024 (2407.12173). Align
your steps: Sabour et al. 2024 (2404.14507).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sdxl.params import InvalidParams
from sdxl.scheduler_config import SchedulerConfig
from sdxl.schedulers.tables import Array

KARRAS_RHO = 7.0
BETA_SHAPE = 0.6
ALIGNED = (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029)
"""SDXL's levels of ten steps and of the end. Other numbers of steps interpolate the logarithms."""


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


def timesteps_of(spacing: str, steps: int, config: SchedulerConfig, skip: int = 0) -> Array:
    """Return descending timesteps without the `skip` lowest: DPM++ counts the end as a step."""
    total = config.num_train_timesteps
    if spacing == "linspace":
        return np.linspace(0, total - 1, steps + skip)[::-1][:steps]
    if spacing == "trailing":
        # Rounding may add a step to arange; diffusers then takes an extra step at timestep -1.
        return np.arange(total, 0, -(total / steps)).round()[:steps] - 1
    if steps + skip > total:
        raise InvalidParams("steps", steps, f"must be at most {total - skip} with this scheduler")
    spread = np.arange(steps + skip) * (total // (steps + skip))
    return spread[::-1][:steps].astype(np.float64) + config.steps_offset


def timesteps_at(levels: Array, trained: Array) -> Array:
    """Return the timesteps of these levels, interpolated between trained ones as in diffusers."""
    logs = np.log(trained.astype(np.float32))
    wanted = np.log(np.maximum(levels, 1e-10))
    low = np.clip(np.searchsorted(logs, wanted, side="right") - 1, 0, len(logs) - 2)
    part = np.clip((logs[low] - wanted) / (logs[low] - logs[low + 1]), 0, 1)
    return (1 - part) * low + part * (low + 1)


def karras(highest: float, lowest: float, steps: int) -> Array:
    high, low = highest ** (1 / KARRAS_RHO), lowest ** (1 / KARRAS_RHO)
    return (high + np.linspace(0, 1, steps) * (low - high)) ** KARRAS_RHO


def pairs(levels: Array, final: float) -> tuple[Array, Array]:
    """Return the noise levels at the start and end of each step, in diffusers' float32."""
    rounded = np.append(levels, final).astype(np.float32).astype(np.float64)
    return rounded[:-1], rounded[1:]


def exponential(highest: float, lowest: float, steps: int) -> Array:
    return np.exp(np.linspace(np.log(highest), np.log(lowest), steps))


def beta(highest: float, lowest: float, steps: int) -> Array:
    from scipy.special import betaincinv

    parts = betaincinv(BETA_SHAPE, BETA_SHAPE, 1 - np.linspace(0, 1, steps))
    return lowest + parts * (highest - lowest)


def aligned(_highest: float, _lowest: float, steps: int) -> Array:
    known = np.linspace(0, 1, len(ALIGNED))
    wanted = np.linspace(0, 1, steps + 1)[:-1]
    return np.exp(np.interp(wanted, known, np.log(ALIGNED)))


SPREADS: Mapping[str, Callable[[float, float, int], Array]] = {
    "karras": karras,
    "exponential": exponential,
    "beta": beta,
    "aligned": aligned,
}
"""Functions that return levels from the highest to the lowest, by their name in
sdxl/scheduler_names.py."""
