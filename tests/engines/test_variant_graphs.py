"""Graphs with LoRAs, residuals and image prompts equal PyTorch's networks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import onnx
import pytest
import torch

from engines.control_graphs import ControlGraphError, add_residuals
from engines.folders.export_folder import ExportFolder
from engines.image_graphs import ImageGraphError, add_images
from sdxl.specs import CONTROLLED
from tests.engines.variant_graphs import (
    MOST,
    both_engines,
    check_equal,
    check_residuals,
    computed,
    drawn,
    with_variants,
)
from tests.sdxl.control_nets import mini_unet


@pytest.fixture
def unet() -> Any:
    return copy.deepcopy(mini_unet())


@pytest.mark.parametrize("name", CONTROLLED)
def test_residuals_are_added_where_pytorch_adds_them(
    name: str, export: ExportFolder, unet: Any
) -> None:
    check_residuals(export, name, unet)


@pytest.mark.parametrize("name", ["unet_deep", "unet_deep+control"])
def test_images_are_attended_to_as_in_pytorch(name: str, export: ExportFolder, unet: Any) -> None:
    engines = both_engines(export, f"{name}+image", unet)
    given = drawn(*engines[0].spec.inputs)
    found, expected = (computed(each, given) for each in engines)
    check_equal(found, expected)
    for mine, plain in zip(engines, both_engines(export, name, unet), strict=True):
        with_images, without = computed(mine, given), computed(plain, given)
        change = (with_images["noise"] - without["noise"])[0].norm()
        assert change > 100 * MOST * without["noise"][0].norm()
        for output, tensor in without.items():
            # A row without an image prompt has the bits of the plain network.
            assert torch.equal(with_images[output][1], tensor[1]), output


@pytest.mark.parametrize(
    "name",
    [
        "unet_deep+lora+control",
        "unet_shallow+locon+control",
        pytest.param("unet_deep+locon+control", marks=pytest.mark.slow),
        "unet_deep+lora+image",
        "unet_deep+lora+control+image",
    ],
)
def test_graphs_with_loras_take_residuals_and_image_prompts_too(
    name: str, export: ExportFolder, unet: Any
) -> None:
    found, reference = both_engines(export, name, unet)
    given = drawn(*found.spec.inputs)
    expected = computed(reference, given)
    check_equal(computed(found, given), expected)
    without = computed(reference, given | {"scales": 0 * given["scales"]})["noise"]
    assert (expected["noise"] - without).norm() > 0.01 * without.norm()


@pytest.mark.parametrize(
    ("ending", "add", "error", "message"),
    [
        ("control", add_residuals, ControlGraphError, "found 0 places for 10 residuals"),
        ("image", add_images, ImageGraphError, "found 0 places for"),
    ],
)
def test_a_graph_without_places_is_refused(
    ending: str, add: Any, error: type[Exception], message: str, tiny: ExportFolder
) -> None:
    spec = with_variants(tiny)[f"unet_deep+{ending}"]
    with pytest.raises(error, match=f"unet_deep.{ending}: {message}"):
        add(tiny.graph_bytes("unet_deep"), spec)


def test_halves_stay_halves(export: ExportFolder) -> None:
    """In an fp16 export the graphs are strongly typed."""
    spec = with_variants(export)["unet_deep+image"]
    halves = replace(spec, outputs=tuple(replace(t, dtype="float16") for t in spec.outputs))
    graph = onnx.load_model_from_string(add_images(export.graph_bytes("unet_deep"), halves)).graph
    numbers = [t for t in graph.initializer if t.name.startswith("images.constant")]
    kinds = {onnx.TensorProto.DataType.Name(t.data_type) for t in numbers}
    assert kinds == {"INT64", "FLOAT16"}
