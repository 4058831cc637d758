"""Upscaled pictures through the worker's threads and over REST, on fake engines."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from sdxl.cost import NETWORKS, CostKey, Costs
from sdxl.images import read_parameters, to_pixels
from serve.errors import Problem
from serve.orders import ImageOrder, ImageProgress, Preview
from serve.worker.worker import Worker
from tests.serve.servers import call, error_of, post
from tests.serve.test_edits import picture_in, pixels, png, send
from tests.serve.workers import fake, fake_pipeline, order, picture_of, running, updates_of

PROMPT = "a red circle on a blue background"
QUICK: dict[str, Any] = {"prompt": PROMPT, "steps": 5, "seed": 7, "cache_interval": 2}
TXT2IMG = "/sdapi/v1/txt2img"


def upscaled(upscaler: str | None = None, **rest: Any) -> ImageOrder:
    asked = order(steps=5, **rest)
    return replace(asked, params=replace(asked.params, upscale=1.5, upscaler=upscaler))


def size_of(file: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(file)) as image:
        return image.size


@pytest.mark.parametrize("upscaler", ["lanczos", "latent"])
def test_an_upscaled_picture_is_what_the_pipeline_makes(worker: Worker, upscaler: str) -> None:
    asked = upscaled(upscaler)
    done = asyncio.run(picture_of(worker, asked))
    (expected,) = worker.pipeline.generate([asked.params])
    assert expected.image is not None
    assert size_of(done.image) == (192, 192)
    assert np.array_equal(pixels(done.image), to_pixels(expected.image))
    stored = read_parameters(done.image)
    assert (stored["width"], stored["upscale"], stored["upscaler"]) == (128, 1.5, upscaler)
    assert stored["upscale_strength"] == 0.4
    assert (done.deep_steps, done.shallow_steps) == (3 + 1, 2 + 1)
    stages = {"encode_s", "queue_s", "denoise_s", "upscale_s", "decode_s", "file_s"}
    assert set(done.timings) == stages | {"total_s"}


def test_latents_are_enlarged_without_the_encoder() -> None:
    with running() as worker:
        before = len(fake(worker.pipeline, "vae_encoder").calls)
        asyncio.run(picture_of(worker, upscaled("latent")))
        assert len(fake(worker.pipeline, "vae_encoder").calls) == before


def test_progress_and_previews_go_through_both_legs() -> None:
    """The legs have five and two steps."""
    asked = upscaled(wants_progress=True, preview_steps=(2, 5, 6))
    with running(fake_pipeline(tick_s=0.02)) as worker:
        updates = asyncio.run(updates_of(worker, asked))
    reports = [u for u in updates if isinstance(u, ImageProgress)]
    steps = [u.step for u in reports]
    assert steps == sorted(steps) and {2, 4, 5, 6} <= set(steps)
    assert all(u.steps == 7 and (u.position == 0 or not u.step) for u in reports)
    previews = [u for u in updates if isinstance(u, Preview)]
    assert [p.step for p in previews] == [2, 5, 6]
    assert {size_of(p.image) for p in previews} == {(192, 192)}


@pytest.mark.parametrize("ends", ["done", "leaves", "fails"])
async def test_a_picture_is_counted_between_its_legs_and_not_after_its_end(ends: str) -> None:
    """Later requests' ETAs include it."""
    pipeline = fake_pipeline()
    at_encoder, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        at_encoder.set()
        assert may_go_on.wait(20)

    with running(pipeline) as worker:
        encoder, denoiser = fake(pipeline, "vae_encoder"), worker._started().denoiser
        encoder.on_call = wait
        encoder.fault = RuntimeError("no encoder") if ends == "fails" else None
        task = asyncio.create_task(updates_of(worker, upscaled()))
        assert await asyncio.to_thread(at_encoder.wait, 20)
        (between,) = denoiser.here
        assert not denoiser.flights and dict(between.axes)["latent_h"] == 24
        assert between.work_s > 0 and between.steps_left == 2
        if ends == "leaves":
            task.cancel()
        may_go_on.set()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        expected = {"done": list, "leaves": asyncio.CancelledError, "fails": Problem}
        assert isinstance(outcome, expected[ends]), outcome
        await picture_of(worker, order())
        assert denoiser.here == () and worker.is_idle
        assert not denoiser._coming and not denoiser.loop._images


@pytest.mark.parametrize(
    ("steps", "name"), [({"upscale_steps": 60}, "upscale_steps"), ({"steps": 60}, "steps")]
)
def test_a_scheduler_s_most_steps_are_checked_first(
    worker: Worker, steps: dict[str, Any], name: str
) -> None:
    asked = upscaled(scheduler="lcm")
    params = replace(asked.params, **{"steps": 20, **steps})
    engines = worker.pipeline.engines
    before = {name: len(fake(worker.pipeline, name).calls) for name in engines.by_name}
    with pytest.raises(Problem, match=f"^{name} must be at most 50 .*got 60") as caught:
        asyncio.run(picture_of(worker, replace(asked, params=params)))
    assert caught.value.status == 400
    after = {name: len(fake(worker.pipeline, name).calls) for name in engines.by_name}
    assert after == before, "something was computed"


def test_an_estimate_counts_the_second_leg(worker: Worker) -> None:
    """The estimate counts steps. A step of the model's own size costs 1 in either network, a larger
    step costs more by its pixels, and so do encoding and decoding."""
    threads = worker._started()
    loop, pipeline = threads.denoiser.loop, worker.pipeline
    assert loop.limits.standard is not None
    known = Costs(
        {CostKey(loop.limits.standard.call(network), 2): 1.0 for network in NETWORKS},
        image_s=1.0,
        decode_s=1.0,
    )
    ready = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "costs", known)
        for name, asked in ASKED.items():
            flight = worker._flight(asked, pipeline.resolve(asked.params), threads)
            admission = replace(threads.denoiser.admission(), flights=(), now=0.0)
            ready[name] = admission.ready_s(flight)
    area = 1.5**2
    assert ready == pytest.approx({
        "plain": 5 + 1,
        "lanczos": 5 + 1 + area + 2 * area + area,
        "latent": 5 + 2 * area + area,
    })  # fmt: skip


ASKED = {"plain": order(steps=5), "lanczos": upscaled(), "latent": upscaled("latent")}


def test_a_request_over_rest_says_and_gets_the_larger_size(worker: Worker) -> None:
    answer = post(worker, {**QUICK, "size": "96x128", "upscale": 1.5, "upscale_strength": 0.6})
    assert answer.json()["size"] == "144x192" and size_of(picture_in(answer)) == (144, 192)
    (data,) = answer.json()["data"]
    assert (data["deep_steps"], data["shallow_steps"]) == (3 + 2, 2 + 1)
    assert read_parameters(picture_in(answer))["upscale_strength"] == 0.6


@pytest.mark.parametrize(
    ("fields", "settings", "param"),
    [
        ({"upscale": 4, "size": "256x256"}, {}, "upscale"),
        ({"upscale": 1.5}, {"max_side": 160}, "upscale"),
        ({"upscale": 9}, {}, "upscale"),
        ({"upscale": 1.5, "upscaler": "esrgan"}, {}, "upscaler"),
        ({"upscale": 1.5, "upscale_strength": 0.1}, {}, "upscale_strength"),
        ({"upscale": 1.5, "upscale_steps": 60}, {"max_steps": 50}, "upscale_steps"),
        ({"upscale_steps": 8}, {}, "upscale_steps"),
    ],
)
def test_impossible_upscaling_is_refused_before_any_work(
    worker: Worker, fields: dict[str, Any], settings: dict[str, Any], param: str
) -> None:
    before = worker.steps_taken
    answer = post(worker, {**QUICK, **fields}, **settings)
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text
    assert worker.steps_taken == before


def test_an_existing_picture_is_upscaled_by_an_edit(worker: Worker) -> None:
    """It takes one leg at the larger size, or two with a strength. With a mask it is refused."""
    fields = {"prompt": PROMPT, "steps": "5", "seed": "7", "upscale": "2", "cache_interval": "2"}
    answer = send(worker, {"image": png(96, 64)}, fields)
    stored = read_parameters(picture_in(answer))
    assert answer.json()["size"] == "192x128" and size_of(picture_in(answer)) == (192, 128)
    assert (stored["width"], stored["height"], stored["strength"]) == (192, 128, 0.4)
    assert "upscale" not in stored and answer.json()["data"][0]["deep_steps"] == 1
    answer = send(worker, {"image": png(96, 64)}, {**fields, "strength": "0.8"})
    stored = read_parameters(picture_in(answer))
    assert (stored["width"], stored["strength"], stored["upscale"]) == (96, 0.8, 2.0)
    assert size_of(picture_in(answer)) == (192, 128)
    answer = send(worker, {"image": png(), "mask": png()}, fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == "upscale"
    answer = send(worker, {"image": png()}, {**fields, "size": "512x512"})
    assert answer.status_code == 400 and error_of(answer)["param"] == "upscale"


def test_a_stream_s_last_event_has_the_larger_size(worker: Worker) -> None:
    asked = {**QUICK, "upscale": 1.5, "stream": True, "partial_images": 2, "progress": True}
    lines = [x for x in post(worker, asked).text.splitlines() if x.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events[-1]["type"] == "image_generation.completed"
    shown = [each for each in events if each["type"].endswith("_image") or each is events[-1]]
    assert len(shown) == 3
    for each in shown:
        assert each["size"] == "192x192"
        assert size_of(base64.b64decode(each["b64_json"])) == (192, 192)


HIRES = {"prompt": PROMPT, "steps": 6, "seed": 3, "width": 64, "height": 96, "enable_hr": True}


def webui(worker: Worker, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return call(worker, "POST" if body else "GET", path, {"sdapi": True}, json=body)


@pytest.mark.parametrize(
    ("fields", "upscaler", "strength", "taken"),
    [
        ({}, "latent", 0.75, 6),
        ({"hr_upscaler": "Lanczos", "denoising_strength": 0.3}, "lanczos", 0.3, 6),
        ({"hr_second_pass_steps": 4, "denoising_strength": 0.7}, "latent", 0.7, 4),
        ({"steps": None}, "latent", 0.75, 20),
    ],
)
def test_hires_fix_has_the_webuis_meaning(
    worker: Worker, fields: Any, upscaler: str, strength: float, taken: int
) -> None:
    """The second pass takes the requested steps, whatever the strength."""
    answer = webui(worker, TXT2IMG, {**HIRES, **fields})
    assert answer.status_code == 200, answer.text
    file = base64.b64decode(answer.json()["images"][0])
    stored = read_parameters(file)
    assert size_of(file) == (128, 192)
    assert (stored["upscale"], stored["upscaler"]) == (2.0, upscaler)
    assert stored["upscale_strength"] == strength
    (text,) = json.loads(answer.json()["info"])["infotexts"]
    words = (f"Denoising strength: {strength}", "Hires upscale: 2", f"Hires steps: {taken}")
    assert all(each in text for each in (*words, f"Hires upscaler: {upscaler.capitalize()}"))
    read = webui(worker, "/sdapi/v1/png-info", {"image": base64.b64encode(file).decode()})
    assert read.json()["parameters"].items() >= {
        "upscale": 2.0, "upscaler": upscaler, "upscale_strength": strength,
        "upscale_steps": stored["upscale_steps"],
    }.items()  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"hr_upscaler": "R-ESRGAN 4x+"}, "hr_upscaler"),
        ({"hr_scale": 1}, "hr_scale"),
        ({"hr_scale": 3.5, "width": 256}, "upscale"),
        ({"hr_resize_x": 200}, "hr_resize_x"),
        ({"hr_prompt": "another"}, "hr_prompt"),
        ({"denoising_strength": 0}, "denoising_strength"),
    ],
)
def test_a_wrong_second_pass_is_refused(worker: Worker, fields: dict[str, Any], param: str) -> None:
    answer = webui(worker, TXT2IMG, {**HIRES, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert webui(worker, TXT2IMG, {**HIRES, "enable_hr": False, **fields}).status_code == 200


def test_the_webui_s_lists_name_the_upscalers(worker: Worker) -> None:
    (upscaler,) = webui(worker, "/sdapi/v1/upscalers").json()
    assert (upscaler["name"], upscaler["scale"]) == ("Lanczos", 4.0)
    assert webui(worker, "/sdapi/v1/latent-upscale-modes").json() == [{"name": "Latent"}]
