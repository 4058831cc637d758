"""Graphs that take the residuals of ControlNets equal PyTorch's networks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.control_graphs import ControlGraphError, add_residuals
from engines.folders.export_folder import ExportFolder
from engines.lora_graphs import add_loras
from engines.low_rank import bank_of
from engines.onnxruntime_engine import OnnxRuntimeEngine, open_session
from engines.pytorch.torch_engine import TorchEngine
from sdxl.networks.parts import networks_of
from sdxl.specs import CONTROLLED, VARIANTS, ModelSpec, plain_name, with_residuals
from tests.engines.tiny_export import write_export
from tests.engines.variant_graphs import check_equal, computed, drawn, drawn_bank
from tests.sdxl.control_nets import mini_unet

ADAPTED = [
    VARIANTS["lora"]["unet_deep"],
    VARIANTS["locon"]["unet_shallow"],
    pytest.param(VARIANTS["locon"]["unet_deep"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", CONTROLLED)
def test_residuals_are_added_where_pytorch_adds_them(
    name: str, export: ExportFolder, specs: Mapping[str, ModelSpec]
) -> None:
    spec = specs[f"{name}+control"]
    content = add_residuals(export.graph_bytes(name), spec)
    found = OnnxRuntimeEngine(spec, open_session(export, name, content))
    network = networks_of("unet", copy.deepcopy(mini_unet()))[name]
    given = drawn(*spec.inputs)
    expected = computed(TorchEngine(spec, network), given)
    check_equal(computed(found, given), expected)
    plain = OnnxRuntimeEngine(specs[name], open_session(export, name))
    without = computed(plain, given)
    for output, tensor in without.items():
        assert (expected[output] - tensor).norm() > 0.1 * tensor.norm(), output
    # A row without a ControlNet has the bits of the plain graph.
    zeros = {key: 0 * each for key, each in given.items() if key.startswith("residual_")}
    for output, tensor in computed(found, given | zeros).items():
        assert torch.equal(tensor, without[output]), output


@pytest.mark.parametrize("name", ADAPTED)
def test_graphs_with_loras_take_residuals_too(
    name: str, export: ExportFolder, specs: Mapping[str, ModelSpec]
) -> None:
    plain = plain_name(name)
    unet = copy.deepcopy(mini_unet())
    bank = drawn_bank(unet)
    content, of_loras = add_loras(export.graph_bytes(plain), specs[name])
    spec = replace(specs[f"{name}+control"], bank=of_loras.bank)
    session = open_session(export, plain, add_residuals(content, spec))
    network = networks_of("unet", unet)[plain]
    given = drawn(*spec.inputs)
    expected = computed(TorchEngine(spec, network, bank_of(name, network, bank)), given)
    check_equal(computed(OnnxRuntimeEngine(spec, session, bank=bank), given), expected)
    without = computed(TorchEngine(specs[f"{plain}+control"], network), given)["noise"]
    assert (expected["noise"] - without).norm() > 0.01 * without.norm()


def test_a_graph_without_places_for_residuals_is_refused(tmp_path: Path) -> None:
    export = write_export(tmp_path / "tiny")
    spec = with_residuals(export.specs, export.arch)["unet_deep+control"]
    with pytest.raises(ControlGraphError, match="unet_deep.control: found 0 places for 10 residu"):
        add_residuals(export.graph_bytes("unet_deep"), spec)
