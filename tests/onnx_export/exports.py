"""Exports for tests: a tiny model of SDXL's shape, and cached traces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn

from engines.folders.export_folder import ExportFolder
from engines.onnxruntime_engine import load_onnxruntime
from engines.parity.pictures import subject_of
from engines.pytorch.torch_engine import load_torch
from onnx_export import fingerprint
from onnx_export.check import check
from onnx_export.export_spec import ExportSpec
from onnx_export.exporter import Say, export, unchecked
from onnx_export.random_weights import Configs, write_checkpoint
from onnx_export.recipes import RECIPES
from onnx_export.tracing import trace
from sdxl.checkpoint import MINI, Checkpoint
from sdxl.files import write_atomic
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline, Result, WithPictures
from sdxl.single_file.configs import SDXL_1_0
from sdxl.specs import ModelSpec
from tests.conftest import psnr

_TEXT = {
    "vocab_size": 646,
    "hidden_size": 32,
    "intermediate_size": 64,
    "projection_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY: Configs = {
    "text_encoder": {**_TEXT, "architectures": ["CLIPTextModel"], "hidden_act": "quick_gelu"},
    "text_encoder_2": {
        **_TEXT,
        "architectures": ["CLIPTextModelWithProjection"],
        "hidden_act": "gelu",
    },
    "unet": {
        **SDXL_1_0["unet"],
        "block_out_channels": [16, 32, 32],
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 1, 1],
        "attention_head_dim": [1, 2, 2],
        "norm_num_groups": 8,
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
        "sample_size": 16,
    },
    "vae": {
        **SDXL_1_0["vae"],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "block_out_channels": [8, 8],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "scaling_factor": 0.5,
        "sample_size": 32,
    },
}
"""one layer a block and a VAE of two levels, which are traced in seconds"""


class CachedTrace:
    """`trace`, cached on disk: a graph depends only on the network's shape, as a test shows.

    A file is named by the digest of all that its graph depends on: the network and its spec, the
    configurations, the exporter's sources and the libraries' versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        configs = [path.read_text() for path in sorted(MINI.glob("*/config.json"))]
        self._common = [repr(TINY), configs, fingerprint.versions(), fingerprint.digest_sources()]

    def __call__(self, spec: ModelSpec, network: nn.Module) -> ir.Model:
        parameters = [(n, p.shape, str(p.dtype)) for n, p in network.named_parameters()]
        facts = [*self._common, repr(spec), type(network).__name__, parameters]
        path = self.folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.onnx"
        if not path.exists():
            model = trace(spec, network)
            for value in model.graph.initializers.values():
                # ONNX needs a location for every weight; this one is empty.
                if value.const_value is None:
                    assert value.dtype is not None and isinstance(value.shape, ir.Shape)
                    value.const_value = ir.ExternalTensor(
                        "none", 0, 0, value.dtype, shape=value.shape, name=value.name or ""
                    )
            write_atomic(path, ir.to_proto(model).SerializeToString())
        model = ir.load(path)
        for value in model.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = None
        return model


Lines = list[str]
PROMPTS = ("a red circle on a blue background", "two green stars", "a ring")
"""prompts that calibrate the tiny model"""


def export_tiny(
    checkpoint: Checkpoint,
    out: Path,
    precision: str = "fp32",
    lines: Lines | None = None,
    **more: Any,
) -> ExportFolder:
    if precision in RECIPES:
        more = {"prompts": PROMPTS, **more}
    order = ExportSpec(checkpoint, precision, out, **more)
    return export(order, unchecked, (lines if lines is not None else []).append)


def checked(
    folder: ExportFolder, checkpoint: Checkpoint, say: Say = lambda _: None, **changes: Any
) -> dict[str, Any]:
    """Check an export as `sdxl export` does, with one picture of two steps, unless `changes` say
    otherwise."""
    order = ExportSpec(checkpoint, folder.precision, folder.folder, folder.cut)
    subject = replace(subject_of(checkpoint), **{"compared": 1, "steps": 2, **changes})
    return check(folder, order, say, subject)


def write_tiny(folder: Path) -> Checkpoint:
    write_checkpoint(folder, TINY)
    return Checkpoint(folder.name, folder)


def write_tiny_inpainting(folder: Path) -> Checkpoint:
    """Write the tiny model for inpainting: its UNet also reads a mask and a masked picture."""
    write_checkpoint(folder, {**TINY, "unet": {**TINY["unet"], "in_channels": 9}})
    return Checkpoint(folder.name, folder)


Exports = Callable[[str], ExportFolder]
BOUNDS = {"fp32": 60.0, "int8": 15.0}
"""in dB; random weights say little about the error of 8 bits"""


def painted_as_by_pytorch(
    checkpoint: Checkpoint, folder: ExportFolder, asked: Sequence[GenerationParams | WithPictures]
) -> list[Result]:
    """Compare an export's pictures on ONNX Runtime with the checkpoint's pictures."""
    found, expected = (
        Pipeline(checkpoint, engines).generate(asked)
        for engines in (load_onnxruntime(folder), load_torch(checkpoint))
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.image is not None and theirs.image is not None, ours.error
        measured, needed = psnr(ours.image, theirs.image), BOUNDS[folder.precision]
        assert measured >= needed, f"{measured:.1f} dB, needed {needed}"
    return found
