"""Exports of every cut and precision run ControlNets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.models.controlnets.controlnet import ControlNetModel

from engines.control_weights import read_control
from engines.folders.export_folder import changed_file
from engines.onnx_controls import load_control
from engines.onnxruntime_engine import OnnxRuntimeEngine
from engines.pytorch.torch_engine import torch_control
from onnx_export.reference import fake_quantise
from sdxl.checkpoint import Checkpoint
from sdxl.specs import CONTROLLED, Cut
from tests.engines.test_control_weights import write_plain
from tests.engines.variant_graphs import check_equal, check_residuals, computed, drawn
from tests.onnx_export.exports import Exports, export_tiny

MOST_OF_INT8 = 0.05
MOST_OF_A_NET = {"fp32": 1e-5, "fp16": 5e-3, "int8": 5e-3}
"""the largest error of a net, whose layers are not in 8 bits"""


@pytest.mark.parametrize("cut", ["reference", pytest.param("fresh_skips", marks=pytest.mark.long)])
def test_both_cuts_add_residuals_as_pytorch(tiny: Checkpoint, cut: Cut, out: Path) -> None:
    export = export_tiny(tiny, out, cut=cut)
    for name in CONTROLLED:
        check_residuals(export, name, tiny.part("unet"))


def test_8_bit_layers_round_what_has_residuals(tiny: Checkpoint, tiny_exports: Exports) -> None:
    export = tiny_exports("int8")
    for name in CONTROLLED:
        unet = tiny.part("unet")
        fake_quantise(unet, export.file(changed_file("unet")))
        check_residuals(export, name, unet, MOST_OF_INT8)


@pytest.mark.parametrize("precision", list(MOST_OF_A_NET))
def test_a_net_is_made_from_the_way_down(
    tiny: Checkpoint, tiny_exports: Exports, precision: str, tmp_path: Path
) -> None:
    made = ControlNetModel.from_unet(
        tiny.part("unet"), conditioning_embedding_out_channels=(4, 8), load_weights_from_unet=False
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        width = parameter[0].numel() ** 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) / width
    file, export = read_control(write_plain(tmp_path, made), tiny), tiny_exports(precision)
    found = load_control(export, file)["control_deep"]
    expected = torch_control(file, tiny.arch)["control_deep"]
    assert isinstance(found, OnnxRuntimeEngine)
    given = drawn(*expected.spec.inputs)
    check_equal(computed(found, given), computed(expected, given), MOST_OF_A_NET[precision])
