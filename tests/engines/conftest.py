"""Engines for tests: tiny exports, and folders of plans that the TensorRT double can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from engines import choice
from engines.choice import EngineRequest
from engines.folders.export_folder import ExportFolder
from engines.folders.shipped import open_mini
from sdxl.checkpoint import Checkpoint
from sdxl.engine import Engines
from sdxl.networks.parts import networks_of
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from tests.engines.tiny_export import DIGEST, write_export
from tests.fakes import fake_engines

PICTURE = GenerationParams("a red circle on a blue background", seed=3, steps=8, cache_interval=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests neither read nor write the user's home."""
    home = tmp_path / "home"
    monkeypatch.setenv("SDXL_HOME", str(home))
    return home


@pytest.fixture
def tiny(tmp_path: Path) -> ExportFolder:
    return write_export(tmp_path / "tiny")


@pytest.fixture(scope="module")
def export() -> ExportFolder:
    """The embedded model's graphs."""
    return open_mini()


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineRequest:
    monkeypatch.setattr(choice, "model_digest", lambda checkpoint: DIGEST)
    return EngineRequest("some/model", Checkpoint("tiny", tmp_path / "checkpoint"))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that were loaded, in place of PyTorch and TensorRT."""
    from engines.pytorch import torch_engine
    from engines.trt import tensorrt_loading

    names: list[str] = []

    def pretend(name: str) -> Callable[..., Engines]:
        def load(*args: object, **kwargs: object) -> Engines:
            names.append(name)
            return fake_engines()

        return load

    monkeypatch.setattr(torch_engine, "load_torch", pretend("torch"))
    monkeypatch.setattr(tensorrt_loading, "load_tensorrt", pretend("tensorrt"))
    return names


@pytest.fixture(scope="session")
def numbers_of(mini: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes the embedded model's 8-bit numbers, from the calls of one
    picture, and returns their file."""
    from eval.gpu.proof import unet_calls
    from onnx_export.plain_maxima import write_numbers
    from onnx_export.recipes import RECIPES

    @cache
    def write(number: str, steps: int = PICTURE.steps) -> Path:
        path = tmp_path_factory.mktemp("numbers") / f"{number}.safetensors"
        unet = mini.checkpoint.part("unet")
        network = networks_of("unet", unet)["unet_deep"]
        made = unet_calls(mini, replace(PICTURE, steps=steps))
        calls = [each.inputs for each in made if each.network == "unet_deep"]
        write_numbers(unet, RECIPES[number], lambda: [network(*c.values()) for c in calls], path)
        return path

    return write
