"""The timesteps and noise levels of a schedule. A level is sigma/alpha.

Karras: Karras et al. 2022 (arXiv 2206.00364), equation 5. Beta: Lee et al. 2024 (2407.12173). Align
your steps: Sabour et al. 2024 (2404.14507).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sdxl.params import InvalidParams
from sdxl.scheduler_config import SchedulerConfig
from sdxl.schedulers.tables import Array

KARRAS_RHO = 7.0
BETA_SHAPE = 0.6
ALIGNED = (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029)
"""SDXL's levels of ten steps and of the end. Other numbers of steps interpolate the logarithms."""


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
