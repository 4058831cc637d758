"""Backends that compute the networks, and the choice among them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engines.trt.flavours import FLAVOURS

if TYPE_CHECKING:
    from pathlib import Path

    from sdxl.catalogue import Catalogue
    from sdxl.pipeline import Pipeline

BACKENDS = ("auto", *FLAVOURS, "onnxruntime", "torch")
ASKED_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8")
# Help texts of flags. Only PyTorch has bf16.
PRECISION = f"{', '.join(ASKED_PRECISIONS)} (default: the backend's choice)"
FOLDER = "use this folder of sdxl export or sdxl build instead of searching SDXL_HOME"
LORAS = "folder of LoRAs, searched besides `loras` beside the model and in SDXL_HOME"
CONTROLNETS = (
    "folder of ControlNets, searched besides `controlnets` beside the model and in SDXL_HOME"
)
IP_ADAPTERS = (
    "folder of IP-Adapters and their image_encoder, searched besides `ip_adapters` beside the "
    "model and in SDXL_HOME"
)
REFINER = "SDXL refiner that requests may name: mini, a folder, a safetensors file or a hub id"


def catalogue_of(
    model: str, folder: Path, loras: str = "", controlnets: str = "", ip_adapters: str = ""
) -> Catalogue:
    """Return the files that requests of a model may name. `folder` is the model's; the others are
    searched too."""
    from sdxl.catalogue import Catalogue
    from sdxl.model_names import folders_of

    return Catalogue(
        folders_of(model, folder, "loras", loras),
        folders_of(model, folder, "controlnets", controlnets),
        folders_of(model, folder, "ip_adapters", ip_adapters),
    )


def check_backend(name: str) -> None:
    """Refuse an unknown backend. MODULE:FUNCTION names a backend of another package."""
    from sdxl.params import InvalidParams

    if name not in BACKENDS and ":" not in name:
        raise InvalidParams.unknown("backend", name, BACKENDS)


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
    loras: str = "",
    controlnets: str = "",
    ip_adapters: str = "",
    refiner: str | None = None,
) -> Pipeline:
    """Load a model on the named backend, or on the fastest one here.

    The engines' description names the backend and, under `passed_over`, why faster ones cannot run.
    A backend MODULE:FUNCTION of another package gets an EngineRequest and returns Engines. `folder`
    of `sdxl export` or `sdxl build` replaces the search. Unchecked engines are refused unless
    `takes_unchecked`. `loras`, `controlnets` and `ip_adapters` are further folders to search;
    `refiner` is a model that requests may name as their refiner."""
    from engines.choice import EngineRequest, choose_engines, load_refiner
    from sdxl.checkpoint import find
    from sdxl.engine import no_slot
    from sdxl.params import InvalidParams
    from sdxl.pipeline import Pipeline

    check_backend(backend)
    if precision not in (None, *ASKED_PRECISIONS) and backend in BACKENDS:
        raise InvalidParams.unknown("precision", precision, ASKED_PRECISIONS)
    checkpoint = find(model)
    catalogue = catalogue_of(model, checkpoint.folder, loras, controlnets, ip_adapters)
    request = EngineRequest(
        model, checkpoint, device, precision, torch_options, folder, takes_unchecked
    )
    engines = choose_engines(request, backend)
    pipeline = Pipeline(checkpoint, engines, catalogue, is_deterministic)
    if not refiner:
        return pipeline
    # The refiner's engines have no slots, so the latents must not be in slots either.
    engines = replace(engines, slot_of=no_slot)
    return replace(pipeline, engines=engines, refiner=load_refiner(refiner, engines))
