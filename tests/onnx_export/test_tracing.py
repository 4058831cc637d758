"""A graph is what its spec says, and depends on the network's shape alone."""

from __future__ import annotations

import re
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnx_export.tracing import TraceError, trace
from sdxl.checkpoint import Checkpoint
from sdxl.networks.parts import networks_of
from sdxl.specs import network_specs
from tests.onnx_export.exports import CachedTrace

ROOT = Path(__file__).parents[2]
PACKAGES = ("sdxl", "engines", "onnx_export", "serve", "eval")
NETWORKS = {
    "clip_l": "text_encoder",
    "clip_g": "text_encoder_2",
    "unet_prompt": "unet",
    "unet_deep": "unet",
    "unet_shallow": "unet",
    "vae_decoder": "vae",
    "vae_encoder": "vae",
}


@pytest.fixture(scope="module")
def graphs(tiny: Checkpoint, traced: CachedTrace) -> dict[str, ir.Model]:
    specs = network_specs(tiny.arch)
    networks = {part: networks_of(part, tiny.part(part)) for part in set(NETWORKS.values())}
    return {name: traced(specs[name], networks[part][name]) for name, part in NETWORKS.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_names_no_place_of_its_making(name: str, graphs: dict[str, ir.Model]) -> None:
    model = graphs[name]
    assert not model.metadata_props and not model.graph.metadata_props
    for node in model.graph:
        assert not node.metadata_props and not node.doc_string, node.name


def test_weights_have_no_part_in_a_graph(tiny: Checkpoint, graphs: dict[str, ir.Model]) -> None:
    """An optimiser that saw the weights would fold zeros away and merge equal tensors."""
    network = networks_of("vae", tiny.part("vae"))["vae_decoder"]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    again = trace(network_specs(tiny.arch)["vae_decoder"], network)
    known = graphs["vae_decoder"]
    assert [node.op_type for node in again.graph] == [node.op_type for node in known.graph]
    assert list(again.graph.initializers) == list(known.graph.initializers)


def test_every_parameter_is_a_weight_without_a_value(
    tiny: Checkpoint, graphs: dict[str, ir.Model]
) -> None:
    network = networks_of("unet", tiny.part("unet"))["unet_prompt"]
    graph = graphs["unet_prompt"].graph
    open_ = {name for name, v in graph.initializers.items() if v.const_value is None}
    assert open_ == {name for name, _ in network.named_parameters()}


def test_the_names_of_cached_features_are_stated_in_the_specs_alone() -> None:
    """Names that are not derived from specs.py would survive a change there."""
    name = re.compile(r"""["']cache("|'|_(hidden|past|up|skip))""")
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [path.name for path in files if name.search(path.read_text())] == ["specs.py"]


def test_an_output_that_is_not_the_specs_is_an_error(tiny: Checkpoint) -> None:
    class Halving(nn.Module):
        def forward(self, token_ids: torch.Tensor) -> tuple[torch.Tensor]:
            return (token_ids.half(),)

    with pytest.raises(TraceError, match=r"'hidden_l' became float16 with 2 dims, expected"):
        trace(network_specs(tiny.arch)["clip_l"], Halving())
