"""Which steps run the whole UNet: DeepCache's plan, as a tuple of booleans.

Ma, Fang, Wang, "DeepCache: Accelerating Diffusion Models for Free", arXiv:2312.00858.
It knows nothing of networks or tensors.
"""

from __future__ import annotations

StepPlan = tuple[bool, ...]
"""One entry a step: True runs Deep, False runs Shallow. The first is always True."""


def plan(steps: int, interval: int, deep_steps: tuple[int, ...] | None = None) -> StepPlan:
    """One deep step in `interval`, or exactly `deep_steps`."""
    if deep_steps is not None:
        deep = set(deep_steps)
        return tuple(step in deep for step in range(steps))
    return tuple(step % interval == 0 for step in range(steps))
