"""The backends that compute a network, and how one is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline

BACKENDS = ("auto", "torch")


def load(
    model: str = "mini",
    backend: str = "auto",
    *,
    device: str | None = None,
    precision: str | None = None,
    is_deterministic: bool = False,
) -> Pipeline:
    """A pipeline on the best engines this machine has for the model."""
    from engines.torch_engine import load_torch
    from sdxl.checkpoint import find
    from sdxl.params import InvalidParams
    from sdxl.pipeline import Pipeline

    if backend not in BACKENDS:
        raise InvalidParams("backend", backend, f"needed one of {', '.join(BACKENDS)}")
    checkpoint = find(model)
    engines = load_torch(checkpoint, device=device, precision=precision)
    return Pipeline(checkpoint, engines, is_deterministic=is_deterministic)
