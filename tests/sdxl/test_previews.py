"""Previews: each uses the factors that its model expects, and no other model's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from sdxl.images import Pixels, to_pixels
from sdxl.inflight import InFlight
from sdxl.params import GenerationParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Forming, Pipeline, WithPictures
from sdxl.source import GivenImage
from tests.conftest import images_of

ASKED = [
    GenerationParams("a red circle on a blue background", seed=5, steps=8),
    GenerationParams("a yellow star on a white background", seed=6, steps=8, upscale=1.5),
]


def test_previews_change_no_picture(mini: Pipeline) -> None:
    shown: list[Pixels] = []

    def watch(show: Forming) -> None:
        if (pixels := show()) is not None:
            shown.append(pixels)

    plain = images_of(mini, *ASKED)
    for after in mini.stream(ASKED, on_forming=watch):
        assert after.image is not None and torch.equal(plain[after.index], after.image)
    sizes = [pixels.shape for pixels in shown]
    assert {(128, 128, 3), (192, 192, 3)} == {*sizes}, "each at the size that it will have"


def test_previews_cost_nothing_unless_requested(
    mini: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InFlight, "preview", lambda *_: pytest.fail("made"))
    (result,) = mini.generate(ASKED[:1])
    assert result.error is None
    assert len(list(mini.stream(ASKED[:1], on_forming=lambda show: None))) == 1


def test_the_last_preview_is_near_the_picture(mini: Pipeline) -> None:
    shown: list[Pixels | None] = []
    (result,) = mini.stream(ASKED[:1], on_forming=lambda show: shown.append(show()))
    assert result.image is not None and shown[-1] is None, "it is finished"
    last, first = shown[-2], shown[0]
    assert first is not None and last is not None
    picture = to_pixels(result.image).astype(int)
    errors = [float(np.abs(each.astype(int) - picture).mean()) for each in (first, last)]
    assert errors[1] < 40 and errors[1] < errors[0], errors


def test_a_preview_shows_unmasked_pixels_from_the_start(mini: Pipeline) -> None:
    picture = Image.new("RGB", (128, 128), (10, 200, 30))
    mask = Image.new("L", (128, 128), 0)
    mask.paste(255, (0, 0, 64, 128))
    given = GivenImage.read(file_of(picture), file_of(mask))
    params = given.sized(GenerationParams("a red circle", seed=1, steps=8), mini.sizes)
    shown: list[Pixels | None] = []
    edit = WithPictures(params, given.source(params))
    assert len(list(mini.stream([edit], on_forming=lambda show: shown.append(show())))) == 1
    assert shown[0] is not None
    assert (shown[0][:, 80:] == (10, 200, 30)).all() and not (
        shown[0][:, :48] == (10, 200, 30)
    ).all()
