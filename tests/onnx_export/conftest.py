"""Exports that many tests share. Each is made once in a run. The tests that use them are slow,
because the first of them traces networks for up to a minute."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from engines.folders.export_folder import ExportFolder
from onnx_export import exporter
from onnx_export.calibration import calibration_prompts
from onnx_export.export_spec import ExportSpec
from onnx_export.exporter import export, unchecked
from onnx_export.recipes import RECIPES
from sdxl.checkpoint import Checkpoint, find
from tests.onnx_export.exports import CachedTrace, Exports, export_tiny, write_tiny

TRACED = {"tiny", "tiny_export", "tiny_exports", "exports"}
"""fixtures of tests that trace networks"""
FOLDER = Path(__file__).parent
MINI_PROMPTS = 8
"""prompts that calibrate the 8-bit exports of tests: enough for the numerics, not for quality"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = item.path.is_relative_to(FOLDER) and not item.get_closest_marker("long")
        if is_here and TRACED.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def quiet_model_optimizer() -> None:
    """At its import, Model Optimizer warns of an unknown version of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("modelopt.torch.quantization")


@pytest.fixture(scope="session", autouse=True)
def traced(request: pytest.FixtureRequest) -> Iterator[CachedTrace]:
    with pytest.MonkeyPatch.context() as patch:
        cached = CachedTrace(Path(request.config.cache.mkdir("traces")))
        patch.setattr(exporter, "trace", cached)
        yield cached


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_export(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> ExportFolder:
    """A shared export for tests that only read it; a test that changes a folder makes its own."""
    return export_tiny(tiny, tmp_path_factory.mktemp("tiny") / "fp32")


@pytest.fixture(scope="session")
def tiny_exports(
    tiny: Checkpoint, tiny_export: ExportFolder, tmp_path_factory: pytest.TempPathFactory
) -> Exports:
    """Return a function that exports the tiny model in a precision."""
    root = tmp_path_factory.mktemp("tiny_precisions")

    @cache
    def exported(precision: str) -> ExportFolder:
        if precision == tiny_export.precision:
            return tiny_export
        return export_tiny(tiny, root / precision, precision)

    return exported


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Return a function that exports the embedded model, unchecked, in minutes: for long tests."""
    root = tmp_path_factory.mktemp("mini")

    @cache
    def exported(precision: str) -> ExportFolder:
        checkpoint = find("mini")
        prompts: tuple[str, ...] = ()
        if precision in RECIPES:
            recipe = RECIPES[precision]
            prompts = tuple(calibration_prompts(checkpoint, None, recipe)[:MINI_PROMPTS])
        return export(
            ExportSpec(checkpoint, precision, root / precision, prompts=prompts), unchecked
        )

    return exported


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "export"
