"""A ControlNet's engines beside ONNX Runtime equal those in PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.control_weights import ControlFile, read_control
from engines.folders.shipped import open_mini
from engines.onnx_controls import load_control
from engines.onnxruntime_engine import OnnxRuntimeEngine
from engines.pytorch.torch_engine import TorchEngine, torch_control
from sdxl.checkpoint import find
from sdxl.engine import Engine, torch_dtype
from sdxl.specs import image_axes, level_axes
from tests.engines.test_control_weights import write_plain
from tests.engines.variant_graphs import check_equal
from tests.sdxl.control_nets import MEDIUM, SMALL, random_control, random_union

MOST, MOST_IN_HALVES = 1e-5, 5e-3
DTYPES = ("float32", "float16")
SIDES = (17, 23)
AXES = {"rows": 3, "tokens": 77, "pictures": 3, "hints": 2, **level_axes(*SIDES)}


def read(net: Any, folder: Path) -> ControlFile:
    return read_control(write_plain(folder, net), find("mini"))


def computed(engine: Engine, given: Mapping[str, Tensor] = {}) -> dict[str, Tensor]:
    """Inputs that are not given get random numbers."""
    axes = AXES | image_axes(find("mini").arch, *SIDES)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        t.name: given[t.name]
        if t.name in given
        else torch.randn(t.shape(axes), generator=generator).to(torch_dtype(t))
        for t in engine.spec.inputs
    }
    outputs = {
        t.name: torch.empty(t.shape(axes), dtype=torch_dtype(t)) for t in engine.spec.outputs
    }
    engine(inputs, outputs)
    return outputs


@pytest.mark.parametrize("make", [random_control, random_union])
def test_a_net_like_the_way_down_runs_in_onnxruntime(make: Any, tmp_path: Path) -> None:
    file = read(make(), tmp_path)
    found, expected = load_control(open_mini(), file), torch_control(file, find("mini").arch)
    assert isinstance(found["control_deep"], OnnxRuntimeEngine)
    # If the session did not copy the weights, their memory would now have other contents.
    gc.collect()
    ready = computed(expected["control_prompt"])
    assert all(map(torch.equal, computed(found["control_prompt"]).values(), ready.values()))
    residuals = computed(expected["control_deep"], ready)
    assert len(residuals) == 10
    check_equal(computed(found["control_deep"], ready), residuals, MOST)


@pytest.mark.parametrize("config", [SMALL, MEDIUM], ids=["small", "medium"])
def test_a_smaller_net_runs_in_pytorch(config: dict[str, Any], tmp_path: Path) -> None:
    file = read(random_control(**config), tmp_path)
    engines = load_control(open_mini(), file)
    assert all(isinstance(each, TorchEngine) for each in engines.values())
    ready = computed(engines["control_prompt"])
    assert all(each.norm() > 0 for each in computed(engines["control_deep"], ready).values())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_halves_are_near_the_reference(layout: torch.memory_format, tmp_path: Path) -> None:
    file, arch = read(random_control(), tmp_path), find("mini").arch
    whole, half = (torch_control(file, arch, dtype, "cpu", layout) for dtype in DTYPES)
    ready = computed(whole["control_prompt"])
    halves = {name: tensor.half() for name, tensor in ready.items()}
    check_equal(computed(half["control_prompt"]), ready, MOST_IN_HALVES)
    residuals = computed(whole["control_deep"], ready)
    check_equal(computed(half["control_deep"], halves), residuals, MOST_IN_HALVES)
