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
from sdxl.engine import Engine
from tests.engines.test_control_weights import write_plain
from tests.engines.variant_graphs import check_equal, computed, drawn
from tests.sdxl.control_nets import MEDIUM, SMALL, random_control, random_union

MOST_IN_HALVES = 5e-3
DTYPES = ("float32", "float16")


def read(net: Any, folder: Path) -> ControlFile:
    return read_control(write_plain(folder, net), find("mini"))


def outputs_of(engine: Engine, given: Mapping[str, Tensor] = {}) -> dict[str, Tensor]:
    """Inputs that are not given get random numbers."""
    return computed(engine, {**drawn(*engine.spec.inputs), **given})


@pytest.mark.parametrize("make", [random_control, random_union])
def test_a_net_like_the_way_down_runs_in_onnxruntime(make: Any, tmp_path: Path) -> None:
    file = read(make(), tmp_path)
    found, expected = load_control(open_mini(), file), torch_control(file, find("mini").arch)
    assert isinstance(found["control_deep"], OnnxRuntimeEngine)
    # If the session did not copy the weights, their memory would now have other contents.
    gc.collect()
    ready = outputs_of(expected["control_prompt"])
    assert all(map(torch.equal, outputs_of(found["control_prompt"]).values(), ready.values()))
    residuals = outputs_of(expected["control_deep"], ready)
    assert len(residuals) == 10
    check_equal(outputs_of(found["control_deep"], ready), residuals)


@pytest.mark.parametrize("config", [SMALL, MEDIUM], ids=["small", "medium"])
def test_a_smaller_net_runs_in_pytorch(config: dict[str, Any], tmp_path: Path) -> None:
    file = read(random_control(**config), tmp_path)
    engines = load_control(open_mini(), file)
    assert all(isinstance(each, TorchEngine) for each in engines.values())
    ready = outputs_of(engines["control_prompt"])
    assert all(each.norm() > 0 for each in outputs_of(engines["control_deep"], ready).values())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_halves_are_near_the_reference(layout: torch.memory_format, tmp_path: Path) -> None:
    file, arch = read(random_control(), tmp_path), find("mini").arch
    whole, half = (torch_control(file, arch, dtype, "cpu", layout) for dtype in DTYPES)
    ready = outputs_of(whole["control_prompt"])
    check_equal(outputs_of(half["control_prompt"]), ready, MOST_IN_HALVES)
    residuals = outputs_of(whole["control_deep"], ready)
    check_equal(outputs_of(half["control_deep"], ready), residuals, MOST_IN_HALVES)
