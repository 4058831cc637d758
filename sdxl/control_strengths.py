"""The strengths with which a ControlNet's residuals are added to a picture's rows."""

from __future__ import annotations

from collections.abc import Sequence

MODES = ("balanced", "prompt", "control", "guess")
"""The first three are "Balanced", "My prompt is more important" and "ControlNet is more important"
of stable-diffusion-webui's extension; the last is diffusers' `guess_mode`."""
SOFT = 0.825
"""that extension's ratio of neighbouring soft weights (sd-webui-controlnet, scripts/hook.py)"""
SOFT_COUNT = 13
"""the residuals of Stable Diffusion 1; SDXL's ten have the first ten of its weights"""

Rows = tuple[list[float], list[float]]
"""the strengths of the residuals in the positive and the negative row"""


def residual_strengths(mode: str, strength: float, count: int) -> Rows:
    """Return the strengths of `count` residuals in a mode; the middle block's is the last."""
    strengths = [strength * weight for weight in _weights(mode, count)]
    return strengths, [0.0] * count if mode in ("control", "guess") else strengths


def _weights(mode: str, count: int) -> list[float]:
    if mode == "balanced":
        return [1.0] * count
    if mode == "guess":
        # Like torch.logspace(-1, 0, count).
        return [10 ** (index / (count - 1) - 1) for index in range(count)]
    return [SOFT ** (SOFT_COUNT - 1 - index) for index in range(count)]


def union_strengths(strengths: Sequence[float]) -> tuple[list[float], float]:
    """Return the scales of a union's hints, and the strength of its residuals. As in diffusers, a
    single hint's strength scales the residuals; several hints are scaled before they are joined."""
    return ([1.0], strengths[0]) if len(strengths) == 1 else ([*strengths], 1.0)
