"""The training loop of every stage: one-cycle AdamW, an average of the weights, resuming.

Step `i` draws its data from `(seed, i)`, so an interrupted and resumed run sees the same data as an
uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SAVE_EVERY_S = 60.0
_WARMUP = 0.04


@dataclass(frozen=True)
class Schedule:
    """The length and the rates of a training run."""

    steps: int
    peak_rate: float
    seed: int
    average: float = 0.999
    cycle: int | None = None  # the cosine's length, if `steps` ends earlier


Loss = Callable[[np.random.Generator, int], Tensor]


def in_half(device: str) -> torch.autocast:
    """Use bf16 where it is faster. A processor without AVX-512 takes ten times as long in bf16."""
    is_fast = device != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.autocast(device, torch.bfloat16, enabled=is_fast)


def rate_at(schedule: Schedule, step: int) -> float:
    """Return the rate: a linear warm-up, then half a cosine down to a hundredth of the peak."""
    done = (step + 1) / (schedule.cycle or schedule.steps)
    if done < _WARMUP:
        return schedule.peak_rate * done / _WARMUP
    cosine = 0.5 + 0.5 * math.cos(math.pi * (done - _WARMUP) / (1 - _WARMUP))
    return schedule.peak_rate * (0.01 + 0.99 * cosine)


def fit(module: nn.Module, loss_of: Loss, schedule: Schedule, checkpoint: Path) -> None:
    """Train `module` in place, from `checkpoint` if it exists. The result has averaged weights."""
    weights = [p for p in module.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in weights]
    optimiser = torch.optim.AdamW(
        weights, lr=schedule.peak_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    first = _resume(module, average, optimiser, checkpoint)
    module.train()
    mean, saved_at = 0.0, time.monotonic()
    for step in range(first, schedule.steps):
        rng = np.random.default_rng((schedule.seed, step))
        torch.manual_seed(int(rng.integers(2**31)))
        for group in optimiser.param_groups:
            group["lr"] = rate_at(schedule, step)
        loss = loss_of(rng, step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        with torch.no_grad():
            keep = min(schedule.average, (1 + step) / (10 + step))
            torch._foreach_lerp_(average, list(weights), 1 - keep)
        mean = loss.item() if step == first else 0.98 * mean + 0.02 * loss.item()
        is_last = step + 1 == schedule.steps
        if step % 100 == 0 or is_last:
            print(f"{time.strftime('%X')} {checkpoint.stem} {step} loss {mean:.4f}", flush=True)
        if is_last or time.monotonic() - saved_at > SAVE_EVERY_S:
            state = {
                "module": module.state_dict(),
                "average": average,
                "step": step + 1,
                "optimiser": optimiser.state_dict(),
            }
            _save(state, checkpoint)
            saved_at = time.monotonic()
    _load_average(weights, average)
    module.eval()


def _load_average(weights: list[nn.Parameter], average: list[Tensor]) -> None:
    with torch.no_grad():
        for weight, mean in zip(weights, average, strict=True):
            weight.copy_(mean)


def load_latest(module: nn.Module, checkpoint: Path) -> None:
    """Load the last weights of a fit, not their average, to continue training."""
    module.load_state_dict(torch.load(checkpoint, map_location="cpu")["module"])


def load_fitted(module: nn.Module, checkpoint: Path) -> bool:
    """Load the averaged weights of a finished or unfinished fit. Return whether there is one."""
    if not checkpoint.exists():
        return False
    state = torch.load(checkpoint, map_location="cpu")
    # The average lacks the running statistics of norms.
    module.load_state_dict(state["module"])
    _load_average([p for p in module.parameters() if p.requires_grad], state["average"])
    module.eval()
    return True


def load_mean(module: nn.Module, checkpoints: Sequence[Path]) -> None:
    """Load the mean of several fits' averaged weights."""
    weights = [p for p in module.parameters() if p.requires_grad]
    loaded = []
    for checkpoint in checkpoints:
        load_fitted(module, checkpoint)
        loaded.append([weight.detach().clone() for weight in weights])
    if loaded:
        _load_average(weights, [torch.stack(each).mean(0) for each in zip(*loaded, strict=True)])


def save_adopted(module: nn.Module, step: int, checkpoint: Path) -> None:
    """Save weights from elsewhere as the checkpoint that a fit would write at `step`."""
    average = [p.detach() for p in module.parameters() if p.requires_grad]
    _save({"module": module.state_dict(), "average": average, "step": step}, checkpoint)


def _save(state: dict[str, Any], checkpoint: Path) -> None:
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    fresh = checkpoint.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(checkpoint)


def _resume(
    module: nn.Module, average: list[Tensor], optimiser: torch.optim.Optimizer, checkpoint: Path
) -> int:
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, map_location=average[0].device)
    module.load_state_dict(state["module"])
    for tensor, saved in zip(average, state["average"], strict=True):
        tensor.copy_(saved)
    if "optimiser" in state:
        optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])
