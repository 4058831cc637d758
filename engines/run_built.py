"""Runs built engines on this machine's GPU and compares them with the model in PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sdxl.params import InvalidParams

if TYPE_CHECKING:
    from engines.folders.engine_folder import EngineFolder
    from engines.folders.export_folder import ExportFolder
    from engines.lora import LoraFile
    from engines.parity.proof import Proof
    from engines.trt.build import BuildSpec
    from sdxl.checkpoint import Checkpoint

PICTURES = 4
"""number of pictures that compare plans with the model"""


def run_built(
    folder: EngineFolder, order: BuildSpec, model: str | None, loras: Sequence[LoraFile] = ()
) -> Proof:
    """Compare built plans with the model, or return why they cannot run. Raise if they differ.
    `model` names the model if the export does not; `loras` are the export's."""
    from engines.cuda.device import local_target
    from engines.lora import load_parts
    from engines.parity.pictures import subject_of
    from engines.parity.proof import PlanTrial, not_run, used_on_gpu
    from engines.pytorch.torch_engine import load_torch
    from engines.pytorch.torch_options import PLAIN
    from engines.trt.tensorrt_loading import load_tensorrt
    from sdxl.checkpoint import CheckpointError

    target = local_target()
    if target is None or not folder.runs_on(target):
        return not_run(f"there is no {folder.gpu} here; `sdxl build` on one runs them")
    if folder.loras and not loras:
        return not_run("LoRAs are fused into them; name them with --lora as at the export")
    try:
        checkpoint = _find_model(order.export, model)
    except CheckpointError as error:
        return not_run(f"their model is not here to compare with ({error}); name it with --model")
    return PlanTrial(
        checkpoint,
        replace(subject_of(checkpoint, PICTURES, 0), side=None),
        folder.precision,
        # diffusers' modules are the reference, so that errors of our kernels do not count.
        lambda: load_torch(
            checkpoint,
            device="cuda",
            precision="fp32",
            cut=folder.cut,
            options=PLAIN,
            load_part=lambda part: load_parts(checkpoint, loras, part)[part],
        ),
        lambda: load_tensorrt(folder, order.flavour),
        {name: plan.profiles for name, plan in folder.plans.items()},
        used_on_gpu,
        lambda line: print(line, file=sys.stderr),
    ).run()


def _find_model(export: ExportFolder, named: str | None) -> Checkpoint:
    """Find the checkpoint that an export was made from. Refuse a named one with other weights."""
    from engines.folders.digests import model_digest
    from sdxl.checkpoint import find
    from sdxl.model_names import MINI_NAME

    name = named or ("mini" if export.model == MINI_NAME else export.model)
    checkpoint = find(name)
    if (digest := model_digest(checkpoint)) != export.model_digest:
        needed = f"must have the export's weights, {export.model_digest[:12]}, not {digest[:12]}"
        raise InvalidParams("model", name, needed)
    return checkpoint


def pictures_of(parity: Mapping[str, Any]) -> str:
    """Return the PSNR of whole pictures as one line."""
    findings = [f for f in parity.get("findings", ()) if "PSNR" in f["what"]]
    return "; ".join(f"{f['what']} {f['measured']:.4g}" for f in findings)
