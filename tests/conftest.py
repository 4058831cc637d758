"""Fixtures that many tests share: the embedded model, here and in diffusers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engines
from sdxl import cli
from sdxl.checkpoint import find
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline, Result, WithPictures

pytest_plugins = ["tests.hangs"]

Asked = GenerationParams | WithPictures


@pytest.fixture(scope="session")
def mini() -> Pipeline:
    return engines.load("mini", "torch")


@pytest.fixture(scope="session")
def diffusers_mini() -> Any:
    from diffusers import StableDiffusionXLPipeline

    pipe = StableDiffusionXLPipeline.from_pretrained(
        str(find("mini").folder), torch_dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def small_refiner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.sdxl.refiners import write_refiner

    return write_refiner(tmp_path_factory.mktemp("refiner") / "small")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, which must fail with this code and one line."""

    def run(*argv: str, code: int = cli.BAD_REQUEST) -> str:
        assert cli.main(argv) == code
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1, err
        return err

    return run


@pytest.fixture
def refused_early(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Like `refused`, in an empty folder that must stay empty."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> str:
        line = refused(*argv)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        return line

    return run


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import heavy libraries without their warnings, and outside the first test's time limit."""
    if session.config.getoption("numprocesses", None):
        # With pytest-xdist, other processes run the tests.
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diffusers
        import transformers
    del diffusers, transformers


def images_of(model: Pipeline, *asked: Asked) -> list[torch.Tensor]:
    """Return the pictures of requests, all of which must be made."""
    images = []
    for result in model.generate(asked):
        assert result.image is not None, result.error
        images.append(result.image)
    return images


def assert_picture(result: Result, expected: torch.Tensor) -> None:
    """Assert that a picture equals diffusers', whose values are clipped to -1..1."""
    assert result.error is None and result.image is not None, result.error
    measured = psnr(result.image.clamp(-1, 1), expected)
    assert measured >= 60, f"{result.params}: {measured:.1f} dB, required 60"


def assert_as_alone(model: Pipeline, made: Sequence[Result], asked: Sequence[Asked]) -> None:
    """Assert that each picture equals the picture of the same request alone."""
    for result, each in zip(made, asked, strict=True):
        (alone,) = model.generate([each])
        assert alone.image is not None and result.image is not None, result.error
        found = psnr(result.image, alone.image)
        assert found >= 60, f"{result.params}: {found:.1f} dB from itself alone, required 60"


def psnr(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the PSNR of float images in -1..1, in dB."""
    error = float(((found - expected) / 2).double().pow(2).mean())
    return float("inf") if error == 0 else -10 * float(torch.log10(torch.tensor(error)))
