"""A worker of a checkpoint that was made for inpainting."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

from PIL import Image

import engines
from sdxl.params import GenerationParams
from sdxl.source import SourceImage
from serve.orders import ImageOrder
from tests.sdxl.altered import write_inpainting
from tests.serve.workers import picture_of, running

SIZE = (128, 128)


async def test_it_serves_text_images_masks_and_both_ways_of_upscaling(tmp_path: Path) -> None:
    text = GenerationParams("a red circle", steps=2, seed=3)
    picture, mask = Image.new("RGB", SIZE, "blue"), Image.new("L", SIZE, 0)
    mask.paste(255, (16, 16, 90, 80))
    asked = [ImageOrder(text)]
    for each in (None, mask):
        source = SourceImage(picture, each)
        asked.append(ImageOrder(text.for_edit(has_mask=each is not None), source=source))
    for upscaler in ("latent", "lanczos"):
        larger = replace(text, upscale=1.25, upscaler=upscaler, upscale_strength=0.6)
        asked.append(ImageOrder(larger))
    pipeline = engines.load(str(write_inpainting(tmp_path / "sdxl-inpainting")), "torch")
    pipeline.engines = replace(pipeline.engines, buckets=(2, 4))
    with running(pipeline) as worker:
        done = await asyncio.gather(*(picture_of(worker, each) for each in asked))
    sizes = [Image.open(io.BytesIO(each.image)).size for each in done]
    assert sizes == [SIZE] * 3 + [(160, 160)] * 2
    assert len({each.image for each in done}) == len(done)
