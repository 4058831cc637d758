"""TensorRT-RTX on this GPU: plans for it and for older architectures are built, run and compared
with PyTorch. Errors are recorded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engines.cuda.gpus import local_target
from engines.folders.export_folder import ExportFolder
from engines.folders.profiles import profiles
from engines.folders.shipped import open_mini
from engines.folders.targets import Target, listed_target
from engines.parity.findings import relative_norm
from engines.trt.build import BuildSpec
from engines.trt.flavours import TENSORRT_RTX
from engines.trt.plan_process import run_worker
from eval.h200.bench import Bench
from eval.measuring.arithmetic import Shapes
from eval.measuring.ceilings import fastest
from sdxl.engine import Engine, allocate, call, torch_dtype
from sdxl.pipeline import Pipeline

Found = Iterator[tuple[str, Any]]
ARCHITECTURES = ("SM80", "SM89")


def small(bench: Bench) -> Found:
    """The embedded model's UNets; the shallow one is the smallest graph with a convolution."""
    export = open_mini()
    for name in ("unet_shallow",) if bench.is_dry else ("unet_shallow", "unet_deep"):
        yield from _probed(bench, export, name, bench.pipeline("fp32", "mini"))


def full(bench: Bench) -> Found:
    """The full-size deep UNet in fp16; its export takes about two minutes."""
    from onnx_export.export_spec import ExportSpec
    from onnx_export.exporter import export, unchecked

    pipeline = bench.pipeline("fp16")
    order = ExportSpec(pipeline.checkpoint, "fp16", bench.out / "onnx-fp16")
    yield from _probed(bench, export(order, unchecked), "unet_deep", pipeline)


def _probed(bench: Bench, export: ExportFolder, name: str, pipeline: Pipeline) -> Found:
    if not TENSORRT_RTX.is_installed:
        yield "passed over", "tensorrt-rtx is not installed"
        return
    yield "version", TENSORRT_RTX.version
    for target in _targets(bench):
        yield f"{name}, {target.name}", _probe(bench, export, name, target, pipeline)


def _targets(bench: Bench) -> list[Target]:
    """This GPU (CURRENT in tensorrt-rtx), and listed architectures."""
    listed = [listed_target(sm, 1) for sm in ARCHITECTURES]
    here = local_target()
    if bench.is_dry:
        return listed[-1:]
    return [*([here] if here else []), *listed]


def _probe(
    bench: Bench, export: ExportFolder, name: str, target: Target, pipeline: Pipeline
) -> dict[str, Any]:
    """Build and run a single plan; a folder of engines would need all networks."""
    folder = bench.out / "rtx" / f"{name}-{target.key}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    order = BuildSpec(export, target, TENSORRT_RTX, 1, False, folder)
    plan = folder / f"{name}.plan"
    results: dict[str, Any] = {}
    try:
        results["built"] = run_worker(order.job(name, plan), folder / "log", lambda share: None)
        results["bytes"] = plan.stat().st_size
        if bench.device.type == "cuda":
            results |= _run(bench, _opened(bench, export, name, plan), pipeline)
    except Exception as error:
        results["error"] = f"{type(error).__name__}: {error}"
    return results


def _opened(bench: Bench, export: ExportFolder, name: str, plan: Path) -> Engine:
    from engines.cuda.device import CudaDevice
    from engines.trt.tensorrt_engine import Scratch, TensorRTEngine
    from engines.trt.tensorrt_loading import context_maker

    library, device = TENSORRT_RTX.load(), CudaDevice(bench.device)
    runtime = library.Runtime(library.Logger(library.Logger.WARNING))
    spec = export.graphs[name].spec
    return TensorRTEngine(
        spec,
        runtime.deserialize_cuda_engine(plan.read_bytes()),
        profiles(spec, export.arch, 1, has_exact=False),
        context_maker(TENSORRT_RTX, library),
        device,
        Scratch(device),
        captures=False,
    )


def _run(bench: Bench, engine: Engine, pipeline: Pipeline) -> dict[str, Any]:
    name = engine.spec.name
    theirs, arch = pipeline.engines[name], pipeline.engines.arch
    axes = Shapes(arch.default_side, 2).axes(arch)
    inputs = {
        t.name: torch.randn(t.shape(axes), device=bench.device).to(torch_dtype(t))
        for t in engine.spec.inputs
    }
    cast = {t.name: inputs[t.name].to(torch_dtype(t)) for t in theirs.spec.inputs}
    noise, expected = (
        call(each, arch, given)["noise"].float().cpu()
        for each, given in ((engine, inputs), (theirs, cast))
    )
    return {
        "relative_l2": relative_norm(noise, expected),
        "seconds": _fastest(engine, inputs, axes, bench.device),
        "torch_seconds": _fastest(theirs, cast, axes, bench.device),
    }


def _fastest(
    engine: Engine, inputs: dict[str, torch.Tensor], axes: dict[str, int], device: torch.device
) -> float:
    outputs = {t.name: allocate(t, axes, device) for t in engine.spec.outputs}
    return fastest(lambda: engine(inputs, outputs), device)
