"""A worker of a checkpoint that reads guidance as an embedding: an image counts as one row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sdxl.checkpoint import find
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.work import standard_images
from serve.errors import Problem
from serve.worker.worker import Worker
from tests.fakes import fake_engines
from tests.sdxl.flights import EMBEDDING, launched_groups
from tests.serve.servers import post
from tests.serve.workers import fake, order, picture_of, running, widen

BUCKETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running(Pipeline(find("mini"), fake_engines(BUCKETS, EMBEDDING))) as found:
        yield found


async def test_every_image_is_promised_and_run_as_one_row(worker: Worker) -> None:
    widen(worker, 8)
    fake(worker.pipeline, "unet_deep").on_call = lambda: time.sleep(0.02)
    asked = [order(seed=i, steps=8, guidance=(1.0, 5.0)[i % 2]) for i in range(8)]
    with launched_groups() as groups:
        done = await asyncio.gather(*(picture_of(worker, each) for each in asked))
    assert len({each.image for each in done}) == len(asked)
    assert all(group.bucket <= 2 * len(group.ids) for group in groups)
    assert max(len(group.ids) for group in groups) > BUCKETS[-1] // 2, (
        "more than with two rows each"
    )
    loop = worker._started().denoiser.loop
    flight = worker._flight(asked[1], worker.pipeline.resolve(asked[1].params), worker._started())
    assert flight.rows == 1 and loop.limits.standard is not None
    assert loop.limits.standard.rows == 1


def test_every_bucket_was_timed_before_the_first_request(worker: Worker) -> None:
    costs = worker._started().denoiser.loop.costs.ticks
    assert {key.bucket for key in costs if key.call.network == "unet_deep"} == set(BUCKETS)


def test_its_card_and_its_limits_count_one_row_an_image(worker: Worker) -> None:
    card = asyncio.run(worker.card())
    assert card.embeds_guidance and card.at_once == 2 * BUCKETS[-1]
    for guidance in (1.0, 5.0):
        params = GenerationParams(guidance=guidance)
        assert standard_images(params, card.sizes, embeds_guidance=True) == pytest.approx(1)
        twice = replace(params, steps=40)
        assert standard_images(twice, card.sizes, embeds_guidance=True) == pytest.approx(2)


def test_guidance_in_a_part_of_the_steps_is_refused_by_its_field(worker: Worker) -> None:
    body = {"prompt": "a ring", "guidance_interval": [0.0, 0.5]}
    answer = post(worker, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guidance_interval"
    asked = order(steps=8)
    wrong = replace(asked, params=replace(asked.params, guided_steps=(0,)))
    with pytest.raises(Problem, match="reads the guidance in every step"):
        asyncio.run(picture_of(worker, wrong))
