"""Reads a checkpoint's scheduler_config.json, the noise process of its training, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sdxl.specs import brief

SAME_PROCESS = tuple(
    f"{name}Scheduler"
    for name in (
        *("EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "LMSDiscrete", "DDIM", "DDPM"),
        *("PNDM", "DPMSolverMultistep", "DPMSolverSinglestep", "DPMSolverSDE", "DEISMultistep"),
        *("UniPCMultistep", "KDPM2Discrete", "KDPM2AncestralDiscrete", "LCM", "TCD"),
    )
)
"""classes with the same diffusion process, whose checkpoints every solver here can run"""

DISTILLED = ("LCMScheduler", "TCDScheduler")
DISTILLED_DEFAULTS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
"""diffusers' defaults of these classes; other classes have SchedulerConfig's"""
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
"""Supported values. Solver options (order, algorithm) are ignored, because a request chooses its
solver. A missing clip_sample counts as false, since latents have no bounds."""


class UnsupportedScheduler(ValueError):
    """A scheduler configuration that no table here can express."""


@dataclass(frozen=True)
class SchedulerConfig:
    """The noise process that a checkpoint was trained with. The defaults are diffusers'."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: str = "epsilon"
    timestep_spacing: str | None = None
    """None: each solver's default, as in diffusers"""
    steps_offset: int = 0
    set_alpha_to_one: bool = True
    final_sigmas_type: str = "zero"
    rescale_betas_zero_snr: bool = False
    use_karras_sigmas: bool = False
    """makes `euler` and `dpmpp_2m` use Karras levels, as in diffusers"""
    original_inference_steps: int = 50
    """for LCM and TCD: the steps of the distillation, from which steps are chosen"""
    timestep_scaling: float = 10.0
    """for LCM: scale of the timestep in the weight of a step's estimate"""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SchedulerConfig:
        """Read scheduler_config.json; unused keys are ignored."""
        for key, accepted in ACCEPTED.items():
            if key in values and values[key] not in accepted:
                raise UnsupportedScheduler(
                    f"scheduler_config {key}: {brief(values[key])} is not supported; "
                    f"expected one of {', '.join(repr(value) for value in accepted)}"
                )
        known = {f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None}
        if values.get("_class_name") in DISTILLED:
            known = {**DISTILLED_DEFAULTS, **known}
        _check_values(known)
        if "trained_betas" in known:
            known["trained_betas"] = tuple(known["trained_betas"])
        config = cls(**known)
        if config.trained_betas and len(config.trained_betas) != config.num_train_timesteps:
            raise UnsupportedScheduler(
                f"scheduler_config trained_betas: {len(config.trained_betas)} values; "
                f"expected num_train_timesteps = {config.num_train_timesteps}"
            )
        return config


def _check_values(known: Mapping[str, Any]) -> None:
    """Check types and bounds before a table is computed from them."""
    for field, value in known.items():
        default = getattr(SchedulerConfig, field)
        if field == "trained_betas":
            is_right = isinstance(value, list) and bool(value) and all(map(_is_beta, value))
        elif isinstance(default, bool):
            is_right = isinstance(value, bool)
        elif isinstance(default, int):
            low = 1 if field == "num_train_timesteps" else 0
            is_right = type(value) is int and low <= value <= MAX_TIMESTEPS
        elif field == "timestep_scaling":
            is_right = type(value) in (int, float) and 0 < value <= MAX_TIMESTEPS
        elif isinstance(default, float):
            is_right = _is_beta(value)
        else:
            # ACCEPTED has the texts.
            is_right = True
        if not is_right:
            raise UnsupportedScheduler(
                f"scheduler_config {field}: this {type(value).__name__} is not supported; expected "
                f"{NEEDED[type(default)]}"
            )


def _is_beta(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]
