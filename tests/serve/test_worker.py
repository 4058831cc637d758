"""The worker on fake engines: every order has one outcome; threads do not disturb each other."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sdxl.adapters import Adapters, NoRoom, Use
from sdxl.attachments import Lora
from sdxl.flight import Priority
from sdxl.images import read_parameters, to_pixels
from sdxl.pipeline import ENCODE_BATCH
from sdxl.places import LORAS
from sdxl.warmup import standard
from serve.errors import Problem
from serve.orders import ImageProgress, Preview
from serve.worker.job import ImageJob
from serve.worker.worker import Worker
from tests.fakes import FakeClock
from tests.serve.test_edits import pixels
from tests.serve.workers import (
    begun,
    end_of,
    fake,
    fake_pipeline,
    order,
    picture_of,
    running,
    updates_of,
    widen,
    with_loras,
)


def test_a_picture_is_what_the_pipeline_makes() -> None:
    asked = order("a red ring", seed=5, steps=6)
    with running() as worker:
        done = asyncio.run(picture_of(worker, asked))
        (expected,) = worker.pipeline.generate([asked.params])
    assert expected.image is not None
    assert np.array_equal(pixels(done.image), to_pixels(expected.image))
    stored = read_parameters(done.image)
    assert (stored["seed"], stored["width"], stored["model"]) == (5, 128, "sdxl-mini")
    assert (done.deep_steps, done.shallow_steps, done.prompt_tokens) == (3, 3, 77)
    stages = {"encode_s", "queue_s", "denoise_s", "decode_s", "file_s"}
    assert set(done.timings) == stages | {"total_s"}


def test_progress_and_previews_come_in_order() -> None:
    asked = order(steps=6, wants_progress=True, preview_steps=(2, 4))
    with running(fake_pipeline(tick_s=0.02)) as worker:
        updates = asyncio.run(updates_of(worker, asked))
    steps = [u.step for u in updates if isinstance(u, ImageProgress)]
    assert steps == sorted(steps) and steps[-1] == 5
    previews = [u for u in updates if isinstance(u, Preview)]
    assert [p.step for p in previews] == [2, 4]
    assert {pixels(preview.image).shape for preview in previews} == {(128, 128, 3)}
    etas = [u.eta_s for u in updates if isinstance(u, ImageProgress) and u.step]
    assert all(0 <= eta < 5 for eta in etas) and etas[-1] <= etas[0]


async def test_many_share_calls_and_each_gets_its_own_picture() -> None:
    with running(fake_pipeline(tick_s=0.005)) as worker:
        widen(worker, rows=4)
        asked = [order(f"ring {i}", seed=i, steps=3 + i % 3) for i in range(12)]
        done = await asyncio.gather(*(picture_of(worker, o) for o in asked))
        sizes = {call["sample"][0] for call in fake(worker.pipeline, "unet_deep").calls[20:]}
    assert [d.params.seed for d in done] == list(range(12))
    assert len({d.image for d in done}) == 12
    assert 4 in sizes, f"calls of {sizes} rows, needed some of 4"


async def test_cancelling_frees_the_slot_within_a_tick() -> None:
    with running(fake_pipeline(tick_s=0.02)) as worker:
        async with begun(worker):
            assert len(flights(worker)) == 1
        before = worker.steps_taken
        while flights(worker) or not worker.is_idle:
            await asyncio.sleep(0.001)
        assert worker.steps_taken <= before + 1, "more than the tick that was running"


async def test_an_image_cancelled_before_the_loop_starts_it_is_not_drawn() -> None:
    with running() as worker:
        denoiser, pipeline = worker._started().denoiser, worker.pipeline
        params = pipeline.resolve(order(steps=500).params)
        rows = pipeline.tokenize(params)
        (conditioning,) = pipeline.encode([params], [rows])
        request = pipeline.request(params, conditioning)
        flight = denoiser.admit(replace(standard(pipeline), id=denoiser.loop.new_id()))
        clock = pipeline.clock
        does = (print, print, print)
        gone = ImageJob(order(), params, [], rows, flight, clock, *does, is_cancelled=True)
        denoiser.cancel(gone)
        denoiser.submit(request, flight, gone)
        before = worker.steps_taken
        await picture_of(worker, order(steps=6))
        assert worker.steps_taken == before + 6


async def test_five_hundred_cancelled_requests_leave_nothing_behind() -> None:
    async def leave(worker: Worker, i: int) -> None:
        task = asyncio.create_task(updates_of(worker, order(seed=i, steps=50)))
        await asyncio.sleep(0.002 * (i % 7))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    # Orders of clients that left may still count; an order of fifty steps counts as two and a half.
    with running(fake_pipeline(tick_s=0.001), queue=1300) as worker:
        for start in range(0, 500, 50):
            await asyncio.gather(*(leave(worker, i) for i in range(start, start + 50)))
        done = await picture_of(worker, order())
        assert done.image and worker.is_idle and flights(worker) == ()
        denoiser = worker._started().denoiser
        assert not denoiser._watched and not denoiser.loop._images


def flights(worker: Worker) -> tuple[object, ...]:
    return worker._started().denoiser.flights


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again() -> None:
    with running(fake_pipeline(tick_s=0.01, buckets=(1, 2)), queue=3) as worker:
        async with begun(worker):
            tasks = [
                asyncio.create_task(picture_of(worker, order(seed=i, steps=20))) for i in range(3)
            ]
            while len(worker._started().denoiser.waiting) < 3:
                await asyncio.sleep(0.01)
            with pytest.raises(Problem) as caught:
                await picture_of(worker, order(seed=9))
            assert not any(task.done() for task in tasks), "the refusal waited for the queue"
        await asyncio.gather(*tasks)
        problem = caught.value
    assert problem.status == 429 and problem.retry_after_s is not None
    least, most = 400 * 0.01, 500 * 0.1
    assert least <= problem.retry_after_s <= most, f"{problem.retry_after_s} s"


def test_an_order_that_cannot_meet_its_deadline_is_refused_before_encoding() -> None:
    with running(fake_pipeline(tick_s=0.02)) as worker:
        calls = len(fake(worker.pipeline, "clip_l").calls)
        with pytest.raises(Problem) as caught:
            asyncio.run(picture_of(worker, order(steps=100, deadline_s=0.5)))
        assert len(fake(worker.pipeline, "clip_l").calls) == calls
    problem = caught.value
    assert problem.status == 429 and problem.retry_after_s is not None
    assert 0.5 < problem.retry_after_s < 5, f"{problem.retry_after_s} s"


@pytest.mark.parametrize("network", ["clip_g", "unet_deep", "unet_shallow", "vae_decoder"])
async def test_an_engine_failure_is_one_problem_without_its_text(network: str) -> None:
    with running() as worker:
        fake(worker.pipeline, network).fault = RuntimeError("/secret/path")
        with pytest.raises(Problem) as caught:
            await picture_of(worker, order())
        assert caught.value.status == 500 and "secret" not in caught.value.message
        assert (await picture_of(worker, order())).image


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"width": 100}, "size"),
        ({"prompt": "ring " * 400}, "prompt"),
        ({"prompt": "(a:1.3.3)"}, "prompt"),
        ({"negative_prompt": "(b:9e9)" + "(" * 99}, "negative_prompt"),
    ],
)
def test_an_impossible_order_is_a_400_with_its_field(given: dict[str, object], param: str) -> None:
    with running() as worker, pytest.raises(Problem) as caught:
        asyncio.run(picture_of(worker, order(**given)))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_an_order_waits_while_loras_of_others_fill_the_bank() -> None:
    full = iter([NoRoom("full")] * 3)
    with running(with_loras(LORAS)) as worker:
        lease = worker.pipeline.adapters

        def adapters(uses: Sequence[Use]) -> Adapters:
            if uses and (error := next(full, None)):
                raise error
            return lease(uses)

        worker.pipeline.adapters = adapters  # type: ignore[method-assign]
        plain = order()
        asked = [replace(plain, params=replace(plain.params, loras=(Lora("hollow"),))), plain]
        await asyncio.gather(*(picture_of(worker, each) for each in asked))
    assert next(full, None) is None


async def test_an_order_that_waits_for_room_ends_at_its_deadline_and_others_overtake_it() -> None:
    with running(with_loras(LORAS)) as worker:
        lease = worker.pipeline.adapters

        def adapters(uses: Sequence[Use]) -> Adapters:
            if uses:
                raise NoRoom("full")
            return lease(uses)

        worker.pipeline.adapters = adapters  # type: ignore[method-assign]
        plain = order(deadline_s=0.5)
        asked = replace(plain, params=replace(plain.params, loras=(Lora("hollow"),)))
        waiting = [asyncio.create_task(picture_of(worker, asked)) for _ in range(ENCODE_BATCH)]
        await asyncio.sleep(0)
        await picture_of(worker, order())
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert {getattr(end, "code", None) for end in ends} == {"deadline_exceeded"}


@pytest.mark.parametrize("fault", [None, RuntimeError("broken")])
async def test_an_ended_order_leaves_its_job_without_the_garbage_collector(
    fault: Exception | None,
) -> None:
    """A job keeps LoRAs, ControlNets and pictures in memory."""
    with running() as worker:
        fake(worker.pipeline, "unet_deep").fault = fault
        gc.disable()
        try:
            asked = asyncio.create_task(picture_of(worker, order()))
            while not worker._jobs:
                await asyncio.sleep(0)
            (job,) = map(weakref.ref, worker._jobs)
            await asyncio.wait([asked])
            assert (asked.exception() is None) == (fault is None)
            del asked
            for _ in range(1000):
                if job() is None:
                    break
                await asyncio.sleep(0.01)
            assert job() is None
        finally:
            gc.enable()


def test_orders_are_predicted_in_the_calls_that_the_loop_will_make() -> None:
    with running() as worker:
        denoiser = worker._started().denoiser
        denoiser.loop.limits = replace(denoiser.loop.limits, rides=True)
        asked = order()
        params = worker.pipeline.resolve(asked.params)
        assert worker._flight(asked, params, worker._started()).rides


def test_the_first_request_takes_as_long_as_promised() -> None:
    """The clock advances only in calls of the UNet."""
    pipeline, clock = fake_pipeline(), FakeClock()

    def take_a_while() -> None:
        clock.now += 0.04

    for network in ("unet_deep", "unet_shallow"):
        fake(pipeline, network).on_call = take_a_while
    with running(replace(pipeline, clock=clock)) as worker:
        promised_s, began_s = worker.outlook().ready_in_s, clock.now
        asyncio.run(picture_of(worker, order(steps=20)))
        took_s = clock.now - began_s
    assert promised_s == pytest.approx(took_s), f"promised {promised_s:.3f} s, took {took_s:.3f} s"


async def test_interactive_orders_go_before_batch_ones() -> None:
    with running(fake_pipeline(tick_s=0.01)) as worker:
        low = order(seed=1, steps=30, priority=Priority.BATCH)
        batch = asyncio.create_task(end_of(worker, low))
        await asyncio.sleep(0.05)
        urgent = asyncio.create_task(end_of(worker, order(seed=2, steps=30)))
        assert await urgent < await batch


async def test_a_worker_counts_its_work() -> None:
    with running() as worker:
        await picture_of(worker, order(steps=4))
        with pytest.raises(Problem):
            await picture_of(worker, order(width=100))
        found = {}
        for metric in await worker.metrics():
            for s in metric.samples:
                labels = (v for k, v in s.labels.items() if k != "model")
                found[s.name + "".join(f",{v}" for v in labels)] = s.value
    assert found["sdxl_steps_total,deep"] == 2 and found["sdxl_steps_total,shallow"] == 2
    assert found["sdxl_images_total,done"] == 1
    assert found["sdxl_images_total,invalid_value"] == 1
    assert found["sdxl_tick_seconds_count,unet_deep,2"] == 2
    assert found["sdxl_images_queued"] == 0 and math.isfinite(found["sdxl_images_running"])
