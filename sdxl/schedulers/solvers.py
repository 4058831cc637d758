"""Makes the table of each solver.

Symbols follow the papers: a noisy x is alpha*x0 + sigma*eps, and lambda = log(alpha/sigma). A
"level" is the ratio sigma/alpha, exp(-lambda). Euler and ancestral Euler: Karras et al. 2022
(arXiv 2206.00364); DDIM: Song et al. 2020 (2010.02502); DPM++ 2M and its SDE: Lu et al. 2022
(2211.01095); LCM: Luo et al. 2023 (2310.04378); TCD: Zheng et al. 2024 (2402.19159).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from sdxl.params import InvalidParams
from sdxl.scheduler_config import SchedulerConfig
from sdxl.schedulers.levels import (
    SPREADS,
    alphas_cumprod,
    final_level,
    pairs,
    timesteps_at,
    timesteps_of,
    trained_levels,
)
from sdxl.schedulers.tables import COLUMNS, Array, Table

TCD_ETA = 0.3
"""share of fresh noise in each TCD step; the default of the paper and of diffusers"""
LCM_DATA = 0.5
"""standard deviation of LCM's training data"""


def _euler(steps: int, config: SchedulerConfig, spread: str, is_ancestral: bool = False) -> Table:
    spacing = config.timestep_spacing or "linspace"
    timesteps = timesteps_of(spacing, steps, config).astype(np.float32).astype(np.float64)
    trained = trained_levels(config)
    levels = np.interp(timesteps, np.arange(len(trained)), trained)
    # diffusers' ancestral scheduler ignores the config's Karras levels and final_sigmas_type.
    if spread and not is_ancestral:
        levels = SPREADS[spread](levels[0], levels[-1], steps)
        timesteps = timesteps_at(levels, trained).astype(np.float32).astype(np.float64)
    level, after = pairs(levels, 0.0 if is_ancestral else final_level(config))
    # An ancestral step goes further down, to after**2/level, and adds fresh noise instead.
    down = after**2 / level if is_ancestral else after
    up = np.sqrt(np.maximum(after**2 - down**2, 0.0))
    alpha = 1 / np.sqrt(1 + level**2)
    from_x, from_output = _estimate(config, alpha, level * alpha)
    rows = _rows(
        scale=alpha,
        timesteps=timesteps,
        estimate=(from_x * alpha, from_output),
        keep=down / level,
        pull=1 - down / level,
        noise=up,
    )
    top = float(level.max())
    start = top if spacing in ("linspace", "trailing") else math.sqrt(top**2 + 1)
    return Table(rows, start, _together(np.ones(steps), level))


def _ddim(steps: int, config: SchedulerConfig, spread: str) -> Table:
    timesteps = timesteps_of(config.timestep_spacing or "leading", steps, config).round()
    products = alphas_cumprod(config, is_floored=False)
    final = 1.0 if config.set_alpha_to_one else products[0]
    index = timesteps.astype(np.int64)
    before = index - config.num_train_timesteps // steps
    # An offset can exceed the schedule by one (1000 steps, leading): use the last entry.
    now = products[np.minimum(index, len(products) - 1)]
    then = np.where(before >= 0, products[np.maximum(before, 0)], final)
    alpha, sigma = np.sqrt(now), np.sqrt(1 - now)
    keep = np.sqrt(1 - then) / sigma
    rows = _rows(
        scale=np.ones(steps),
        timesteps=timesteps,
        estimate=_estimate(config, alpha, sigma),
        keep=keep,
        pull=np.sqrt(then) - keep * alpha,
    )
    return Table(rows, 1.0, _together(alpha, sigma))


def _dpmpp_2m(steps: int, config: SchedulerConfig, spread: str, is_noisy: bool = False) -> Table:
    trained = trained_levels(config)
    if spread:
        # As in diffusers: the levels span the whole schedule, while _euler's span its timesteps,
        # and only Karras timesteps are rounded.
        levels = SPREADS[spread](trained[-1], trained[0], steps)
        timesteps = timesteps_at(levels, trained)
        is_rounded = spread == "karras" and config.beta_schedule != "squaredcos_cap_v2"
        timesteps = timesteps.round() if is_rounded else np.trunc(timesteps)
    else:
        timesteps = timesteps_of(
            config.timestep_spacing or "linspace", steps, config, skip=1
        ).round()
        levels = np.interp(timesteps, np.arange(len(trained)), trained)
    level, after = pairs(levels, final_level(config))
    alpha, alpha_after = 1 / np.sqrt(1 + level**2), 1 / np.sqrt(1 + after**2)
    ratio = after / level
    # The SDE goes twice as far down in lambda and adds fresh noise instead.
    extra = ratio if is_noisy else np.ones(steps)
    pull = alpha_after * (1 - ratio * extra)
    rows = _rows(
        scale=np.ones(steps),
        timesteps=timesteps,
        estimate=_estimate(config, alpha, level * alpha),
        keep=after * alpha_after / (level * alpha) * extra,
        pull=pull,
        trend=_trend(level, after, pull),
        noise=after * alpha_after * np.sqrt(1 - extra**2),
    )
    return Table(rows, 1.0, _together(alpha, level * alpha))


def _lcm(steps: int, config: SchedulerConfig, spread: str) -> Table:
    timesteps, alpha, sigma = _distilled(steps, config)
    scaled = timesteps * config.timestep_scaling
    skip = LCM_DATA**2 / (scaled**2 + LCM_DATA**2)
    out = scaled / np.sqrt(scaled**2 + LCM_DATA**2)
    # The last step adds no noise.
    alpha_after, sigma_after = np.append(alpha[1:], 1.0), np.append(sigma[1:], 0.0)
    rows = _rows(
        scale=np.ones(steps),
        timesteps=timesteps,
        estimate=_estimate(config, alpha, sigma),
        keep=alpha_after * skip,
        pull=alpha_after * out,
        noise=sigma_after,
    )
    return Table(rows, 1.0, _together(alpha, sigma))


def _tcd(steps: int, config: SchedulerConfig, spread: str) -> Table:
    timesteps, alpha, sigma = _distilled(steps, config)
    products = alphas_cumprod(config, is_floored=False)
    after = np.append(timesteps[1:], 0.0)
    # A step goes to a level below the next one, computed in float32 as in diffusers, and then up to
    # the next one with fresh noise.
    below = np.floor(np.float32(1 - TCD_ETA) * after.astype(np.float32)).astype(np.int64)
    alpha_below, sigma_below = np.sqrt(products[below]), np.sqrt(1 - products[below])
    up = np.sqrt(products[after.astype(np.int64)]) / alpha_below
    up[-1] = 1.0
    keep = sigma_below / sigma
    rows = _rows(
        scale=np.ones(steps),
        timesteps=timesteps,
        estimate=_estimate(config, alpha, sigma),
        keep=up * keep,
        pull=up * (alpha_below - keep * alpha),
        noise=np.sqrt(np.maximum(1 - up**2, 0.0)),
    )
    return Table(rows, 1.0, _together(alpha, sigma))


def _distilled(steps: int, config: SchedulerConfig) -> tuple[Array, Array, Array]:
    """Choose among the distillation's timesteps; return them with their alpha and sigma."""
    total, most = config.num_train_timesteps, config.original_inference_steps
    if steps > most:
        raise InvalidParams("steps", steps, f"must be at most {most} with this scheduler")
    known = np.arange(1, most + 1) * (total // most) - 1
    chosen = np.floor(np.linspace(0, most, num=steps, endpoint=False)).astype(np.int64)
    timesteps = known[::-1][chosen]
    products = alphas_cumprod(config, is_floored=False)[timesteps]
    return timesteps.astype(np.float64), np.sqrt(products), np.sqrt(1 - products)


def _trend(level: Array, after: Array, pull: Array) -> Array:
    """Return the weight of (x0 - previous x0): second order, or zero in first-order steps."""
    advance = np.log(level / after)
    last_advance = np.concatenate([[0.0], advance[:-1]])
    # A repeated timestep has no slope to extrapolate, so the step after it is first order.
    is_second = last_advance > 0
    if len(level) < 15 or after[-1] == 0:
        is_second[-1] = False
    ratio = np.divide(advance, last_advance, out=np.zeros_like(advance), where=is_second)
    return 0.5 * pull * ratio


def _rows(
    scale: Array,
    timesteps: Array,
    estimate: tuple[Array, Array],
    keep: Array,
    pull: Array,
    trend: Array | float = 0.0,
    noise: Array | float = 0.0,
) -> Array:
    """Return the rows of x' = keep*x + pull*x0 + trend*(x0 - h) + noise*z; x0 = e*x + f*eps."""
    e, f = estimate
    by_name = {
        "s": scale,
        "timestep": timesteps,
        "a": keep + (pull + trend) * e,
        "b": (pull + trend) * f,
        "c": np.negative(trend),
        "d": noise,
        "e": e,
        "f": f,
    }
    shape = timesteps.shape
    return np.stack([np.broadcast_to(by_name[name], shape) for name in COLUMNS], axis=1)


def _together(signal: Array, noise: Array) -> Array:
    """Return alpha and sigma of every step and of the finished picture."""
    return np.stack([np.append(signal, 1.0), np.append(noise, 0.0)], axis=1)


def _estimate(config: SchedulerConfig, alpha: Array, sigma: Array) -> tuple[Array, Array]:
    """Return x0's coefficients of x = alpha*x0 + sigma*eps and of the model's output."""
    if config.prediction_type == "v_prediction":
        return alpha, -sigma
    return 1 / alpha, -sigma / alpha


SOLVERS: Mapping[str, Callable[[int, SchedulerConfig, str], Table]] = {
    "euler": _euler,
    "euler_a": partial(_euler, is_ancestral=True),
    "ddim": _ddim,
    "dpmpp_2m": _dpmpp_2m,
    "dpmpp_2m_sde": partial(_dpmpp_2m, is_noisy=True),
    "lcm": _lcm,
    "tcd": _tcd,
}
"""solvers by their name in scheduler_names.py; the third argument is a key of SPREADS or empty"""
