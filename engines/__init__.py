"""The backends that compute a network, and how one is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.trt.flavours import FLAVOURS

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline

BACKENDS = ("auto", *FLAVOURS, "onnxruntime", "torch")
ASKED_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8")
PRECISION = f"{', '.join(ASKED_PRECISIONS)} (the backend's own choice unless given)"
"""what a flag that names it says of it; bf16 is PyTorch's alone"""
FOLDER = "use this folder of sdxl export or sdxl build instead of searching SDXL_HOME"
"""what a flag that names `load`'s folder says of it"""


def load(
    model: str = "mini",
    backend: str = "auto",
    *,
    device: str | None = None,
    precision: str | None = None,
    is_deterministic: bool = False,
    torch_options: str = "",
    folder: str = "",
    takes_unchecked: bool = False,
) -> Pipeline:
    """A pipeline on the backend asked for, or on the best one this machine has for the model;
    its engines' description says which it is and, under `passed_over`, why not a faster one.
    `folder` names a folder of `sdxl export` or `sdxl build` to take instead of what is found.
    Engines that nobody ran against the model are refused unless `takes_unchecked`. A backend may
    also be named as `package.module:function`: see choice.plugged_in."""
    from engines.choice import EngineRequest, choose_engines
    from sdxl.checkpoint import find
    from sdxl.params import InvalidParams
    from sdxl.pipeline import Pipeline

    if backend not in BACKENDS and ":" not in backend:
        raise InvalidParams("backend", backend, f"must be one of {', '.join(BACKENDS)}")
    if precision not in (None, *ASKED_PRECISIONS) and backend in BACKENDS:
        raise InvalidParams("precision", precision, f"must be one of {', '.join(ASKED_PRECISIONS)}")
    checkpoint = find(model)
    asked = EngineRequest(
        model, checkpoint, device, precision, torch_options, folder, takes_unchecked
    )
    engines = choose_engines(asked, backend)
    return Pipeline(checkpoint, engines, is_deterministic=is_deterministic)
