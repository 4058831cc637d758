"""Names of pictures: portable, and never the same twice in a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sdxl.images import encode
from sdxl.params import GenerationParams, InvalidParams
from serve.render.destination import Destination, slug


def named(out: Path, format: str | None, prompts: list[str]) -> list[str]:
    destination = Destination.prepare(str(out), format, len(prompts))
    return [destination.path(GenerationParams(prompt, seed=7)).name for prompt in prompts]


def test_names_come_from_prompt_and_seed(tmp_path: Path) -> None:
    prompts = ["A Red circle!", "a red circle", "étoile", "赤い円", "Красный круг", "", "x" * 300]
    assert named(tmp_path, None, prompts) == [
        "a-red-circle-7.png",
        "a-red-circle-7-2.png",
        "étoile-7.png",
        "赤い円-7.png",
        "красный-круг-7.png",
        "image-7.png",
        "x" * 60 + "-7.png",
    ]


@pytest.mark.parametrize(
    "words",
    [
        *("दिल", "นักเรียน", "עִבְרִית", "العَرَبِيَّة", "می\u200cخواهم"),
        *("straße", "κύκλος", "தமிழ்", "i̇stanbul", "ኢትዮጵያ"),
    ],
)
def test_a_name_keeps_the_letters_and_marks_of_every_script(words: str) -> None:
    assert slug(f"{words}! ({words})") == f"{words}-{words}"


def test_the_sheet_s_name_is_no_picture_s(tmp_path: Path) -> None:
    sheet = tmp_path / "a-ring-7.png"
    destination = Destination.prepare(str(tmp_path), None, 1, sheet)
    assert destination.path(GenerationParams("a ring", seed=7)).name == "a-ring-7-2.png"
    with pytest.raises(InvalidParams, match="sheet must be another file than --out"):
        Destination.prepare(str(sheet), None, 1, tmp_path / "." / "a-ring-7.png")


@pytest.mark.parametrize("prompt", ["../../etc/passwd", "/", "a/b\\c:d*e?", "-rf", "con\0"])
def test_a_prompt_never_leaves_the_folder(prompt: str) -> None:
    assert slug(prompt).replace("-", "a").isalnum() and not slug(prompt).startswith("-")


def test_format_follows_the_file_name(tmp_path: Path) -> None:
    assert Destination.prepare(str(tmp_path / "a.jpg"), None, 1).format == "jpeg"
    assert Destination.prepare(str(tmp_path / "a.JPEG"), "jpeg", 1).format == "jpeg"
    assert named(tmp_path / "sub", "webp", ["a"]) == ["a-7.webp"]
    with pytest.raises(InvalidParams, match="format must be jpeg for .*, got .png"):
        Destination.prepare(str(tmp_path / "a.jpg"), "png", 1)


def test_one_file_holds_one_image(tmp_path: Path) -> None:
    assert named(tmp_path / "a.png", None, ["a"]) == ["a.png"]
    with pytest.raises(InvalidParams, match="out must be a folder for 2 images"):
        named(tmp_path / "a.png", None, ["a", "b"])


def test_a_folder_may_be_named_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "v1.png").mkdir()
    assert named(tmp_path / "v1.png", None, ["a", "b"]) == ["a-7.png", "b-7.png"]


def test_names_are_shortened_between_words(tmp_path: Path) -> None:
    prompt = "a large yellow star above a small green square on a white background of paper"
    assert slug(prompt) == "a-large-yellow-star-above-a-small-green-square-on-a-white"
    assert len(slug("円" * 300).encode()) <= 180


def test_an_existing_picture_is_not_overwritten(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    made = []
    for steps in (4, 8, 4):
        params = GenerationParams("a ring", seed=7, steps=steps, width=8, height=8)
        metadata = {**params.as_dict(), "model": "sdxl-mini"}
        path = Destination.prepare(str(tmp_path), None, 1).path(params, metadata)
        path.write_bytes(encode(pixels, "png", metadata))
        made.append(path.name)
    assert made == ["a-ring-7.png", "a-ring-7-2.png", "a-ring-7.png"]
    (tmp_path / "a-ring-9.png").write_text("somebody's notes")
    other = GenerationParams("a ring", seed=9)
    assert Destination.prepare(str(tmp_path), None, 1).path(other, {}).name == "a-ring-9-2.png"


@pytest.mark.parametrize("name", ["x.gif", "x.BMP", "x.tiff", "x.svg"])
def test_a_name_with_an_unknown_format_becomes_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidParams, match="out must be a folder, or .png"):
        Destination.prepare(str(tmp_path / name), None, 1)
    assert not (tmp_path / name).exists()


def test_standard_output_takes_one_picture() -> None:
    assert Destination.prepare("-", "webp", 1).is_stdout
    with pytest.raises(InvalidParams, match="out must be a folder for 2 images"):
        Destination.prepare("-", None, 2)
