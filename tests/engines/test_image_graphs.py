"""Graphs that attend to image prompts equal PyTorch's networks, with LoRAs and residuals, too."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from engines.control_graphs import variant_graph
from engines.folders.export_folder import ExportFolder
from engines.image_graphs import ImageGraphError, add_images
from engines.low_rank import bank_of
from engines.onnxruntime_engine import OnnxRuntimeEngine, open_session
from engines.pytorch.torch_engine import TorchEngine
from sdxl.networks.parts import networks_of
from sdxl.specs import ModelSpec, with_images
from tests.engines.tiny_export import write_export
from tests.engines.variant_graphs import MOST, check_equal, computed, drawn, drawn_bank
from tests.sdxl.control_nets import mini_unet

PLAIN = "unet_deep"


@pytest.mark.parametrize("ending", ["", "+control"])
def test_images_are_attended_to_as_in_pytorch(
    ending: str, export: ExportFolder, specs: Mapping[str, ModelSpec]
) -> None:
    spec, without = specs[f"{PLAIN}{ending}+image"], specs[PLAIN + ending]
    content, made = variant_graph(export.graph_bytes(PLAIN), spec)
    assert made == spec
    found = OnnxRuntimeEngine(spec, open_session(export, PLAIN, content))
    network = networks_of("unet", copy.deepcopy(mini_unet()))[PLAIN]
    given = drawn(*spec.inputs)
    expected = computed(TorchEngine(spec, network), given)
    check_equal(computed(found, given), expected)
    graph = variant_graph(export.graph_bytes(PLAIN), without)[0]
    plain = computed(OnnxRuntimeEngine(without, open_session(export, PLAIN, graph)), given)
    change = (expected["noise"] - plain["noise"])[0].norm()
    assert change > 100 * MOST * plain["noise"][0].norm()
    for output, tensor in plain.items():
        # A row without an image prompt has the bits of the plain graph, in PyTorch, too.
        assert torch.equal(computed(found, given)[output][1], tensor[1]), output
    for output, tensor in computed(TorchEngine(without, network), given).items():
        assert torch.equal(expected[output][1], tensor[1]), output


@pytest.mark.parametrize("name", ["unet_deep+lora", "unet_deep+lora+control"])
def test_graphs_with_loras_take_image_prompts_too(
    name: str, export: ExportFolder, specs: Mapping[str, ModelSpec]
) -> None:
    unet = copy.deepcopy(mini_unet())
    bank = drawn_bank(unet)
    spec = specs[f"{name}+image"]
    content, spec = variant_graph(export.graph_bytes(PLAIN), spec)
    found = OnnxRuntimeEngine(spec, open_session(export, PLAIN, content), bank=bank)
    network = networks_of("unet", unet)[PLAIN]
    given = drawn(*spec.inputs)
    expected = computed(TorchEngine(spec, network, bank_of(spec.name, network, bank)), given)
    check_equal(computed(found, given), expected)


def test_a_graph_without_text_is_refused(tmp_path: Path) -> None:
    export = write_export(tmp_path / "tiny")
    spec = with_images(export.specs, export.arch)["unet_deep+image"]
    with pytest.raises(ImageGraphError, match="unet_deep.image: found 0 places for"):
        add_images(export.graph_bytes("unet_deep"), spec)


def test_halves_stay_halves(export: ExportFolder, specs: Mapping[str, ModelSpec]) -> None:
    """In an fp16 export the graphs are strongly typed."""
    spec = specs["unet_deep+image"]
    halves = replace(spec, outputs=tuple(replace(t, dtype="float16") for t in spec.outputs))
    graph = onnx.load_model_from_string(add_images(export.graph_bytes(PLAIN), halves)).graph
    numbers = [t for t in graph.initializer if t.name.startswith("images.constant")]
    kinds = {onnx.TensorProto.DataType.Name(t.data_type) for t in numbers}
    assert kinds == {"INT64", "FLOAT16"}
