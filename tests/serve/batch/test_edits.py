"""Rows of a job that name an image."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from serve.batch import command
from serve.batch.batch_spec import HAS_DEAD
from tests.sdxl.test_source import plain, saved
from tests.serve.batch.drawers import Editor, dead_letters, jsonl, ledger_of, make, pictures
from tests.serve.test_edits import data_url


def mask_of_left_half(width: int, height: int) -> bytes:
    mask = Image.new("L", (width, height), 0)
    mask.paste(255, (0, 0, width // 2, height))
    return saved(mask)


def test_rows_with_an_image_are_edits_beside_rows_of_text(tmp_path: Path) -> None:
    """The size and the unmasked pixels are the image's. The image's digest is in the ledger."""
    (tmp_path / "in").mkdir()
    image = saved(Image.effect_noise((96, 160), 50).convert("RGB"))
    (tmp_path / "in" / "a.png").write_bytes(image)
    (tmp_path / "in" / "mask.png").write_bytes(mask_of_left_half(96, 160))
    rows = [
        {"prompt": "a ring"},
        {"prompt": "a star", "image": "in/a.png", "strength": 0.5},
        {"prompt": "a cross", "image": "in/a.png", "mask": "in/mask.png"},
        {"prompt": "a square", "image": data_url(saved(plain(64, 64)))},
        {"prompt": "a circle", "image": "in/a.png", "mask": "in/mask.png", "mask_padding": 8},
    ]
    out = tmp_path / "out"
    assert make(jsonl(tmp_path, rows), out, load=Editor) == 0
    entries, names = ledger_of(out), ("width", "height", "strength")
    params = [tuple(entry["params"][name] for name in names) for entry in entries]
    sized = [(128, 128, None), (96, 160, 0.5), (96, 160, 1.0), (64, 64, 0.8), (128, 128, 1.0)]
    assert params == sized
    digest = hashlib.sha256(image).hexdigest()
    of_image = [entry["origin"].get("image_sha256") == digest for entry in entries]
    assert of_image == [False, True, True, False, True]
    assert set(entries[2]["origin"]) == {"image_sha256", "mask_sha256"}
    made = Image.open(out / entries[2]["file"]).convert("RGB")
    before = np.asarray(Image.open(tmp_path / "in" / "a.png"))
    assert np.array_equal(np.asarray(made)[:, 48:], before[:, 48:])
    assert command.main(["--verify", str(out)]) == 0


def test_rows_with_a_wrong_image_are_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "outside.png").write_bytes(saved(plain(64, 64)))
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "text.png").write_text("not a picture")
    (folder / "good.png").write_bytes(saved(plain(64, 64)))
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"image": "none.png"}, "No such file"),
        ({"image": "text.png"}, "must be a PNG, JPEG or WEBP"),
        ({"image": "../outside.png"}, "below the input's folder"),
        ({"image": str(tmp_path / "outside.png")}, "below the input's folder"),
        ({"image": "link.png"}, "below the input's folder"),
        ({"image": "loop.png"}, "below the input's folder"),
        ({"image": "cut \ud83d.png"}, "below the input's folder"),
        ({"mask": "good.png"}, "mask needs an image"),
        ({"image": 7}, "must be a path or a data URL"),
        ({"strength": 0.5}, "needs an image to edit"),
        ({"image": "data:image/png;base64,####"}, "must be base64"),
        ({"image": "good.png", "strength": 0.01}, "to take one"),
        ({"image": "good.png", "width": 100}, "multiple of 8"),
    ]
    rows = [{"prompt": str(i), **row} for i, (row, _) in enumerate(wrong)]
    source = jsonl(folder, [*rows, {"prompt": "good", "image": "good.png"}])
    assert make(source, tmp_path / "out", load=Editor) == HAS_DEAD
    letters = dead_letters(tmp_path / "out")
    assert len(pictures(tmp_path / "out")) == 1 and len(letters) == len(wrong)
    for letter, (row, words) in zip(letters, wrong, strict=True):
        assert words in letter["error"], row


def test_engines_that_cannot_edit_make_a_dead_letter_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(saved(plain(64, 64)))
    rows = [{"prompt": "a", "image": "good.png"}, {"prompt": "b"}]
    assert make(jsonl(tmp_path, rows), tmp_path / "out") == HAS_DEAD
    (letter,) = dead_letters(tmp_path / "out")
    assert "without vae_encoder" in str(letter)
    assert len(pictures(tmp_path / "out")) == 1


def test_rows_are_upscaled_and_a_result_that_is_too_large_is_a_dead_letter(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved(plain(96, 160)))
    rows = [
        {"prompt": "a ring", "upscale": 1.5, "upscaler": "latent", "upscale_strength": 0.5},
        {"prompt": "a star", "image": "a.png", "upscale": 2.0},
        {"prompt": "a cross", "width": 256, "height": 256, "upscale": 3.0},
        {"prompt": "a square", "upscale_steps": 9},
    ]
    out = tmp_path / "out"
    assert make(jsonl(tmp_path, rows), out, load=Editor) == HAS_DEAD
    first, second = (each["params"] for each in ledger_of(out) if each["file"])
    assert (first["upscale"], first["upscaler"], first["upscale_steps"]) == (1.5, "latent", None)
    assert (second["width"], second["height"], second["strength"]) == (192, 320, 0.4)
    assert command.main(["--verify", str(out)]) == 0, "its size is the second leg's"
    errors = [each["error"] for each in dead_letters(out)]
    assert "upscale must give multiples of 8 up to 512" in errors[0]
    assert "becomes 768x768" in errors[0]
    assert errors[1] == "upscale_steps needs upscale above 1"
