"""Which steps run the whole UNet: DeepCache's plan, as a tuple of booleans.

Ma, Fang, Wang, "DeepCache: Accelerating Diffusion Models for Free", arXiv:2312.00858.
It knows nothing of networks or tensors.
"""

from __future__ import annotations

Plan = tuple[bool, ...]
"""One entry a step: True runs Deep, False runs Shallow. The first is always True."""


def plan(steps: int, interval: int, deep_steps: tuple[int, ...] | None = None) -> Plan:
    """One deep step in `interval`, or exactly `deep_steps`."""
    if deep_steps is not None:
        deep = set(deep_steps)
        return tuple(step in deep for step in range(steps))
    return tuple(step % interval == 0 for step in range(steps))


def uneven_steps(steps: int, deep: int, center: float, power: float = 1.4) -> tuple[int, ...]:
    """At most `deep` step numbers that crowd around `center`: the paper's non-uniform 1:N schedule.

    Positions spread evenly in the signed `power`-th root of the distance from the center.
    """
    low, high = -((center) ** (1 / power)), max(steps - 1 - center, 0.0) ** (1 / power)
    chosen = {0}
    for i in range(deep):
        u = low + (high - low) * i / max(deep, 1)
        offset = abs(u) ** power * (1 if u >= 0 else -1)
        chosen.add(min(max(round(center + offset), 0), steps - 1))
    return tuple(sorted(chosen))
