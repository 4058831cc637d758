"""Exports of every cut and precision run ControlNets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.controlnets.controlnet import ControlNetModel

from engines.control_graphs import add_residuals
from engines.control_weights import read_control
from engines.folders.export_folder import ExportFolder, changed_file
from engines.onnx_controls import load_control
from engines.onnxruntime_engine import OnnxRuntimeEngine, open_session
from engines.pytorch.torch_engine import TorchEngine, torch_control
from onnx_export.reference import fake_quantise
from sdxl.checkpoint import Checkpoint
from sdxl.networks.parts import networks_of
from sdxl.specs import CONTROLLED, Cut, network_specs, with_residuals
from tests.engines.test_control_weights import write_plain
from tests.engines.variant_graphs import check_equal, computed, drawn
from tests.onnx_export.exports import Exports, export_tiny

MOST = {"fp32": 1e-5, "int8": 0.05}
MOST_OF_A_NET = {"fp32": 1e-5, "fp16": 5e-3, "int8": 5e-3}
"""the largest error of a net, whose layers are not in 8 bits"""


def check(export: ExportFolder, unet: Any, name: str) -> None:
    spec = with_residuals(export.specs, export.arch)[f"{name}+control"]
    content = add_residuals(export.graph_bytes(name), spec)
    found = OnnxRuntimeEngine(spec, open_session(export, name, content))
    floats = network_specs(export.arch, cut=export.cut)
    wanted = with_residuals(floats, export.arch)[f"{name}+control"]
    given = drawn(*wanted.inputs)
    network = networks_of("unet", unet, export.cut)[name]
    expected = computed(TorchEngine(wanted, network), given)
    check_equal(computed(found, given), expected, MOST[export.precision])
    plain = OnnxRuntimeEngine(export.specs[name], open_session(export, name))
    zeros = {key: 0 * each for key, each in given.items() if key.startswith("residual_")}
    without = computed(plain, given)
    for output, tensor in computed(found, given | zeros).items():
        assert torch.equal(tensor, without[output]), output


@pytest.mark.parametrize("cut", ["reference", pytest.param("fresh_skips", marks=pytest.mark.long)])
def test_both_cuts_add_residuals_as_pytorch(tiny: Checkpoint, cut: Cut, out: Path) -> None:
    export = export_tiny(tiny, out, cut=cut)
    for name in CONTROLLED:
        check(export, tiny.part("unet"), name)


def test_8_bit_layers_round_what_has_residuals(tiny: Checkpoint, tiny_exports: Exports) -> None:
    export = tiny_exports("int8")
    for name in CONTROLLED:
        unet = tiny.part("unet")
        fake_quantise(unet, export.file(changed_file("unet")))
        check(export, unet, name)


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
    found, expected = load_control(export, file), torch_control(file, tiny.arch)
    assert found is not None and isinstance(found["control_deep"], OnnxRuntimeEngine)
    given = drawn(*expected["control_deep"].spec.inputs)
    residuals = computed(expected["control_deep"], given)
    check_equal(computed(found["control_deep"], given), residuals, MOST_OF_A_NET[precision])
