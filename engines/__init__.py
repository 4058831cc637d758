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
PRECISION = f"{', '.join(ASKED_PRECISIONS)} (the backend's own choice unless given)"
"""the help of flags for it; only PyTorch has bf16"""
FOLDER = "use this folder of sdxl export or sdxl build instead of searching SDXL_HOME"
"""the help of flags for `load`'s folder"""
LORAS = "folder of LoRAs; those in `loras` beside the model and in SDXL_HOME are found without it"
CONTROLNETS = "folder of ControlNets; those in `controlnets` beside the model and in SDXL_HOME too"
IP_ADAPTERS = (
    "folder of IP-Adapters, with their image_encoder; those in `ip_adapters` beside the model and "
    "in SDXL_HOME too"
)
"""the help of flags for them"""
REFINER = "SDXL refiner that requests may name: mini, a folder, a safetensors file or a hub id"


def catalogue_of(
    model: str, folder: Path, loras: str = "", controlnets: str = "", ip_adapters: str = ""
) -> Catalogue:
    """Return what requests of a model may name. `folder` is the model's."""
    from sdxl.catalogue import Catalogue
    from sdxl.model_names import folders_of

    return Catalogue(
        folders_of(model, folder, "loras", loras),
        folders_of(model, folder, "controlnets", controlnets),
        folders_of(model, folder, "ip_adapters", ip_adapters),
    )


def check_backend(name: str) -> None:
    """Refuse an unknown backend. A function of another package, MODULE:FUNCTION, is one."""
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
    """Load a model on the named backend, or on the fastest one here. Its engines' description says
    which that is and, under `passed_over`, why faster ones cannot run. `folder` of `sdxl export` or
    `sdxl build` replaces the search. Unchecked engines are refused unless `takes_unchecked`.
    `loras`, `controlnets` and `ip_adapters` are one more folder of each; `refiner` is a model that
    requests may name as theirs. For backends of other packages see choice.plugged_in."""
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
    asked = EngineRequest(
        model, checkpoint, device, precision, torch_options, folder, takes_unchecked
    )
    engines = choose_engines(asked, backend)
    pipeline = Pipeline(checkpoint, engines, catalogue, is_deterministic)
    if not refiner:
        return pipeline
    # The refiner's maps have no slots, and the latents stay as they lie.
    engines = replace(engines, slot_of=no_slot)
    return replace(pipeline, engines=engines, refiner=load_refiner(refiner, engines))
