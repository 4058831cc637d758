"""Every scheduler as a table of coefficients, and one step for any mix of schedulers.

With model output eps, the previous estimate h of the finished picture and fresh noise z, a step is
    x' = a*x + b*eps + c*h + d*z,    h' = e*x + f*eps,    model input = s*x.
It does not know networks, guidance, caches or the source of noise.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from sdxl.params import PARAMETERS, InvalidParams
from sdxl.scheduler_config import SchedulerConfig, UnsupportedScheduler
from sdxl.scheduler_names import SCHEDULERS
from sdxl.schedulers.solvers import SOLVERS
from sdxl.schedulers.tables import COLUMNS, Table, columns, step

__all__ = [
    "COLUMNS",
    "SchedulerConfig",
    "Table",
    "UnsupportedScheduler",
    "columns",
    "step",
    "table",
]


@lru_cache(maxsize=64)
def table(name: str, steps: int, config: SchedulerConfig) -> Table:
    """Return the table of diffusers' scheduler of this name with the checkpoint's config."""
    PARAMETERS["scheduler"].check(name)
    if not 1 <= steps <= config.num_train_timesteps:
        raise InvalidParams("steps", steps, f"must be 1 to {config.num_train_timesteps}")
    scheduler = SCHEDULERS[name]
    levels = scheduler.levels or ("karras" if config.use_karras_sigmas else "")
    if levels == "trailing":
        levels, config = "", replace(config, timestep_spacing="trailing")
    # A terminal alpha of zero divides by zero; the check below refuses the result.
    with np.errstate(divide="ignore", invalid="ignore"):
        result = SOLVERS[scheduler.solver](steps, config, levels)
    if not np.isfinite(result.rows).all():
        raise UnsupportedScheduler(
            f"{name} has no finite steps for this checkpoint: prediction_type "
            f"{config.prediction_type!r} with rescale_betas_zero_snr needs another scheduler"
        )
    return result
