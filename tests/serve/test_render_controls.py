"""`sdxl render` with ControlNets: flags, maps, and pictures that are made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import engines
from sdxl import cli
from sdxl.catalogue import Catalogue
from sdxl.controls import Control
from sdxl.digests import sha256_of
from sdxl.images import encode, read_parameters
from sdxl.pipeline import Pipeline
from serve.render.input_pictures import filled
from tests.sdxl.control_nets import random_control

Capture = pytest.CaptureFixture[str]
Run = Callable[..., tuple[int, str]]
SIZE = ("--width", "128", "--height", "96")
QUICK = ("a ring", *SIZE, "--steps", "3", "--seed", "7", "--controlnets", "nets")


@pytest.fixture(scope="module")
def nets(tmp_path_factory: Any) -> Iterator[Path]:
    folder: Path = tmp_path_factory.mktemp("nets")
    for number, name in enumerate(("edges", "depth")):
        random_control(number).save_pretrained(folder / name)
    yield folder


@pytest.fixture
def render(
    mini: Pipeline, nets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> Run:
    """Return a function that runs the command and returns its exit code and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cli.TRACEBACK, raising=False)

    def load(controlnets: str, **_: Any) -> Pipeline:
        folders = [nets] if controlnets == "nets" else []
        return replace(mini, catalogue=Catalogue(control_folders=folders))

    monkeypatch.setattr(engines, "load", load)
    for name, size in (("map", (128, 96)), ("wide", (128, 64))):
        Image.effect_noise(size, 50).save(f"{name}.png")
    Path("text.png").write_text("not a picture")

    def run(*argv: str) -> tuple[int, str]:
        code = cli.main(["render", *argv, "--json"])
        return code, capsys.readouterr().err

    return run


def test_a_picture_is_made_again_with_its_maps(render: Run) -> None:
    asked = (
        "--control",
        "edges=map.png:0.8:0-0.9:canny",
        "--control",
        "depth=wide.png:resize=fill",
    )
    assert render(*QUICK, *asked, "--out", "a.png") == (0, "")
    stored = read_parameters(Path("a.png"))
    digests = [sha256_of(Path(name)) for name in ("map.png", "wide.png")]
    assert [each["image"] for each in stored["controls"]] == digests
    assert set(stored["control_files"]) == {"edges", "depth"}
    again = ("--from", "a.png", "--out", "b.png", "--controlnets", "nets")
    code, error = render(*again)
    assert code == 2 and "from needs the maps again: --control edges=FILE (sha256 " in error
    assert digests[1] in error and error.count("\n") == 1
    maps = ("--control", "edges=map.png", "--control", "depth=wide.png")
    assert render(*again, *maps) == (0, "")
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    code, error = render(*again, "--control", "edges=wide.png:resize=crop")
    assert code == 0 and error == "sdxl render: a.png: left out: ControlNet depth\n"
    (control,) = read_parameters(Path("b.png"))["controls"]
    assert (control["image"], control["strength"], control["end"]) == (digests[1], 0.8, 0.9)


def test_an_edit_s_control_uses_the_edited_image(render: Run) -> None:
    flags = ("--image", "map.png", "--out", "a.png", "--strength", "0.9")
    assert render(*QUICK, *flags, "--control", "edges:canny") == (0, "")
    again = ("--from", "a.png", "--image", "map.png", "--controlnets", "nets", "--out", "b.png")
    assert render(*again) == (0, "")
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert render(*again, "--control", "edges=map.png") == (0, "")
    (control,) = read_parameters(Path("b.png"))["controls"]
    assert control["image"] == sha256_of(Path("map.png"))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("edges=none.png", "controls must be a readable file (No such file or directory)"),
        ("edges=text.png", "controls must be a PNG, JPEG or WEBP file (not a picture), got 'te"),
        ("edges", "controls with 'edges': needs the file of its map, edges=FILE, or --image"),
        ("edges=wide.png", "its map is 128x64, the picture 128x96; give a map of the same"),
        ("edgez=map.png", "controls must name ControlNets of the model, such as edges"),
        ("edges=map.png:3", "with 'edges': strength must be a number from 0 to 2, got 3.0"),
        ("edges=map.png:mode=soft", "mode must be one of balanced, prompt, control, guess"),
        ("edges:soft", "argument --control: must be NAME=FILE[:STRENGTH[:START-END]]"),
        ("edges=map.png:low=x", "argument --control: must be NAME=FILE[:STRENGTH[:START-END]]"),
    ],
)
def test_a_wrong_control_is_an_error_of_one_line(render: Run, flag: str, message: str) -> None:
    code, error = render(*QUICK, "--control", flag)
    assert code == 2 and message in error and error.count("\n") == 1, error


def test_a_foreign_picture_s_controls_need_their_maps(render: Run) -> None:
    from PIL import PngImagePlugin

    chunks = PngImagePlugin.PngInfo()
    unit = "Module: canny, Model: edges [1a2b3c4d], Weight: 0.5, Threshold A: 50"
    facts = "Steps: 3, Sampler: Euler, CFG scale: 5, Seed: 1, Size: 128x96"
    chunks.add_text("parameters", f'a ring\n{facts}, ControlNet 0: "{unit}"')
    Image.new("RGB", (8, 8)).save("a.png", pnginfo=chunks)
    again = ("--from", "a.png", "--controlnets", "nets", "--out", "b.png")
    assert "from needs the maps again: --control edges=FILE\n" in render(*again)[1]
    assert render(*again, "--control", "edges=map.png")[0] == 0
    (control,) = read_parameters(Path("b.png"))["controls"]
    assert [control[name] for name in ("strength", "preprocess", "low")] == [0.5, "canny", 50]


@pytest.mark.parametrize(
    ("given", "strengths"),
    [
        (("u", "b"), [0.5]),
        (("u", "b", "u", "a"), [0.5, 0.8]),
        (("u", "c", "u", "b"), [0.8, 0.5]),
        (("v", "a"), [1.0]),
    ],
)
def test_flags_are_filled_by_name_and_map(given: tuple[str, ...], strengths: list[float]) -> None:
    stored = (Control("u", "a", 0.8), Control("u", "b", 0.5))
    made = filled([Control(*each) for each in zip(given[::2], given[1::2], strict=True)], stored)
    assert [each.strength for each in made] == strengths
    assert [each.image for each in made] == list(given[1::2])


def test_a_picture_without_controls_says_nothing_of_them() -> None:
    params = {"prompt": "a", "width": 8, "height": 8, "controls": None}
    stored = read_parameters(encode(Image.new("RGB", (8, 8)), "png", params))
    assert "controls" not in json.dumps(stored)
