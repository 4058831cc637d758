"""The whole `sdxl render`: the real pipeline on the embedded model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sdxl import cli
from sdxl.checkpoint import MINI
from tests.serve.services import ROOT
from tests.waiting import wait_until

QUICK = ["--steps", "4", "--seed", "7", "--cache-interval", "2"]


def start(cwd: Path, *argv: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name != cli.TRACEBACK}
    return subprocess.Popen(
        [sys.executable, "-m", "sdxl.cli", "render", *argv],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pixels(path: str | Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    return tmp_path


@pytest.mark.slow
def test_a_fresh_process_renders(tmp_path: Path) -> None:
    process = start(tmp_path, "a red circle", *QUICK, "--json", "--out", "pictures")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err.count("\n") == 1, err
    assert "--cache-interval 1" in err
    (facts,) = map(json.loads, out.splitlines())
    assert files(tmp_path) == [facts["file"]]
    assert pixels(tmp_path / facts["file"]).shape == (128, 128, 3)
    assert (facts["seed"], facts["steps"], facts["model"]) == (7, 4, "sdxl-mini")
    assert (facts["deep_steps"], facts["shallow_steps"]) == (2, 2)
    assert all(facts[name] > 0 for name in ("encode_s", "denoise_s", "decode_s"))


def test_an_upscaled_picture_makes_itself_again(folder: Path) -> None:
    flags = [*QUICK, "--upscale", "1.5", "--upscale-strength", "0.5", "--width", "64"]
    assert cli.main(["render", "a green star", *flags, "--out", "a.png"]) == 0
    assert cli.main(["render", "--from", "a.png", "--out", "b.png"]) == 0
    assert pixels("a.png").shape == (192, 96, 3)
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert cli.main(["render", "a star", "--image", "a.png", "--upscale", "2", *QUICK]) == 0
    (made,) = (Path("out") / name for name in files(folder / "out"))
    # A larger image than the model's own size begins at that size.
    assert pixels(made).shape == (368, 176, 3)


def test_a_picture_makes_itself_again(folder: Path) -> None:
    flags = [*QUICK, "--scheduler", "euler_a", "--width", "136", "--height", "120"]
    assert cli.main(["render", "a green star", *flags, "--out", "a.png"]) == 0
    assert cli.main(["render", "--from", "a.png", "--out", "b.png"]) == 0
    assert pixels("a.png").shape == (120, 136, 3)
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_an_image_is_made_anew_and_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only pixels under the white mask change. An image may also supply its own settings."""
    picture = Image.effect_noise((128, 128), 60).convert("RGB")
    mask = Image.new("L", picture.size, 0)
    mask.paste(255, (32, 32, 96, 96))
    picture.save("image.png")
    mask.save("mask.png")
    flags = ["--image", "image.png", "--mask", "mask.png"]
    assert cli.main(["render", "a green star", *QUICK, *flags, "--out", "a.png", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["strength"], facts["width"], facts["height"]) == (1.0, 128, 128)
    made, kept = pixels("a.png"), np.asarray(mask) == 0
    assert np.array_equal(made[kept], np.asarray(picture)[kept])
    assert not np.array_equal(made, np.asarray(picture))
    assert cli.main(["render", "--from", "a.png", *flags, "--out", "b.png"]) == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert cli.main(["render", "--from", "a.png", "--out", "c.png"]) == 2
    assert "from needs --image, which the picture was made from" in capsys.readouterr().err


def test_strength_says_how_many_steps_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (96, 160), "red").save("image.jpg")
    flags = ["--image", "image.jpg", "--steps", "10", "--strength", "0.5", "--json"]
    assert cli.main(["render", "a ring", *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["deep_steps"], facts["shallow_steps"]) == (3, 2)
    assert pixels(facts["file"]).shape == (160, 96, 3)


@pytest.mark.slow
def test_an_interrupt_leaves_whole_files_only(tmp_path: Path) -> None:
    process = start(tmp_path, "a ring", "--n", "5000", "--steps", "2", "--cache-interval", "1")
    try:
        wait_until(lambda: list(tmp_path.glob("out/*.png")), 120)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and err == ""
    for name in files(tmp_path):
        pixels(tmp_path / name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--width", "130"], "width must be a multiple of 8"),
        (["--backend", "abacus"], "backend must be one of"),
        (["--precision", "int9"], "precision must be one of fp32, fp16"),
    ],
)
def test_what_the_model_does_not_allow_is_a_bad_request(
    flags: list[str], message: str, refused_early: Callable[..., str]
) -> None:
    assert message in refused_early("render", "a ring", *flags)


def truncate_weights(model: Path) -> None:
    (path,) = (model / "unet").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "model"),
    "no index": (lambda m: (m / "model_index.json").unlink(), "model_index.json"),
    "no tokenizer": (lambda m: shutil.rmtree(m / "tokenizer_2"), "tokenizer_2"),
    "truncated weights": (truncate_weights, "unet"),
    "broken config": (lambda m: (m / "unet" / "config.json").write_text("{"), "config.json"),
}


@pytest.mark.parametrize("case", BREAKAGES)
def test_a_broken_model_is_one_line_that_names_it(
    case: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    breakage, named = BREAKAGES[case]
    model = folder / "model"
    shutil.copytree(MINI, model)
    breakage(model)
    before = files(folder)
    assert cli.main(["render", "a ring", *QUICK, "--model", str(model)]) in (1, 2)
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1 and "unexpected" not in err, err
    assert named in err and model.name in err
    assert files(folder) == before
