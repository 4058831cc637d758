"""Chooses the backend that serves a model on this machine.

`auto` tries the fastest backend first. A backend loads engines, or raises an error that says in one
line what is missing.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.control_weights import ControlFile
from engines.cuda.device import local_target
from engines.folders.digests import model_digest
from engines.folders.engine_folder import FILE as MANIFEST
from engines.folders.engine_folder import EngineError
from engines.folders.export_folder import FILE, PRECISIONS, ExportError, ExportFolder
from engines.folders.places import export_place, plans_root
from engines.pytorch.torch_options import TorchOptions
from engines.trt.engine_store import best_for
from engines.trt.flavours import FLAVOURS, BackendFailed, BackendMissing, Flavour
from sdxl.checkpoint import MINI, Checkpoint, CheckpointError, find_refiner
from sdxl.engine import Engine, Engines
from sdxl.files import OutputError
from sdxl.params import InvalidParams
from sdxl.specs import CONTROL, IMAGE

if TYPE_CHECKING:
    from sdxl.refiner import Refiner

log = logging.getLogger(__name__)

CPU_PRECISION = "fp32"
UNAVAILABLE = (BackendFailed, BackendMissing, EngineError, ExportError, InvalidParams, OutputError)
"""The errors of a backend that cannot serve a request."""


@dataclass(frozen=True)
class EngineRequest:
    """What to load. The backend chooses values that are None."""

    model: str
    checkpoint: Checkpoint
    device: str | None = None
    precision: str | None = None
    torch_options: str = ""
    """PyTorch's options; see torch_options.py"""
    folder: str = ""
    """folder of `sdxl export` or `sdxl build` to use instead of searching"""
    takes_unchecked: bool = False
    """Engines that were not compared with the model may run."""

    @property
    def is_for_cpu(self) -> bool:
        return self.device is not None and self.device.startswith("cpu")


def choose_engines(request: EngineRequest, backend: str) -> Engines:
    if request.folder and not any(
        (Path(request.folder) / mark).exists() for mark in (MANIFEST, FILE)
    ):
        needed = "must be a folder of `sdxl export` or `sdxl build`"
        raise InvalidParams("engines", request.folder, needed)
    if ":" in backend:
        # A backend of another package, which `auto` never chooses.
        return function_named("backend", backend)(request)
    loaders = _loaders()
    if backend != "auto":
        return loaders[backend](request)
    if not request.is_for_cpu and local_target() is not None:
        # With a GPU, PyTorch is faster than ONNX Runtime, which runs on the CPU.
        loaders["onnxruntime"] = loaders.pop("onnxruntime")
    passed_over: dict[str, str] = {}
    for name, load in loaders.items():
        try:
            engines = load(request)
        except UNAVAILABLE as error:
            passed_over[name] = str(error)
            continue
        description = {"backend": name, **engines.description, "passed_over": passed_over}
        if not request.is_for_cpu and (reasons := why_slower(description)):
            log.warning("%s runs on %s, not on TensorRT: %s", request.model, name, reasons)
        else:
            others = f" ({'; '.join(passed_over.values())})" if passed_over else ""
            log.info("%s runs on %s%s", request.model, name, others)
        return replace(engines, description=description)
    raise BackendMissing(f"no backend here serves {request.model} as asked: {_listed(passed_over)}")


def why_slower(description: Mapping[str, Any]) -> str:
    """Return why TensorRT does not run on this machine's GPU. Empty if it runs, if another backend
    was named, or if there is no GPU."""
    passed_over = description.get("passed_over") or {}
    is_slower = passed_over and description.get("backend") not in FLAVOURS
    return _listed(passed_over) if is_slower and local_target() is not None else ""


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def function_named(field: str, name: str) -> Callable[..., Any]:
    """Import the function `package.module:function`, the value of a field."""
    module, _, attribute = name.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        needed = f"must be package.module:function ({error})"
        raise InvalidParams(field, name, needed) from error
    return function


def _loaders() -> dict[str, Callable[[EngineRequest], Engines]]:
    """Return each backend's loader, the fastest on a CPU first."""
    tensorrt = {name: partial(_load_tensorrt, flavour=each) for name, each in FLAVOURS.items()}
    return {**tensorrt, "onnxruntime": _load_onnxruntime, "torch": _load_torch}


def _load_tensorrt(request: EngineRequest, flavour: Flavour) -> Engines:
    from engines.trt.tensorrt_loading import load_tensorrt

    _check_exported(request.precision)
    if request.device not in (None, "cpu", "cuda", "cuda:0"):
        needed = f"cannot select a GPU for {flavour.name}: set CUDA_VISIBLE_DEVICES"
        raise InvalidParams("device", request.device, needed)
    target = None if request.is_for_cpu else local_target()
    if target is None:
        raise BackendMissing(f"{flavour.name} needs an NVIDIA GPU, found none here")
    digest = model_digest(request.checkpoint)
    folder = best_for(
        Path(request.folder) if request.folder else plans_root(),
        flavour,
        target,
        digest,
        request.precision,
        takes_loras=bool(request.folder),
        takes_unchecked=request.takes_unchecked,
    )
    if isinstance(folder, str):
        precision = request.precision or target.precision
        raise BackendMissing(
            f"{flavour.name} has no engines to run: {folder}; run sdxl export --model "
            f"{request.model} --precision {precision}, then sdxl build --backend {flavour.name}"
        )
    engines = load_tensorrt(folder, flavour)
    dtype = engines["unet_deep"].spec.outputs[0].dtype
    if f"unet_deep+{CONTROL}" in engines.by_name:
        from engines.net_shelf import control_shelf
        from engines.pytorch.torch_engine import torch_control

        arch, device = request.checkpoint.arch, engines.device
        load = partial(torch_control, arch=arch, dtype=dtype, device=device)
        controls = control_shelf(request.checkpoint, dtype, device, load)
        engines = replace(engines, controls=controls)
    if f"unet_deep+{IMAGE}" in engines.by_name:
        from engines.image_shelf import image_shelf

        images = image_shelf(request.checkpoint, dtype, engines.device)
        engines = replace(engines, image_prompts=images)
    return engines


def _load_onnxruntime(request: EngineRequest) -> Engines:
    from engines.image_shelf import image_shelf
    from engines.net_shelf import control_shelf
    from engines.onnxruntime_engine import load_onnxruntime

    if request.device is not None and not request.is_for_cpu:
        raise InvalidParams("device", request.device, "must be cpu for the backend onnxruntime")
    export = _find_export(request)
    engines = load_onnxruntime(export)

    def load(file: ControlFile) -> dict[str, Engine]:
        # Imported late: pictures without ControlNets need neither diffusers nor `onnx`.
        from engines.onnx_controls import load_control

        return load_control(export, file)

    dtype = engines["unet_deep"].spec.outputs[0].dtype
    shelf = control_shelf(request.checkpoint, dtype, engines.device, load)
    images = image_shelf(request.checkpoint, dtype, engines.device)
    return replace(engines, controls=shelf, image_prompts=images)


def load_refiner(model: str, beside: Engines) -> Refiner:
    """Load a refiner in PyTorch, in the precision of the model's engines `beside` it. A refiner has
    no export. The loop's stream runs its calls, unrecorded and without slots."""
    from engines.pytorch.torch_engine import PRECISIONS, load_torch
    from engines.pytorch.torch_options import PLAIN
    from sdxl.refiner import Refiner

    checkpoint, dtype = find_refiner(model), beside["unet_deep"].spec.outputs[0].dtype
    for name in ("latent_channels", "vae_scale"):
        value, needed = getattr(checkpoint.arch, name), getattr(beside.arch, name)
        if value != needed:
            raise CheckpointError(f"refiner {model!r}: {name} is {value}, the model's {needed}")
    precision = next(name for name, each in PRECISIONS.items() if each == dtype)
    device = str(beside.device)
    return Refiner(
        checkpoint,
        load_torch(checkpoint, device=device, precision=precision, cut=beside.cut, options=PLAIN),
        model,
    )


def _check_exported(precision: str | None) -> None:
    """Refuse a precision that no export has."""
    if precision not in (None, *PRECISIONS):
        needed = f"must be {', '.join(PRECISIONS)}, or the backend torch"
        raise InvalidParams("precision", precision, needed)


def _find_export(request: EngineRequest) -> ExportFolder:
    """Open the model's export in the named folder or its default place. The embedded model ships
    with one."""
    from engines.folders.shipped import open_mini

    _check_exported(request.precision)
    checkpoint, precision = request.checkpoint, request.precision or CPU_PRECISION
    digest = model_digest(checkpoint)
    if request.folder:
        export = _open_named_export(request, digest)
    elif checkpoint.folder == MINI and precision == CPU_PRECISION:
        return open_mini(digest)
    else:
        place = export_place(checkpoint.name, digest, precision)
        if not (place / FILE).exists():
            raise ExportError(
                f"no {precision} export of {request.model} in {place}; run "
                f"sdxl export --model {request.model} --precision {precision}"
            )
        export = ExportFolder.open(place)
    if not (export.is_checked or request.takes_unchecked):
        raise _unchecked_error(export, request, "published without a check")
    return export


def _unchecked_error(export: ExportFolder, request: EngineRequest, why: str) -> ExportError:
    return ExportError(
        f"{export.folder}: {why}; run sdxl export --model {request.model} "
        f"--check {export.folder}, or --unchecked here"
    )


def _open_named_export(request: EngineRequest, digest: str) -> ExportFolder:
    export = ExportFolder.open(Path(request.folder))
    if export.model_digest != digest:
        raise ExportError(
            f"{export.folder}: of the weights {export.model_digest[:12]} ({export.model}), "
            f"expected {digest[:12]}"
        )
    if request.precision not in (None, export.precision):
        raise ExportError(f"{export.folder}: is {export.precision}, expected {request.precision}")
    return export


def _load_torch(request: EngineRequest) -> Engines:
    from engines.pytorch.torch_engine import EIGHT_BIT, load_torch

    if request.folder:
        raise InvalidParams("engines", request.folder, "cannot be used with the backend torch")

    def load(numbers: tuple[Path, ...] = ()) -> Engines:
        return load_torch(
            request.checkpoint,
            device=request.device,
            precision=request.precision,
            options=TorchOptions.parse(request.torch_options) if request.torch_options else None,
            numbers=numbers,
        )

    if request.precision not in EIGHT_BIT:
        return load()
    export = _find_export(request)
    if (unchecked := export.unchecked_in_torch) and not request.takes_unchecked:
        raise _unchecked_error(export, request, unchecked)
    return export.load_checked(lambda: load(export.numbers))
