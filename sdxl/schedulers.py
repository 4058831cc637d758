"""Every scheduler as data: a table of coefficients per request, and one step that serves any mix.

With model output eps, the previous estimate h of the finished picture and fresh noise z, all are
    x' = a*x + b*eps + c*h + d*z,    h' = e*x + f*eps,    model input = s*x.
It does not know networks, guidance, caches or where noise comes from.

Symbols follow the papers: a noisy x is alpha*x0 + sigma*eps, and lambda = log(alpha/sigma), so the
ratio sigma/alpha (a "level" here) is exp(-lambda). Euler and ancestral Euler: Karras et al. 2022
(arXiv 2206.00364); DDIM: Song et al. 2020 (2010.02502); DPM++ 2M: Lu et al. 2022 (2211.01095).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdxl.params import PARAMETERS, SCHEDULERS, InvalidParams
from sdxl.specs import brief

Array = NDArray[np.float64]

COLUMNS = ("s", "timestep", "a", "b", "c", "d", "e", "f")
KARRAS_RHO = 7.0

SAME_PROCESS = tuple(
    f"{name}Scheduler"
    for name in (
        *("EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "LMSDiscrete", "DDIM", "DDPM"),
        *("PNDM", "DPMSolverMultistep", "DPMSolverSinglestep", "DPMSolverSDE", "DEISMultistep"),
        *("UniPCMultistep", "KDPM2Discrete", "KDPM2AncestralDiscrete"),
    )
)
"""Classes whose checkpoints share one diffusion process: any of the solvers here may run them."""

MAX_TIMESTEPS = 100_000
NEEDED = {
    bool: "true or false",
    int: f"a whole number up to {MAX_TIMESTEPS}",
    float: "a number from 0 to 1",
    type(None): "a list of numbers from 0 to 1",
}
OFF = (False, None)
ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "_class_name": SAME_PROCESS,
    "prediction_type": ("epsilon", "v_prediction"),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "timestep_spacing": ("leading", "trailing", "linspace", None),
    "timestep_type": ("discrete", None),
    "final_sigmas_type": ("zero", "sigma_min", None),
    "interpolation_type": ("linear", None),
    "lambda_min_clipped": (-math.inf, None),
    "sigma_min": (None,),
    "sigma_max": (None,),
    "clip_sample": OFF,
    "thresholding": OFF,
    "use_exponential_sigmas": OFF,
    "use_beta_sigmas": OFF,
    "use_lu_lambdas": OFF,
    "use_flow_sigmas": OFF,
    "use_dynamic_shifting": OFF,
}
"""What a checkpoint may say. Its solver's own options (order, algorithm) are not read: the
request's scheduler name chooses those. An absent clip_sample counts as false, since latents have
no bounds to clip to."""


class UnsupportedScheduler(ValueError):
    """A checkpoint's scheduler configuration that no table here can express."""


@dataclass(frozen=True)
class SchedulerConfig:
    """The noise process a checkpoint was trained with. Defaults are those of diffusers."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: str = "epsilon"
    timestep_spacing: str | None = None
    """None: each scheduler's own default, as in diffusers."""
    steps_offset: int = 0
    set_alpha_to_one: bool = True
    final_sigmas_type: str = "zero"
    rescale_betas_zero_snr: bool = False
    use_karras_sigmas: bool = False
    """Turns `euler` and `dpmpp_2m` into their Karras forms, as it does in diffusers."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SchedulerConfig:
        """From a checkpoint's scheduler_config.json; keys that no table depends on are ignored."""
        for key, accepted in ACCEPTED.items():
            if key in values and values[key] not in accepted:
                raise UnsupportedScheduler(
                    f"scheduler_config {key}: {brief(values[key])} is not supported; "
                    f"needed one of {', '.join(repr(value) for value in accepted)}"
                )
        known = {f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None}
        _check_values(known)
        if "trained_betas" in known:
            known["trained_betas"] = tuple(known["trained_betas"])
        config = cls(**known)
        if config.trained_betas and len(config.trained_betas) != config.num_train_timesteps:
            raise UnsupportedScheduler(
                f"scheduler_config trained_betas: {len(config.trained_betas)} values; "
                f"needed num_train_timesteps = {config.num_train_timesteps}"
            )
        return config


def _check_values(known: Mapping[str, Any]) -> None:
    """Types and bounds, before a table is computed from them."""
    for field, value in known.items():
        default = getattr(SchedulerConfig, field)
        if field == "trained_betas":
            is_right = isinstance(value, list) and bool(value) and all(map(_is_beta, value))
        elif isinstance(default, bool):
            is_right = isinstance(value, bool)
        elif isinstance(default, int):
            low = 1 if field == "num_train_timesteps" else 0
            is_right = type(value) is int and low <= value <= MAX_TIMESTEPS
        elif isinstance(default, float):
            is_right = _is_beta(value)
        else:
            # A text, which was compared with those that are accepted.
            is_right = True
        if not is_right:
            raise UnsupportedScheduler(
                f"scheduler_config {field}: this {type(value).__name__} is not supported; needed "
                f"{NEEDED[type(default)]}"
            )


def _is_beta(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


@dataclass(frozen=True)
class Table:
    """One request's schedule: `rows` is [steps, len(COLUMNS)], `start` scales the first noise.

    `levels` is [steps + 1, 2]: what a finished picture and noise are scaled by, to be together what
    a step begins with, and at last what the whole ends with.
    """

    rows: Array
    start: float
    levels: Array

    def begun(self, at: int) -> Table:
        """The same from step `at` on. What its first step would read of an estimate before it,
        which there is none of, it takes from its own: one of the first order."""
        if at == 0:
            return self
        rows = self.rows[at:].copy()
        a, b, c, e, f = (COLUMNS.index(name) for name in "abcef")
        rows[0, a] += rows[0, c] * rows[0, e]
        rows[0, b] += rows[0, c] * rows[0, f]
        rows[0, c] = 0.0
        return Table(rows, self.start, self.levels[at:])

    def noised(self, latents: Tensor, noise: Tensor, at: int = 0) -> Tensor:
        """A picture's latents as they are where step `at` begins."""
        signal, level = self.levels[at]
        return float(signal) * latents + float(level) * noise


@lru_cache(maxsize=64)
def table(name: str, steps: int, config: SchedulerConfig) -> Table:
    """What diffusers' scheduler of this name, made from the checkpoint's config, would compute."""
    PARAMETERS["scheduler"].check(name)
    if not 1 <= steps <= config.num_train_timesteps:
        raise InvalidParams("steps", steps, f"needed 1 to {config.num_train_timesteps}")
    scheduler = SCHEDULERS[name]
    # A terminal alpha of zero divides by zero; the check below refuses what comes of it.
    with np.errstate(divide="ignore", invalid="ignore"):
        is_karras = config.use_karras_sigmas or scheduler.is_karras
        made = SOLVERS[scheduler.solver](steps, config, is_karras)
    if not np.isfinite(made.rows).all():
        raise UnsupportedScheduler(
            f"{name} has no finite steps for this checkpoint: prediction_type "
            f"{config.prediction_type!r} with rescale_betas_zero_snr needs another scheduler"
        )
    return made


def columns(coefficients: Tensor) -> tuple[Tensor, ...]:
    """Of float32 [n, len(COLUMNS)]: a view for each coefficient, a value per row of latents."""
    return coefficients[:, :, None, None, None].unbind(1)


def step(
    x: Tensor, eps: Tensor, h: Tensor | None, z: Tensor | None, coefficients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """One step of every row, whatever its scheduler: (x', h').

    Where c or d is zero, h and z are not read, so a slot's stale contents (NaN included) cannot
    reach a new request; where no row reads one, it may be None. An infinite eps does show.
    """
    # Few passes: a small model's shallow step is hardly longer than this.
    _, _, a, b, c, d, e, f = coefficients
    moved = (a * x).addcmul_(b, eps)
    for weight, value in ((c, h), (d, z)):
        if value is not None:
            moved.addcmul_(weight, torch.where(weight == 0, 0.0, value))
    return moved, (e * x).addcmul_(f, eps)


def _euler_ancestral(steps: int, config: SchedulerConfig, is_karras: bool) -> Table:
    # diffusers' ancestral scheduler does not know Karras levels, whatever the config says.
    return _euler(steps, config, is_karras=False, is_ancestral=True)


def _euler(
    steps: int, config: SchedulerConfig, is_karras: bool, is_ancestral: bool = False
) -> Table:
    spacing = config.timestep_spacing or "linspace"
    timesteps = _timesteps(spacing, steps, config).astype(np.float32).astype(np.float64)
    trained = _levels(config)
    levels = np.interp(timesteps, np.arange(len(trained)), trained)
    if is_karras:
        levels = _karras(levels[0], levels[-1], steps)
        timesteps = _timesteps_at(levels, trained).astype(np.float32).astype(np.float64)
    # diffusers' ancestral scheduler ends at zero whatever final_sigmas_type says.
    level, after = _pairs(levels, 0.0 if is_ancestral else _final(config))
    # Ancestral: go further down, to after**2/level, and make up for it with fresh noise.
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


def _ddim(steps: int, config: SchedulerConfig, is_karras: bool) -> Table:
    timesteps = _timesteps(config.timestep_spacing or "leading", steps, config).round()
    products = _alphas_cumprod(config, is_floored=False)
    final = 1.0 if config.set_alpha_to_one else products[0]
    index = timesteps.astype(np.int64)
    before = index - config.num_train_timesteps // steps
    # An offset can point one past the schedule (1000 steps, leading): the last entry stands for it.
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


def _dpmpp_2m(steps: int, config: SchedulerConfig, is_karras: bool) -> Table:
    trained = _levels(config)
    if is_karras:
        # The range is the whole schedule's; _euler's is that of the timesteps: as in diffusers.
        levels = _karras(trained[-1], trained[0], steps)
        timesteps = _timesteps_at(levels, trained)
        is_cosine = config.beta_schedule == "squaredcos_cap_v2"
        timesteps = np.trunc(timesteps) if is_cosine else timesteps.round()
    else:
        timesteps = _timesteps(config.timestep_spacing or "linspace", steps, config, skip=1).round()
        levels = np.interp(timesteps, np.arange(len(trained)), trained)
    level, after = _pairs(levels, _final(config))
    alpha, alpha_after = 1 / np.sqrt(1 + level**2), 1 / np.sqrt(1 + after**2)
    pull = alpha_after * (1 - after / level)
    rows = _rows(
        scale=np.ones(steps),
        timesteps=timesteps,
        estimate=_estimate(config, alpha, level * alpha),
        keep=after * alpha_after / (level * alpha),
        pull=pull,
        trend=_trend(level, after, pull),
    )
    return Table(rows, 1.0, _together(alpha, level * alpha))


def _trend(level: Array, after: Array, pull: Array) -> Array:
    """The weight of (x0 - previous x0), the second-order correction; zero in first-order steps."""
    advance = np.log(level / after)
    last_advance = np.concatenate([[0.0], advance[:-1]])
    # A repeated timestep advances by nothing and has no slope to extrapolate: first order.
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
    """x' = keep*x + pull*x0 + trend*(x0 - h) + noise*z, with x0 = e*x + f*eps put in."""
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
    """Of every step, and of the finished picture."""
    return np.stack([np.append(signal, 1.0), np.append(noise, 0.0)], axis=1)


def _estimate(config: SchedulerConfig, alpha: Array, sigma: Array) -> tuple[Array, Array]:
    """x0's coefficients on x = alpha*x0 + sigma*eps and on the model's output."""
    if config.prediction_type == "v_prediction":
        return alpha, -sigma
    return 1 / alpha, -sigma / alpha


def _timesteps(spacing: str, steps: int, config: SchedulerConfig, skip: int = 0) -> Array:
    """Descending timesteps; `skip` of the lowest are left out (DPM++ counts the end as one)."""
    total = config.num_train_timesteps
    if spacing == "linspace":
        return np.linspace(0, total - 1, steps + skip)[::-1][:steps]
    if spacing == "trailing":
        # arange may run one over by rounding; diffusers then takes an extra step at timestep -1.
        return np.arange(total, 0, -(total / steps)).round()[:steps] - 1
    if steps + skip > total:
        raise InvalidParams("steps", steps, f"needed at most {total - skip} with this scheduler")
    spread = np.arange(steps + skip) * (total // (steps + skip))
    return spread[::-1][:steps].astype(np.float64) + config.steps_offset


def _timesteps_at(levels: Array, trained: Array) -> Array:
    """Where between the trained timesteps these levels lie, rounding as diffusers rounds."""
    logs = np.log(trained.astype(np.float32))
    wanted = np.log(np.maximum(levels, 1e-10))
    low = np.clip(np.searchsorted(logs, wanted, side="right") - 1, 0, len(logs) - 2)
    part = np.clip((logs[low] - wanted) / (logs[low] - logs[low + 1]), 0, 1)
    between: Array = (1 - part) * low + part * (low + 1)
    return between


def _karras(highest: float, lowest: float, steps: int) -> Array:
    high, low = highest ** (1 / KARRAS_RHO), lowest ** (1 / KARRAS_RHO)
    spread: Array = (high + np.linspace(0, 1, steps) * (low - high)) ** KARRAS_RHO
    return spread


def _pairs(levels: Array, final: float) -> tuple[Array, Array]:
    """Each step's noise level and the one it goes to, to the float32 that diffusers keeps."""
    rounded = np.append(levels, final).astype(np.float32).astype(np.float64)
    return rounded[:-1], rounded[1:]


def _final(config: SchedulerConfig) -> float:
    return 0.0 if config.final_sigmas_type == "zero" else float(_levels(config)[0])


def _levels(config: SchedulerConfig) -> Array:
    """sigma/alpha at every trained timestep."""
    # torch's float32 root and numpy's differ in the last bit, and log(level) sets Karras timesteps.
    products = torch.tensor(_alphas_cumprod(config, is_floored=True), dtype=torch.float32)
    levels: Array = (((1 - products) / products) ** 0.5).double().numpy()
    return levels


@lru_cache(maxsize=16)
def _alphas_cumprod(config: SchedulerConfig, is_floored: bool) -> Array:
    """alpha**2 at every trained timestep, in float32 as the model saw it in training."""
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


SOLVERS: Mapping[str, Callable[[int, SchedulerConfig, bool], Table]] = {
    "euler": _euler,
    "euler_a": _euler_ancestral,
    "ddim": _ddim,
    "dpmpp_2m": _dpmpp_2m,
}
"""A table's maker for each solver that sdxl/params.py names."""
