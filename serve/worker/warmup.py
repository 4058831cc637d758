"""What one device costs, measured before the first request: every bucket's deep and shallow step,
and one whole picture. After it, promises of completion times are honest from the first one on.

It knows no clients, and decides nothing but how many rows may be in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from sdxl.cost import Costs
from sdxl.images import encode, to_pixels
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline, Result
from sdxl.policy import Limits

log = logging.getLogger(__name__)

STEPS = 4
"""deep, shallow, deep, shallow"""
ROUNDS = 2
"""The first pays for what happens once; the last is believed."""


class NotReady(RuntimeError):
    """The engines do not make a picture."""


def measure(pipeline: Pipeline, costs: Costs) -> None:
    """Fill in the costs at the model's own size."""
    with pipeline.engines.warming():
        learn_picture(pipeline, costs)
        for bucket in pipeline.limits().buckets:
            learn_bucket(pipeline, bucket, costs)
    log.info("a picture takes %.3f s to encode and decode", costs.encode_s + costs.decode_s)


def learn_picture(pipeline: Pipeline, costs: Costs) -> None:
    for _ in range(ROUNDS):
        (result,) = pipeline.generate([GenerationParams("a warm-up", seed=0, steps=STEPS)])
        costs.encode_s = result.timings.get("encode_s", 0.0)
        costs.decode_s = result.timings.get("decode_s", 0.0) + _file_s(result, pipeline.clock)


def learn_bucket(pipeline: Pipeline, bucket: int, costs: Costs) -> None:
    filling = [GenerationParams(seed=0, steps=STEPS)] * (bucket // 2)
    filling += [GenerationParams(seed=0, steps=STEPS, guidance=1.0)] * (bucket % 2)
    requests = [pipeline.resolve(params) for params in filling]
    conditionings = pipeline.encode(requests)
    for _ in range(ROUNDS):
        loop = pipeline.in_flight()
        for params, conditioning in zip(requests, conditionings, strict=True):
            loop.submit(pipeline.request(params, conditioning))
        loop.drain()
    costs.ticks |= loop.costs.ticks
    shown = ", ".join(f"{k.network} {1000 * s:.1f} ms" for k, s in loop.costs.ticks.items())
    log.info("%d rows: %s", bucket, shown)


def knee(pipeline: Pipeline, costs: Costs, queue: int) -> Limits:
    """As many rows as the measured costs favour; an image under guidance needs two."""
    limits = pipeline.limits()
    shape = next(iter(costs.ticks)).shape
    return replace(limits, rows=max(costs.knee(shape, limits.buckets), 2), queue=queue)


def _file_s(result: Result, clock: Callable[[], float]) -> float:
    if result.error is not None or result.image is None:
        raise NotReady(f"no picture: {result.error}") from result.error
    began = clock()
    encode(to_pixels(result.image), "png", result.params.as_dict())
    return clock() - began
