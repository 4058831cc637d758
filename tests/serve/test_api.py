"""The REST application in process, on a worker with fake engines: answers, limits and errors."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from sdxl.images import read_parameters
from serve.errors import Problem
from serve.front.keys import sha256
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, client, post
from tests.serve.workers import fake, fake_pipeline, running

PROMPT = "a red circle on a blue background"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running() as found:
        yield found


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"results_dir": str(tmp_path / "results")}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The envelope, whole."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    found: dict[str, Any] = body["error"]
    return found


def picture(data: dict[str, Any]) -> bytes:
    return base64.b64decode(data["b64_json"])


def test_a_prompt_is_enough(worker: Worker) -> None:
    answer = post(worker, {"prompt": PROMPT})
    body = answer.json()
    assert answer.status_code == 200 and answer.headers["x-request-id"].startswith("req_")
    (data,) = body["data"]
    told = read_parameters(picture(data))
    assert (told["prompt"], told["steps"], told["cache_interval"]) == (PROMPT, 20, 2)
    assert told["seed"] == data["seed"]
    assert (body["size"], body["quality"], body["output_format"]) == ("128x128", "medium", "png")
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] == 77
    assert data["timings"]["denoise_s"] > 0 and data["deep_steps"] == 10
    assert isinstance(body["created"], int) and "url" not in data


def test_every_field_reaches_the_picture(worker: Worker) -> None:
    fields = {
        "seed": 7,
        "negative_prompt": "blue",
        "steps": 5,
        "guidance_scale": 3,
        "scheduler": "ddim",
        "cache_interval": 3,
    }
    openai = {"model": "sdxl-mini", "n": 2, "size": "96x160", "quality": "hd", "user": "me"}
    rest = {"output_format": "webp", "output_compression": 40, "moderation": "low", "style": None}
    body = post(worker, {"prompt": PROMPT, **fields, **openai, **rest}).json()
    assert [data["seed"] for data in body["data"]] == [7, 8]
    told = read_parameters(picture(body["data"][1]))
    names = {"guidance_scale": "guidance"}
    assert {names.get(k, k): v for k, v in fields.items()} | {"seed": 8} == {
        names.get(k, k): told[names.get(k, k)] for k in fields
    }
    with Image.open(io.BytesIO(picture(body["data"][1]))) as image:
        assert (image.format, image.size) == ("WEBP", (96, 160))
    assert (body["size"], body["quality"], body["output_format"]) == ("96x160", "high", "webp")


@pytest.mark.parametrize(
    ("quality", "expected"), [("low", (10, 1)), ("standard", (20, 2)), ("high", (30, 2))]
)
def test_quality_stands_for_steps_and_interval(
    worker: Worker, quality: str, expected: tuple[int, int]
) -> None:
    (data,) = post(worker, {"prompt": PROMPT, "quality": quality}).json()["data"]
    told = read_parameters(picture(data))
    assert (told["steps"], told["cache_interval"]) == expected


def test_the_same_seed_gives_the_same_picture(worker: Worker) -> None:
    body = {"prompt": PROMPT, "seed": 3, "steps": 4}
    first, second = (post(worker, body).json()["data"][0]["b64_json"] for _ in range(2))
    assert first == second


def test_a_url_is_absolute_and_gives_the_picture(worker: Worker, settings: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with client(worker, **settings) as http:
            body = {"prompt": PROMPT, "steps": 2, "response_format": "url", "output_format": "jpeg"}
            (data,) = (await http.post(GENERATE, json=body)).json()["data"]
            assert data["url"].startswith("http://localhost/v1/results/") and "b64_json" not in data
            got = await http.get(data["url"])
            assert got.headers["content-type"] == "image/jpeg"
            assert read_parameters(got.content)["prompt"] == PROMPT
            for path in ("/v1/results/nope.png", "/v1/results/..%2F..%2Fetc%2Fpasswd"):
                missing = await http.get(path)
                assert missing.status_code == 404 and error_of(missing)

    asyncio.run(scenario())


def test_a_url_without_room_for_it_is_refused_before_any_work(
    worker: Worker, settings: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "steps": 2, "n": 2, "response_format": "url"}
    taken = worker.steps_taken
    answer = post(worker, body, **settings, results_max_bytes=90_000)
    assert answer.status_code == 507 and error_of(answer)["code"] == "results_full"
    assert worker.steps_taken == taken


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_a_stream_shows_the_picture_forming(worker: Worker) -> None:
    body = {"prompt": PROMPT, "seed": 1, "steps": 8, "stream": True, "partial_images": 3}
    answer = post(worker, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *partial, last = events_of(answer.text)
    assert [e["partial_image_index"] for e in partial] == [0, 1, 2]
    assert [e["step"] for e in partial] == [2, 4, 6]
    common = {"b64_json", "created_at", "size", "quality", "background", "output_format", "type"}
    for event in (*partial, last):
        assert common <= set(event) and event["size"] == "128x128"
        with Image.open(io.BytesIO(picture(event))) as image:
            assert image.size == (128, 128)
    assert last["type"] == "image_generation.completed" and last["usage"]["total_tokens"] == 77
    whole = post(worker, {"prompt": PROMPT, "seed": 1, "steps": 8}).json()["data"][0]["b64_json"]
    assert last["b64_json"] == whole


def test_a_stream_of_several_tells_them_apart_and_reports_progress() -> None:
    body = {"prompt": PROMPT, "n": 2, "steps": 6, "stream": True, "progress": True}
    with running(fake_pipeline(tick_s=0.02)) as worker:
        events = events_of(post(worker, body).text)
    steps = [e["step"] for e in events if e["type"].endswith("progress") and e["image_index"] == 1]
    assert steps == sorted(steps) and steps[-1] == 5
    assert {e["image_index"] for e in events if e["type"].endswith("completed")} == {0, 1}
    assert all(e["eta_s"] >= 0 for e in events if e["type"].endswith("progress"))


def test_an_error_in_the_middle_of_a_stream_is_an_event(worker: Worker) -> None:
    def break_decoder() -> None:
        fake(worker.pipeline, "vae_decoder").fault = RuntimeError("/secret")

    break_decoder()
    answer = post(worker, {"prompt": PROMPT, "steps": 2, "stream": True})
    (event,) = events_of(answer.text)
    assert answer.status_code == 200 and event["error"]["type"] == "server_error"
    assert "secret" not in answer.text


BAD: dict[str, tuple[Any, str | None]] = {
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "prompt of another kind": ({"prompt": ["a"]}, "prompt"),
    "null prompt": ({"prompt": None}, "prompt"),
    "surrogate": ({"prompt": "\ud800"}, "prompt"),
    "long prompt": ({"prompt": "a" * 4001}, "prompt"),
    "many tokens": ({"prompt": "ring " * 300}, "prompt"),
    "unknown field": ({"prompt": "a", "stepz": 3}, "stepz"),
    "n 0": ({"prompt": "a", "n": 0}, "n"),
    "n 11": ({"prompt": "a", "n": 11}, "n"),
    "n text": ({"prompt": "a", "n": "2"}, "n"),
    "n true": ({"prompt": "a", "n": True}, "n"),
    "size words": ({"prompt": "a", "size": "big"}, "size"),
    "size odd": ({"prompt": "a", "size": "100x100"}, "size"),
    "size large": ({"prompt": "a", "size": "1024x1024"}, "size"),
    "size small": ({"prompt": "a", "size": "16x16"}, "size"),
    "quality": ({"prompt": "a", "quality": "best"}, "quality"),
    "format": ({"prompt": "a", "output_format": "gif"}, "output_format"),
    "transparent": ({"prompt": "a", "background": "transparent"}, "background"),
    "response_format": ({"prompt": "a", "response_format": "file"}, "response_format"),
    "steps": ({"prompt": "a", "steps": 101}, "steps"),
    "steps 0": ({"prompt": "a", "steps": 0}, "steps"),
    "guidance": ({"prompt": "a", "guidance_scale": 101}, "guidance_scale"),
    "guidance nan": ('{"prompt": "a", "guidance_scale": NaN}', "guidance_scale"),
    "seed": ({"prompt": "a", "seed": -1}, "seed"),
    "seed too far": ({"prompt": "a", "seed": 2**63 - 1, "n": 2}, "seed"),
    "scheduler": ({"prompt": "a", "scheduler": "magic"}, "scheduler"),
    "deadline": ({"prompt": "a", "deadline_s": 0}, "deadline_s"),
    "partial_images": ({"prompt": "a", "stream": True, "partial_images": 4}, "partial_images"),
    "stream of urls": (
        {"prompt": "a", "stream": True, "response_format": "url"},
        "response_format",
    ),
    "weights": ({"prompt": "(a:1.2.3)"}, "prompt"),
    "jpeg prompt": ({"prompt": "円" * 4000, "output_format": "jpeg"}, "prompt"),
    "not json": ("{", None),
    "a list": ([1], None),
    "not utf-8": (b'{"prompt": "\xff"}', None),
    "a huge number": ('{"prompt": "a", "n": ' + "9" * 5000 + "}", None),
    "nested": ("[" * 9000, None),
    "empty": ("", None),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_a_400_that_names_the_field(worker: Worker, case: str) -> None:
    body, param = BAD[case]

    async def call() -> httpx.Response:
        raw = body if isinstance(body, str | bytes) else json.dumps(body)
        async with client(worker) as http:
            headers = {"content-type": "application/json"}
            return await http.post(GENERATE, content=raw, headers=headers)

    answer = asyncio.run(call())
    error = error_of(answer)
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert error["param"] == param, error
    assert "Traceback" not in answer.text and "/work" not in answer.text


def test_an_unknown_model_is_a_404(worker: Worker) -> None:
    answer = post(worker, {"prompt": "a", "model": "dall-e-3"})
    assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/images/generations/", 404),
        ("GET", GENERATE, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_what_is_not_there_has_the_envelope_too(
    worker: Worker, method: str, path: str, status: int
) -> None:
    async def call() -> httpx.Response:
        async with client(worker) as http:
            return await http.request(method, path)

    answer = asyncio.run(call())
    assert answer.status_code == status and error_of(answer)["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)


def test_a_body_is_bounded_whether_it_says_its_length_or_not(worker: Worker) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1024

    async def scenario() -> None:
        async with client(worker, max_body_bytes=4096) as http:
            for content in (b" " * 5000, chunks()):
                answer = await http.post(GENERATE, content=content)
                assert answer.status_code == 413 and error_of(answer)["code"] == "body_too_large"

    asyncio.run(scenario())


def test_a_body_that_does_not_arrive_is_a_408(worker: Worker) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    async def scenario() -> httpx.Response:
        async with client(worker, body_timeout_s=0.1) as http:
            return await http.post(GENERATE, content=slow())

    answer = asyncio.run(scenario())
    assert answer.status_code == 408 and error_of(answer)["code"] == "body_timeout"


def test_what_cannot_make_its_deadline_is_a_429_with_retry_after() -> None:
    async def scenario(worker: Worker) -> None:
        body = {"prompt": PROMPT, "steps": 100}
        async with client(worker) as http:
            by_field = await http.post(GENERATE, json={**body, "deadline_s": 0.2})
            by_header = await http.post(GENERATE, json=body, headers={"x-deadline-s": "0.2"})
            bad = await http.post(GENERATE, json=body, headers={"x-deadline-s": "soon"})
            stream = await http.post(GENERATE, json={**body, "deadline_s": 0.2, "stream": True})
        for answer in (by_field, by_header, stream):
            assert answer.status_code == 429 and error_of(answer)["code"] == "overloaded"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert bad.status_code == 400

    with running(fake_pipeline(tick_s=0.02)) as worker:
        asyncio.run(scenario(worker))


def test_a_deadline_is_capped_by_the_server() -> None:
    with running(fake_pipeline(tick_s=0.02)) as worker:
        body = {"prompt": PROMPT, "steps": 100, "deadline_s": 1000}
        answer = post(worker, body, max_deadline_s=0.2, deadline_s=0.1)
    assert answer.status_code == 429


def test_an_engine_failure_is_a_500_that_keeps_its_secrets(worker: Worker) -> None:
    fake(worker.pipeline, "unet_deep").fault = RuntimeError("/secret/path")
    answer = post(worker, {"prompt": PROMPT, "steps": 2})
    assert answer.status_code == 500 and error_of(answer)["type"] == "server_error"
    assert "secret" not in answer.text


def test_what_nobody_foresaw_is_a_500_that_keeps_its_secrets(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(order: object) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(worker, "generate", fail)
    answer = post(worker, {"prompt": PROMPT})
    assert answer.status_code == 500 and error_of(answer)["code"] == "internal_error"
    assert "secret" not in answer.text


def test_until_it_is_ready_it_says_503() -> None:
    async def scenario() -> None:
        async with client(Worker(fake_pipeline())) as http:
            assert (await http.get("/healthz")).status_code == 200
            for answer in (
                await http.get("/readyz"),
                await http.get("/v1/models"),
                await http.post(GENERATE, json={"prompt": PROMPT}),
            ):
                assert answer.status_code == 503 and error_of(answer)["code"] == "starting"
                assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(scenario())


def test_models_docs_metrics_and_health(worker: Worker) -> None:
    async def scenario() -> None:
        async with client(worker) as http:
            models = (await http.get("/v1/models")).json()
            assert models["object"] == "list" and models["data"][0]["id"] == "sdxl-mini"
            assert (await http.get("/v1/models/sdxl-mini")).json()["object"] == "model"
            ready, engines = (await http.get("/readyz")).json(), models["data"][0]["engines"]
            assert ready["status"] == "ready"
            running = worker.pipeline.engines.description
            for found in (ready, engines):
                assert found["backend"] == running.get("backend", "")
                assert found["precision"] == running.get("precision", "")
            assert models["data"][0]["images"]["at_once"] == worker.pipeline.engines.buckets[-1]
            assert "swagger" in (await http.get("/docs")).text
            await http.post(GENERATE, json={"prompt": PROMPT, "steps": 2})
            page = (await http.get("/metrics")).text
            assert 'sdxl_http_requests_total{route="/v1/images/generations",status="200"} 1' in page
            assert 'sdxl_images_total{outcome="done"}' in page

    asyncio.run(scenario())


def test_the_client_s_request_id_is_kept_if_it_is_harmless(worker: Worker) -> None:
    async def scenario() -> None:
        async with client(worker) as http:
            kept = await http.get("/healthz", headers={"x-request-id": "abc-1_Z"})
            assert kept.headers["x-request-id"] == "abc-1_Z"
            for bad in ("a b", "x" * 65, "<script>"):
                other = await http.get("/healthz", headers={"x-request-id": bad})
                assert other.headers["x-request-id"].startswith("req_")

    asyncio.run(scenario())


OPEN = ("/healthz", "/readyz", "/v1/results/unknown", "/", "/web/main.js", "/web/nowhere")
CLOSED = (
    "/v1/models",
    "/metrics",
    "/docs",
    "/docs/start.js",
    "/openapi.json",
    "/nowhere",
    "/web",
    "/v1/images/generations",
)


def test_with_keys_every_route_is_closed_but_the_named_ones(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{sha256('right')} ann\n")

    async def scenario() -> None:
        async with client(worker, keys=str(tmp_path / "keys")) as http:
            for path in CLOSED:
                for header in ("", "Bearer wrong", "Basic right", "right"):
                    answer = await http.get(path, headers={"authorization": header})
                    assert answer.status_code == 401, path
                    assert error_of(answer)["type"] == "authentication_error"
            for path in OPEN:
                assert (await http.get(path)).status_code != 401, path
            allowed = await http.get("/v1/models", headers={"authorization": "Bearer right"})
            assert allowed.status_code == 200

    asyncio.run(scenario())


def test_a_key_s_rate_is_a_429_that_says_when(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{sha256('right')} ann 2\n")

    async def scenario() -> None:
        async with client(worker, key="right", keys=str(tmp_path / "keys")) as http:
            body = {"prompt": PROMPT, "steps": 1, "n": 2}
            assert (await http.post(GENERATE, json=body)).status_code == 200
            answer = await http.post(GENERATE, json=body)
            assert answer.status_code == 429 and 50 <= int(answer.headers["retry-after"]) <= 60
            assert error_of(answer)["type"] == "rate_limit_error"

    asyncio.run(scenario())


def test_a_problem_survives_pickling() -> None:
    import pickle

    problem = Problem(429, "m", "p", "c", 1.5)
    again = pickle.loads(pickle.dumps(problem))
    assert again.body() == problem.body() and again.retry_after_s == 1.5
