"""Measures a device's costs before the first request, so that predictions are right from the start.

It times every bucket's deep and shallow step, also a refiner's, and one whole picture. It decides
only the number of rows in flight.
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from PIL import Image

from sdxl.conditioning import Conditioning
from sdxl.cost import Costs
from sdxl.flight import Flight
from sdxl.images import Pixels, encode
from sdxl.inflight import Event, Failed, InFlight
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.policy import Limits
from sdxl.slow import log_if_slow
from sdxl.source import GivenImage, SourceImage

log = logging.getLogger(__name__)

WARM_UP = GenerationParams("a warm-up", seed=0, steps=4, cache_interval=2)
"""Its steps are deep, shallow, deep, shallow."""
ROUNDS, SLOW_S = 2, 10.0
PASTED_SIDE = 512
"""Side of the image for measuring pasting."""


class NotReady(RuntimeError):
    """The engines failed to make a picture."""


Run = Callable[[Callable[[], Any]], Any]
"""Calls a function on a thread and returns its result."""


@dataclass(frozen=True)
class Rooms:
    """The threads that will encode, denoise and decode. Warm-up uses the same threads, because
    libraries have caches for each thread."""

    encode: Run
    denoise: Run
    decode: Run


def measure(pipeline: Pipeline, rooms: Rooms, costs: Costs) -> None:
    """Measure the costs at the model's usual size."""
    began = pipeline.clock()
    with pipeline.engines.warming():
        with log_if_slow("making a first picture"):
            learn_picture(pipeline, rooms, costs)
        for bucket, params in itertools.product(pipeline.limits().buckets, requests(pipeline)):
            calls = "the refiner's calls" if params.refiner else "calls"
            with log_if_slow(f"timing {calls} of {bucket} rows"):
                learn_bucket(pipeline, rooms, bucket, costs, params)
    costs.lasting = frozenset(costs.ticks)
    calls = ", ".join(
        f"{'refiner ' * key.call.is_refined}{key.call.network} {1000 * seconds:.1f} ms"
        for key, seconds in costs.ticks.items()
        if key.bucket == pipeline.limits().buckets[-1]
    )
    log.info(
        "warm-up took %.1f s: %d rows take %s; a picture takes %.3f s to encode and decode",
        *(pipeline.clock() - began, pipeline.limits().buckets[-1]),
        *(calls, costs.encode_s + costs.decode_s),
    )


def requests(pipeline: Pipeline) -> list[GenerationParams]:
    """Return requests that together make every call: without a refiner, and with the refiner."""
    if pipeline.refiner is None:
        return [WARM_UP]
    return [WARM_UP, replace(WARM_UP, refiner=pipeline.refiner.name, refiner_switch_at=0.0)]


def rounds(pipeline: Pipeline) -> Iterator[None]:
    """Repeat a measurement. The first round includes one-time work; the last one counts. A slow
    first round on a CPU is not repeated."""
    for _ in range(ROUNDS):
        began = pipeline.clock()
        yield
        if pipeline.engines.device.type == "cpu" and pipeline.clock() - began > SLOW_S:
            return


def learn_picture(pipeline: Pipeline, rooms: Rooms, costs: Costs) -> None:
    params = pipeline.resolve(WARM_UP)
    for _ in rounds(pipeline):
        began = pipeline.clock()
        conditionings = rooms.encode(partial(pipeline.encode, [params]))
        costs.encode_s = pipeline.clock() - began
        _, events = rooms.denoise(partial(_denoised, pipeline, [params], conditionings))
        began = pipeline.clock()
        pixels = _decoded(pipeline, rooms, events)
        encode(pixels, "png", params.as_dict())
        costs.decode_s = pipeline.clock() - began
        if pipeline.can_edit:
            black = SourceImage(Image.new("RGB", params.result_size), None)
            began = pipeline.clock()
            rooms.encode(partial(pipeline.encode_image, params, black))
            costs.image_s = pipeline.clock() - began
            costs.paste_s = pasting_s(pipeline)


def pasting_s(pipeline: Pipeline) -> float:
    """Measure pasting into a picture of noise, which is the slowest to compress as PNG."""
    side, part = PASTED_SIDE, pipeline.sizes.default
    shades = Image.effect_noise((side, side), 100)
    image, mask = io.BytesIO(), io.BytesIO()
    Image.merge("RGB", (shades, *(shades.rotate(angle) for angle in (90, 180)))).save(image, "PNG")
    Image.new("L", (side, side), 255).save(mask, "PNG")
    params = replace(pipeline.resolve(WARM_UP), mask_padding=0)
    source = GivenImage.read(image.getvalue(), mask.getvalue()).source(params)
    began = pipeline.clock()
    encode(source.pasted(Image.new("RGB", (part, part))), "png", params.as_dict())
    return (pipeline.clock() - began) * part**2 / side**2


def learn_bucket(
    pipeline: Pipeline,
    rooms: Rooms,
    bucket: int,
    costs: Costs,
    request: GenerationParams,
) -> None:
    """Measure the calls of `bucket` rows: guided images, and an unguided one for an odd row."""
    images, left = divmod(bucket, pipeline.plan(WARM_UP).room[0])
    filling = [request] * images + [replace(request, guidance=1.0)] * left
    params = [pipeline.resolve(each) for each in filling]
    conditionings = rooms.encode(partial(pipeline.encode, params))
    for _ in rounds(pipeline):
        loop, _ = rooms.denoise(partial(_denoised, pipeline, params, conditionings))
    costs.ticks |= loop.costs.ticks
    costs.between_s = loop.costs.between_s


def _denoised(
    pipeline: Pipeline, params: Sequence[GenerationParams], conditionings: Sequence[Conditioning]
) -> tuple[InFlight, list[Event]]:
    """Run the loop and return it with its results."""
    loop = pipeline.in_flight()
    for each, conditioning in zip(params, conditionings, strict=True):
        loop.submit(pipeline.request(each, conditioning))
    return loop, loop.drain()


def _decoded(pipeline: Pipeline, rooms: Rooms, events: Sequence[Event]) -> Pixels:
    (event,) = events
    try:
        if isinstance(event, Failed):
            raise event.cause
        pixels: Pixels = rooms.decode(partial(pipeline.pixels, event.latents))
    except Exception as cause:
        raise NotReady(f"no picture: {cause}") from cause
    return pixels


def knee(pipeline: Pipeline, costs: Costs, queue: int) -> Limits:
    """Return the limits with the best number of rows by measured costs."""
    return replace(costs.knees(pipeline.limits(), standard(pipeline)), queue=queue)


def standard(pipeline: Pipeline) -> Flight:
    """Return a picture of the model's own size with default steps and guidance."""
    side = pipeline.sizes.default
    return Flight(-1, pipeline.axes(side, side), pipeline.plan(GenerationParams()))
