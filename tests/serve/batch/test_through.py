"""A job through a running service, at low priority."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdxl.checkpoint import MINI, Checkpoint
from sdxl.flight import Priority
from sdxl.images import read_parameters
from sdxl.params import InvalidParams, Sizes
from sdxl.pipeline import Pipeline
from sdxl.places import LORAS
from serve.batch import command, renderers
from serve.batch.batch_spec import HAS_DEAD
from serve.batch.renderers import HttpRenderer, Renderer, RendererLost
from serve.batch.results import MANIFEST
from serve.batch.running import run
from serve.batch.shard_worker import BatchTask, ShardWorker
from serve.batch.store import open_store
from serve.batch_api.batch_job import BackendRenderer
from serve.errors import Problem
from serve.front.api import create_app
from serve.orders import Done, ModelCard, Update
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.fakes import fake_engines
from tests.serve.batch.drawers import dead_letters, jsonl, order_of, pictures, prompts
from tests.serve.servers import GENERATE, listening, listening_to, post
from tests.serve.workers import (
    end_of,
    fake_pipeline,
    order,
    picture_of,
    running,
    updates_of,
    with_loras,
)

QUICK = ("--steps", "4", "--shard-size", "8")


def through(source: Path, out: Path, url: str) -> int:
    return run(order_of(source, out, "--through", url, *QUICK))


def test_a_job_s_loras_reach_its_pictures_ledger_and_manifest(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    source, out = tmp_path / "rows.csv", tmp_path / "out"
    source.write_text('prompt,loras\na,"hollow:0.5,few_steps"\nb<lora:hollow>,\nc,\nd,other\n')
    hollow = {"name": "hollow", "weight": 0.5, "text_weight": None}
    with listening(with_loras(LORAS)) as (url, _):
        assert through(source, out, url) == HAS_DEAD
        before = pictures(out)
        for path in out.glob("images/*/*.png"):
            path.unlink()
        assert through(source, out, url) == HAS_DEAD
    assert pictures(out) == before
    assert command.main(["--verify", str(out)]) == 0
    rows = parquet.read_table(out / MANIFEST).to_pylist()
    assert [len(row["loras"] or ()) for row in rows] == [2, 1, 0] and rows[0]["loras"][0] == hollow
    for row in rows:
        stored = read_parameters(out / row["file"])
        assert (stored.get("loras"), stored["prompt"]) == (row["loras"], row["prompt"])
    (dead,) = dead_letters(out)
    assert "loras must" in dead["error"]


def test_a_job_uses_the_named_model_of_a_service(tmp_path: Path) -> None:
    source = prompts(tmp_path, 3)
    settings = ServeSettings(models=[{"model": "mini"}, {"model": "/models/other"}])
    other = Pipeline(Checkpoint("other", MINI), fake_engines((1, 2, 4)))
    with (
        running() as first,
        running(other) as second,
        listening_to(create_app([first, second], settings)) as url,
    ):
        for model, flags in (("sdxl-mini", ()), ("sdxl-mini", ("mini",)), ("other", ("other",))):
            out = tmp_path / "-".join(("out", *flags))
            named = ("--model", *flags) if flags else ()
            order = order_of(source, out, "--through", url, *named, *QUICK)
            assert run(order) == 0
            assert {read_parameters(data)["model"] for data in pictures(out).values()} == {model}
        absent = order_of(source, tmp_path / "no", "--through", url, "--model", "third", *QUICK)
        with pytest.raises(
            InvalidParams,
            match="model must be a model that .* serves: sdxl-mini, other, got 'third'",
        ):
            run(absent)


def test_a_row_that_the_service_refuses_is_a_dead_letter_with_its_message(tmp_path: Path) -> None:
    rows = [{"prompt": "b", "width": width, "height": 64} for width in (100, 0)]
    with listening() as (url, _):
        source = jsonl(tmp_path, [{"prompt": "a"}, *rows])
        assert through(source, tmp_path / "out", url) == HAS_DEAD
    for letter, size in zip(dead_letters(tmp_path / "out"), ("100x64", "0x64"), strict=True):
        assert letter["error"].startswith("size must be") and f"got '{size}'" in letter["error"]


def picture_from(answer: Callable[[httpx.Request], httpx.Response]) -> Done:
    """Request a picture from a service with these answers."""

    async def ask() -> Update:
        renderer = HttpRenderer("http://there", None, "sdxl-mini")
        renderer._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        return await anext(renderer.generate(order()))

    done = asyncio.run(ask())
    assert isinstance(done, Done)
    return done


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_wrong_key_address_or_model_stops_the_job(status: int) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["model"] == "sdxl-mini"
        error = {"message": "not here", "param": None, "code": None}
        return httpx.Response(status, json={"error": error})

    with pytest.raises(RendererLost, match=f"http://there answered {status}: not here"):
        picture_from(answer)


@pytest.mark.parametrize(
    ("images", "window"), [({"at_once": 128}, 128), ({"at_once": 8}, 32), ({}, 32)]
)
def test_a_job_keeps_as_many_orders_as_the_service_recommends_and_at_least_32(
    images: dict[str, int], window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        async def card(self) -> ModelCard:
            return ModelCard("sdxl", Sizes(0, 0, 0), at_once=images.get("at_once", 0))

    backend: Any = Backend()
    models = {"data": [{"id": "sdxl", "images": images}]}
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(200, json=models))
    task = BatchTask(open_store(str(tmp_path / "out"), "run"), "run", "png")
    renderers: list[Renderer] = [
        HttpRenderer("http://there", None),
        BackendRenderer(backend, "me", "batch"),
    ]
    for renderer in renderers:
        worker = ShardWorker(lambda renderer=renderer: renderer, task, "one")  # type: ignore[misc]
        asyncio.run(worker.card())
        assert worker._window._value == renderer.window == window


def test_a_busy_service_is_waited_for(tmp_path: Path) -> None:
    with listening(fake_pipeline(tick_s=0.002), queue=3) as (url, _):
        assert through(prompts(tmp_path, 24), tmp_path / "out", url) == 0
    assert len(pictures(tmp_path / "out")) == 24


@pytest.mark.parametrize("hint", ["0", "0.1", "Wed, 21 Oct 2026 07:28:00 GMT", "nan", "soon", ""])
def test_a_busy_service_is_asked_again_after_any_retry_hint(
    hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = {"b64_json": "", "timings": {}, "deep_steps": 1, "shallow_steps": 1}
    answers = [
        httpx.Response(503, headers={"retry-after": hint}),
        httpx.Response(200, json={"data": [picture]}),
    ]
    monkeypatch.setattr(renderers, "MAX_PAUSE_S", 0.0)
    picture_from(lambda request: answers.pop(0))
    assert not answers


def test_an_unreachable_service_is_refused_by_its_url(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidParams,
        match="through must be the URL of a running service .*, got 'http://127.0.0.1:9'",
    ):
        through(prompts(tmp_path, 1), tmp_path / "out", "http://127.0.0.1:9")


def test_low_priority_has_no_usual_deadline() -> None:
    with running(fake_pipeline(tick_s=0.02)) as worker:
        body = {"prompt": "a", "steps": 20, "seed": 1}
        tight = post(worker, body, deadline_s=0.05)
        patient = post(worker, {**body, "priority": "batch"}, deadline_s=0.05)
    assert (tight.status_code, patient.status_code) == (429, 200)


def test_low_priority_leaves_a_place_in_the_queue() -> None:
    async def scenario(worker: Worker) -> None:
        denoiser, tasks = worker._started().denoiser, list[asyncio.Task[object]]()
        for i in range(3):
            asked = order(seed=i, steps=1000, priority=Priority.BATCH)
            tasks.append(asyncio.create_task(updates_of(worker, asked)))
            # The first runs, and the others wait for it.
            while len(denoiser.flights) <= i or denoiser.flights[0].step == 0:
                await asyncio.sleep(0.01)
        with pytest.raises(Problem) as caught:
            await picture_of(worker, order(priority=Priority.BATCH))
        assert caught.value.status == 429
        assert (await picture_of(worker, order(seed=9))).image
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # An image of a thousand steps counts as fifty standard images.
    with running(fake_pipeline(tick_s=0.005, buckets=(2,)), queue=60) as worker:
        asyncio.run(scenario(worker))


def test_prompts_and_latents_of_low_priority_let_others_pass() -> None:
    """Twenty orders of low priority come first. An interactive order overtakes them."""

    async def scenario(worker: Worker) -> tuple[float, float]:
        batch = [
            asyncio.create_task(end_of(worker, order(seed=i, steps=2, priority=Priority.BATCH)))
            for i in range(20)
        ]
        await asyncio.sleep(0)
        urgent = await end_of(worker, order(seed=99, steps=2))
        return urgent, sorted(await asyncio.gather(*batch))[10]

    with running(fake_pipeline(tick_s=0.02, buckets=(2,))) as worker:
        urgent, median = asyncio.run(scenario(worker))
    assert urgent < median


def test_low_priority_needs_a_key_if_the_service_has_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from serve.front.keys import main as make_key

    keys = tmp_path / "keys.txt"
    assert make_key(["batch", "--file", str(keys)]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", capsys.readouterr().out.strip())
    with listening(keys=str(keys)) as (url, _):
        assert httpx.post(f"{url}{GENERATE}", json={"prompt": "a"}).status_code == 401
        assert through(prompts(tmp_path, 2), tmp_path / "out", url) == 0
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(
            InvalidParams, match="through must be a service that accepts the request .*key"
        ):
            through(prompts(tmp_path, 2), tmp_path / "other", url)


def test_a_service_is_sent_the_name_of_a_refiner(tmp_path: Path) -> None:
    order = order_of(prompts(tmp_path, 1), tmp_path, "--through", "http://a", "--refiner", "b/c/d")
    assert order.parameters["refiner"] == "d"
