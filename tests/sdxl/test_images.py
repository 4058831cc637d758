"""Seeds and rounding as in diffusers; pictures store their parameters, and an untrusted picture is
read, or refused with one of our messages."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from sdxl import images
from sdxl.noise import NoiseSource
from sdxl.params import MAX_SEED, GenerationParams, InvalidParams
from sdxl.picture_files import file_of
from tests.mutants import change_bytes, check_each

FORMATS = ("png", "jpeg", "webp")
PROMPTS = (
    "a red circle on a blue background",
    "",
    "une étoile jaune: grande, à gauche",
    "赤い円 🔴, (weighted:1.3)",
    'two lines\nand "quotes" \\ back\tslash\r',
)
PIXELS = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)


def params(**changes: Any) -> dict[str, Any]:
    usual = {"prompt": "a ring", "width": 24, "height": 16, "seed": 7, "cache_interval": 2}
    return {**GenerationParams.from_dict(usual | changes).as_dict(), "model": "mini"}


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, MAX_SEED])
@pytest.mark.parametrize("size", [(16, 16), (17, 15), (2, 1)])
def test_a_seed_means_what_it_means_in_diffusers(seed: int, size: tuple[int, int]) -> None:
    source = NoiseSource(seed, (4, *size))
    generator = torch.Generator("cpu").manual_seed(seed)
    draws = [source.start(), source.next(), source.next()]
    for draw in draws:
        theirs = randn_tensor((1, 4, *size), generator=generator, dtype=torch.float32)
        assert torch.equal(draw[None], theirs)
    assert torch.equal(source.start(), draws[0]), "start is the first draw whenever it is asked for"


def test_noise_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    NoiseSource(1, (4, 8, 8)).start()
    assert torch.equal(before, torch.get_rng_state())


def test_pixels_are_rounded_as_diffusers_does() -> None:
    batch = torch.randn(3, 3, 20, 12, generator=torch.Generator().manual_seed(0))
    batch[0, 0, 0] = torch.arange(12) * (2 / 255 / 2) - 1  # halves of a step: the ties
    theirs = VaeImageProcessor().postprocess(batch, output_type="pil")
    ours = images.to_pixels(batch)
    assert np.array_equal(ours, np.stack([np.asarray(image) for image in theirs]))
    assert np.array_equal(images.to_pixels(batch[1]), ours[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_image_is_an_error_and_never_black(value: float) -> None:
    image = torch.zeros(3, 8, 8)
    image[1, 2, 3] = value
    with pytest.raises(images.BrokenImage, match="1 of the image's 192 values"):
        images.to_pixels(image)


def test_a_preview_is_the_checkpoints_own_linear_map(tmp_path: Path) -> None:
    matrix = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0, 0, 0]]
    stored = {"latent_rgb_factors": matrix, "latent_rgb_bias": [0.0, -1.0, 1.0]}
    (tmp_path / "preview.json").write_text(json.dumps(stored))
    latents = torch.zeros(4, 3, 5)
    latents[0, 1, 2] = 1
    shown = images.preview(latents, images.load_preview_map(tmp_path, 4))
    assert shown.shape == (3, 5, 3) and shown.dtype == np.uint8
    assert shown[0, 0].tolist() == [128, 0, 255] and shown[1, 2].tolist() == [255, 0, 255]


def test_without_a_map_of_its_own_a_checkpoint_gets_sdxls(tmp_path: Path) -> None:
    grey = images.preview(torch.zeros(4, 1, 1), images.load_preview_map(tmp_path, 4))
    assert grey[0, 0].tolist() == list(images.SDXL_RGB_BIAS)
    with pytest.raises(ValueError, match="4 channels, not 16"):
        images.load_preview_map(tmp_path, 16)


def test_only_parameters_that_are_set_are_stored() -> None:
    """A plain picture's file is the same as before edits, upscaling and adapters existed."""
    assert images.stored_fields(params()).keys() == {
        *("prompt", "negative_prompt", "width", "height", "steps", "guidance", "seed", "scheduler"),
        *("cache_interval", "deep_steps", "model"),
    }
    edit = params(strength=0.5, mask_blur=0)
    read = images.read_parameters(images.encode(PIXELS, "png", edit))
    assert (read["strength"], read["mask_blur"]) == (0.5, 0) and "encoding" not in read


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_parameters_of_a_picture_are_read_again(
    format: str, prompt: str, tmp_path: Path
) -> None:
    made = params(prompt=prompt, negative_prompt=prompt or None, deep_steps=(0, 3, 9))
    data = images.encode(PIXELS, format, made)
    (tmp_path / "picture").write_bytes(data)
    read = images.read_parameters(data)
    assert read == images.stored_fields({**made, "deep_steps": [0, 3, 9]})
    assert read == images.read_parameters(tmp_path / "picture")
    model = read.pop("model")
    assert {**GenerationParams.from_dict(read).as_dict(), "model": model} == made


def test_png_keeps_the_pixels() -> None:
    with Image.open(io.BytesIO(images.encode(PIXELS, "png", params()))) as image:
        assert image.format == "PNG" and np.array_equal(np.asarray(image), PIXELS)


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_quality_changes_the_size(format: str) -> None:
    sizes = [len(images.encode(PIXELS, format, params(), quality)) for quality in (10, 95)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_other_programs_can_read_the_parameters_line(prompt: str) -> None:
    made = params(prompt=prompt, negative_prompt="blurry, grey", scheduler="dpmpp_2m_karras")
    with Image.open(io.BytesIO(images.encode(PIXELS, "png", made))) as image:
        text = image.info["parameters"]
    *words, negative, facts = text.rsplit("\n", 2)
    assert words == [prompt] and negative == "Negative prompt: blurry, grey"
    # A1111's pattern for the last line.
    found = dict(re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', facts))
    assert found == {
        "Steps": "20",
        "Sampler": "DPM++ 2M",
        "Schedule type": "Karras",
        "CFG scale": "5",
        "Seed": "7",
        "Size": "24x16",
        "Model": "mini",
        "Cache interval": "2",
    }


@pytest.mark.parametrize(("field", "length"), [("prompt", 10_000), ("negative_prompt", 9_500)])
def test_a_text_too_long_for_jpeg_is_refused_by_name(field: str, length: int) -> None:
    long = params(**{"prompt": "a cat", field: "円" * length})
    message = rf"^{field} must fit into a JPEG's metadata; use png or webp, got '{length}"
    with pytest.raises(InvalidParams, match=message):
        images.check_metadata(long, "jpeg")
    for format in ("png", "webp"):
        images.check_metadata(long, format)
        read = images.read_parameters(images.encode(PIXELS, format, long))
        assert read == images.stored_fields(long)


PLAIN = file_of(Image.fromarray(PIXELS))


@pytest.mark.parametrize("data", [b"", b"not an image", PLAIN, PLAIN[:60], b"\x89PNG\r\n\x1a\n"])
def test_a_file_without_parameters_is_refused(data: bytes) -> None:
    with pytest.raises(images.NoParameters):
        images.read_parameters(data)


# -- untrusted pictures ---------------------------------------------------------------------

PICTURES = {
    format: images.encode(PIXELS, format, params(prompt="une étoile", negative_prompt="円"))
    for format in FORMATS
}


def read_mutant(chance: random.Random) -> None:
    images.read_parameters(change_bytes(PICTURES[chance.choice(FORMATS)], chance))


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.long)])
def test_mutated_pictures_are_read_or_refused(count: int) -> None:
    check_each(count, read_mutant)


def test_every_error_of_pillow_is_refused_as_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    for raised in (AttributeError, NotImplementedError, RuntimeError, KeyError, MemoryError):

        def fail(*_: object, error: type[Exception] = raised) -> None:
            raise error("from inside a parser")

        monkeypatch.setattr(Image.Image, "getexif", fail)
        with pytest.raises(images.NoParameters, match="not an image"):
            images.read_parameters(PICTURES["jpeg"])


def test_only_the_formats_that_are_written_here_are_opened() -> None:
    with pytest.raises(images.NoParameters, match="not an image"):
        images.read_parameters(file_of(Image.fromarray(PIXELS), "GIF"))
