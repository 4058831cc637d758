"""Rows of a job that name an image: what they are made from, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdxl.params import Sizes
from serve.batch import command
from serve.batch.batch_spec import HAS_DEAD
from serve.orders import ImageOrder, ModelCard
from tests.sdxl.test_source import plain, saved
from tests.serve.batch import drawers
from tests.serve.batch.drawers import Drawer, dead_letters, jsonl, make, pictures


class Editor(Drawer):
    """One that edits; the picture is pasted as the worker pastes it."""

    async def card(self) -> ModelCard:
        return ModelCard("sdxl-mini", Sizes(128, 64, 512), can_edit=True)


@pytest.fixture
def pasting(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawers.draw

    def draw(order: ImageOrder) -> bytes:
        data = drawn(order)
        if order.source is None:
            return data
        import io

        return saved(order.source.pasted(Image.open(io.BytesIO(data)).convert("RGB")))

    monkeypatch.setattr(drawers, "draw", draw)


def ledger(out: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for path in sorted((out / "ledger").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return sorted(lines, key=lambda entry: entry["ordinal"])


def hole(width: int, height: int) -> bytes:
    mask = Image.new("L", (width, height), 0)
    mask.paste(255, (0, 0, width // 2, height))
    return saved(mask)


@pytest.mark.usefixtures("pasting")
def test_rows_with_an_image_are_edits_beside_rows_of_text(tmp_path: Path) -> None:
    """Sizes, steps and what stays follow the image; its digest is in the ledger."""
    (tmp_path / "in").mkdir()
    image = saved(Image.effect_noise((96, 160), 50).convert("RGB"))
    (tmp_path / "in" / "a.png").write_bytes(image)
    (tmp_path / "in" / "mask.png").write_bytes(hole(96, 160))
    url = "data:image/png;base64," + base64.b64encode(saved(plain(64, 64))).decode()
    rows = [
        {"prompt": "a ring"},
        {"prompt": "a star", "image": "in/a.png", "strength": 0.5},
        {"prompt": "a cross", "image": "in/a.png", "mask": "in/mask.png"},
        {"prompt": "a square", "image": url},
        {"prompt": "a circle", "image": "in/a.png", "mask": "in/mask.png", "mask_padding": 8},
    ]
    out = tmp_path / "out"
    assert make(jsonl(tmp_path, rows), out, load=Editor) == 0
    entries = ledger(out)
    asked = [
        (e["params"]["width"], e["params"]["height"], e["params"]["strength"]) for e in entries
    ]
    assert asked == [
        (128, 128, None),
        (96, 160, 0.5),
        (96, 160, 1.0),
        (64, 64, 0.8),
        (128, 128, 1.0),
    ]
    digest = hashlib.sha256(image).hexdigest()
    assert [e["origin"].get("image_sha256") == digest for e in entries] == [
        *(False, True, True, False, True)
    ]
    assert set(entries[2]["origin"]) == {"image_sha256", "mask_sha256"}
    made = Image.open(out / entries[2]["file"]).convert("RGB")
    before = np.asarray(Image.open(tmp_path / "in" / "a.png"))
    assert np.array_equal(np.asarray(made)[:, 48:], before[:, 48:])
    assert command.main(["--verify", str(out)]) == 0


def test_rows_whose_image_is_not_one_are_dead_letters_alone(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "good.png").write_bytes(saved(plain(64, 64)))
    (tmp_path / "outside.png").write_bytes(saved(plain(64, 64)))
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "text.png").write_text("not a picture")
    (folder / "good.png").write_bytes(saved(plain(64, 64)))
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    rows = [
        {"prompt": "0", "image": "good.png"},
        {"prompt": "1", "image": "none.png"},
        {"prompt": "2", "image": "text.png"},
        {"prompt": "3", "image": "../outside.png"},
        {"prompt": "4", "image": str(tmp_path / "outside.png")},
        {"prompt": "5", "image": "link.png"},
        {"prompt": "6", "mask": "good.png"},
        {"prompt": "7", "image": 7},
        {"prompt": "8", "strength": 0.5},
        {"prompt": "9", "image": "data:image/png;base64,####"},
        {"prompt": "10", "image": "good.png", "strength": 0.01},
        {"prompt": "11", "image": "good.png", "width": 100},
    ]
    assert make(jsonl(folder, rows), tmp_path / "out", load=Editor) == HAS_DEAD
    letters = {letter["line"].rpartition(" ")[2]: letter["error"] for letter in said(tmp_path)}
    assert len(pictures(tmp_path / "out")) == 1 and len(letters) == 11
    for line, words in {
        "2": "No such file",
        "3": "needed a PNG, JPEG or WEBP",
        "4": "below the input's folder",
        "5": "below the input's folder",
        "6": "below the input's folder",
        "7": "needed an image with it",
        "8": "needed a path or a data URL",
        "9": "needed an image to edit",
        "10": "needed base64",
        "11": "to take one",
        "12": "multiple of 8",
    }.items():
        assert words in letters[line], (line, letters[line])


def said(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "out" / "dead_letter.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_engines_that_cannot_edit_bury_the_row_and_say_why(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(saved(plain(64, 64)))
    rows = [{"prompt": "a", "image": "good.png"}, {"prompt": "b"}]
    assert make(jsonl(tmp_path, rows), tmp_path / "out") == HAS_DEAD
    (letter,) = dead_letters(tmp_path / "out")
    assert "without vae_encoder" in str(letter)
    assert len(pictures(tmp_path / "out")) == 1


def test_rows_are_upscaled_and_one_too_large_is_a_dead_letter(tmp_path: Path) -> None:
    """Of text and of an image; what cannot be is known before anything is drawn."""
    (tmp_path / "a.png").write_bytes(saved(plain(96, 160)))
    rows = [
        {"prompt": "a ring", "upscale": 1.5, "upscaler": "latent", "upscale_strength": 0.5},
        {"prompt": "a star", "image": "a.png", "upscale": 2.0},
        {"prompt": "a cross", "width": 256, "height": 256, "upscale": 3.0},
        {"prompt": "a square", "upscale_steps": 9},
    ]
    out = tmp_path / "out"
    assert make(jsonl(tmp_path, rows), out, load=Editor) == HAS_DEAD
    first, second = (each["params"] for each in ledger(out) if each["file"])
    assert (first["upscale"], first["upscaler"], first["upscale_steps"]) == (1.5, "latent", None)
    assert (second["width"], second["height"], second["strength"]) == (192, 320, 0.4)
    assert command.main(["--verify", str(out)]) == 0, "its size is the second leg's"
    errors = [each["error"] for each in dead_letters(out)]
    assert "upscale: 3.0" in errors[0] and "becomes 768x768" in errors[0]
    assert "upscale_steps: 9" in errors[1] and "needed upscale with it" in errors[1]
