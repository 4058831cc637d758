"""Chooses the backend that serves a model on this machine.

`auto` tries them from the fastest on; each loads engines or raises an error that says in one line
what it lacks.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.control_weights import ControlFile, read_control
from engines.cuda.device import local_target
from engines.folders.digests import model_digest
from engines.folders.engine_folder import FILE as MANIFEST
from engines.folders.engine_folder import EngineError
from engines.folders.export_folder import FILE, PRECISIONS, ExportError, ExportFolder
from engines.folders.places import export_place, plans_root
from engines.pytorch.torch_options import TorchOptions
from engines.trt.engine_store import best_for
from engines.trt.flavours import FLAVOURS, BackendFailed, BackendMissing, Flavour
from sdxl.adapters import ControlNet
from sdxl.checkpoint import MINI, Checkpoint, CheckpointError, find_refiner
from sdxl.engine import Engines
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
    """What a caller wants; None leaves it to the backend."""

    model: str
    checkpoint: Checkpoint
    device: str | None = None
    precision: str | None = None
    torch_options: str = ""
    """for PyTorch; see torch_options.py"""
    folder: str = ""
    """of `sdxl export` or `sdxl build`, instead of a search"""
    takes_unchecked: bool = False
    """whether engines that were not compared with the model may run"""

    @property
    def is_for_cpu(self) -> bool:
        return self.device is not None and self.device.startswith("cpu")


def choose_engines(asked: EngineRequest, backend: str) -> Engines:
    if asked.folder and not any((Path(asked.folder) / mark).exists() for mark in (MANIFEST, FILE)):
        needed = "must be a folder of `sdxl export` or `sdxl build`"
        raise InvalidParams("engines", asked.folder, needed)
    if ":" in backend:
        return plugged_in(backend)(asked)
    if backend != "auto":
        return dict(_loaders())[backend](asked)
    passed_over: dict[str, str] = {}
    for name, load in _by_speed(asked):
        try:
            engines = load(asked)
        except UNAVAILABLE as error:
            passed_over[name] = str(error)
            continue
        said = {"backend": name, **engines.description, "passed_over": passed_over}
        if not asked.is_for_cpu and (reasons := why_slower(said)):
            log.warning("%s runs on %s, not on TensorRT: %s", asked.model, name, reasons)
        else:
            others = f" ({'; '.join(passed_over.values())})" if passed_over else ""
            log.info("%s runs on %s%s", asked.model, name, others)
        return replace(engines, description=said)
    raise BackendMissing(f"no backend here serves {asked.model} as asked: {_listed(passed_over)}")


def why_slower(description: Mapping[str, Any]) -> str:
    """Why TensorRT does not run on this machine's GPU; empty if it runs, was not asked for, or
    there is no GPU."""
    passed_over = description.get("passed_over") or {}
    is_slower = passed_over and description.get("backend") not in FLAVOURS
    return _listed(passed_over) if is_slower and local_target() is not None else ""


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def plugged_in(name: str) -> Callable[[EngineRequest], Engines]:
    """Import a backend of another package, which `auto` never chooses. The function loads the
    engines of a request."""
    return function_named("backend", name)


def function_named(field: str, name: str) -> Callable[..., Any]:
    """Import the function `package.module:function`, the value of a field."""
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        needed = f"must be package.module:function ({error})"
        raise InvalidParams(field, name, needed) from error
    return found


def _loaders() -> Iterator[tuple[str, Callable[[EngineRequest], Engines]]]:
    """Yield every backend, the fastest first."""
    for name, flavour in FLAVOURS.items():
        yield name, partial(_tensorrt, flavour=flavour)
    yield "onnxruntime", _onnxruntime
    yield "torch", _torch


def _by_speed(asked: EngineRequest) -> Iterator[tuple[str, Callable[[EngineRequest], Engines]]]:
    """The same, but with a GPU, PyTorch comes before ONNX Runtime."""
    loaders = list(_loaders())
    has_gpu = not asked.is_for_cpu and local_target() is not None
    return iter(loaders if not has_gpu else [*loaders[:-2], loaders[-1], loaders[-2]])


def _tensorrt(asked: EngineRequest, flavour: Flavour) -> Engines:
    from engines.trt.tensorrt_loading import load_tensorrt

    _check_exported(asked.precision)
    if asked.device not in (None, "cpu", "cuda", "cuda:0"):
        needed = f"cannot select a GPU for {flavour.name}: set CUDA_VISIBLE_DEVICES"
        raise InvalidParams("device", asked.device, needed)
    target = None if asked.is_for_cpu else local_target()
    if target is None:
        raise BackendMissing(f"{flavour.name} needs an NVIDIA GPU, found none here")
    digest = model_digest(asked.checkpoint)
    root = Path(asked.folder) if asked.folder else plans_root()
    found = best_for(
        root,
        flavour,
        target,
        digest,
        asked.precision,
        takes_loras=bool(asked.folder),
        takes_unchecked=asked.takes_unchecked,
    )
    if isinstance(found, str):
        precision = asked.precision or target.precision
        raise BackendMissing(
            f"{flavour.name} has no engines to run: {found}; run sdxl export --model "
            f"{asked.model} --precision {precision}, then sdxl build --backend {flavour.name}"
        )
    engines = load_tensorrt(found, flavour)
    own = asked.checkpoint, engines["unet_deep"].spec.outputs[0].dtype, engines.device
    if f"unet_deep+{CONTROL}" in engines.by_name:
        from engines.pytorch.torch_engine import control_shelf

        engines = replace(engines, controls=control_shelf(*own))
    if f"unet_deep+{IMAGE}" in engines.by_name:
        from engines.image_shelf import image_shelf

        engines = replace(engines, image_prompts=image_shelf(*own))
    return engines


def _onnxruntime(asked: EngineRequest) -> Engines:
    from engines.image_shelf import image_shelf
    from engines.net_shelf import Make, NetShelf, room_on
    from engines.onnxruntime_engine import load_onnxruntime

    if asked.device is not None and not asked.is_for_cpu:
        raise InvalidParams("device", asked.device, "must be cpu for the backend onnxruntime")
    export = find_export(asked)
    engines = load_onnxruntime(export)

    def load(file: ControlFile) -> Make[ControlNet]:
        # Imported late: plain pictures need neither diffusers nor `onnx`.
        from engines.onnx_controls import load_control

        loaded = load_control(export, file)
        return partial(ControlNet, engines=loaded, types=file.architecture.types)

    dtype = engines["unet_deep"].spec.outputs[0].dtype
    shelf = NetShelf(asked.checkpoint, read_control, load, *room_on(engines.device, dtype))
    images = image_shelf(asked.checkpoint, dtype, engines.device)
    return replace(engines, controls=shelf, image_prompts=images)


def load_refiner(model: str, beside: Engines) -> Refiner:
    """Load a refiner in PyTorch, as exact as the model's engines: it has no export. The loop's
    stream, which is the model's, runs its calls, unrecorded and without slots."""
    from engines.pytorch.torch_engine import PRECISIONS, load_torch
    from engines.pytorch.torch_options import PLAIN
    from sdxl.refiner import Refiner

    checkpoint, dtype = find_refiner(model), beside["unet_deep"].spec.outputs[0].dtype
    for name in ("latent_channels", "vae_scale"):
        own, needed = (getattr(arch, name) for arch in (checkpoint.arch, beside.arch))
        if own != needed:
            raise CheckpointError(f"refiner {model!r}: {name} is {own}, the model's {needed}")
    precision = next(name for name, each in PRECISIONS.items() if each == dtype)
    device = str(beside.device)
    return Refiner(
        checkpoint,
        load_torch(checkpoint, device=device, precision=precision, cut=beside.cut, options=PLAIN),
    )


def _check_exported(precision: str | None) -> None:
    """Refuse a precision that no export has."""
    if precision not in (None, *PRECISIONS):
        needed = f"must be {', '.join(PRECISIONS)}, or the backend torch"
        raise InvalidParams("precision", precision, needed)


def find_export(asked: EngineRequest) -> ExportFolder:
    """Open the model's export, in the named folder or its usual place; the embedded model ships
    with one."""
    from engines.folders.shipped import open_mini

    _check_exported(asked.precision)
    checkpoint, precision = asked.checkpoint, asked.precision or CPU_PRECISION
    digest = model_digest(checkpoint)
    if asked.folder:
        return _checked(_named_export(asked, digest), asked)
    if checkpoint.folder == MINI and precision == CPU_PRECISION:
        return open_mini(digest)
    place = export_place(checkpoint.name, digest, precision)
    if not (place / FILE).exists():
        raise ExportError(
            f"no {precision} export of {asked.model} in {place}; run "
            f"sdxl export --model {asked.model} --precision {precision}"
        )
    return _checked(ExportFolder.open(place), asked)


def _checked(export: ExportFolder, asked: EngineRequest) -> ExportFolder:
    if not (export.is_checked or asked.takes_unchecked):
        raise _not_checked(export, asked, "published without a check")
    return export


def _not_checked(export: ExportFolder, asked: EngineRequest, why: str) -> ExportError:
    return ExportError(
        f"{export.folder}: {why}; run sdxl export --model {asked.model} "
        f"--check {export.folder}, or --unchecked here"
    )


def _named_export(asked: EngineRequest, digest: str) -> ExportFolder:
    export = ExportFolder.open(Path(asked.folder))
    if export.model_digest != digest:
        raise ExportError(
            f"{export.folder}: of the weights {export.model_digest[:12]} ({export.model}), "
            f"expected {digest[:12]}"
        )
    if asked.precision not in (None, export.precision):
        raise ExportError(f"{export.folder}: is {export.precision}, expected {asked.precision}")
    return export


def _torch(asked: EngineRequest) -> Engines:
    from engines.pytorch.torch_engine import EIGHT_BIT, load_torch

    if asked.folder:
        # PyTorch computes from the checkpoint's own weights.
        raise InvalidParams("engines", asked.folder, "cannot be used with the backend torch")

    def load(numbers: tuple[Path, ...] = ()) -> Engines:
        return load_torch(
            asked.checkpoint,
            device=asked.device,
            precision=asked.precision,
            options=TorchOptions.parse(asked.torch_options) if asked.torch_options else None,
            numbers=numbers,
        )

    if asked.precision not in EIGHT_BIT:
        return load()
    export = find_export(asked)
    if (unchecked := export.unchecked_in_torch) and not asked.takes_unchecked:
        raise _not_checked(export, asked, unchecked)
    return export.load_checked(lambda: load(export.numbers))
