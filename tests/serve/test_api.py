"""The REST application in process, on a worker with fake engines: answers, streams, keys."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sdxl.images import read_parameters
from serve.front import answering
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, call, client, error_of, file_of_keys, post
from tests.serve.workers import fake, fake_pipeline, running

PROMPT = "a red circle on a blue background"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"results_dir": str(tmp_path / "results")}


def picture(data: dict[str, Any]) -> bytes:
    return base64.b64decode(data["b64_json"])


def test_a_prompt_is_enough(worker: Worker) -> None:
    answer = post(worker, {"prompt": PROMPT})
    body = answer.json()
    assert answer.status_code == 200 and answer.headers["x-request-id"].startswith("req_")
    (data,) = body["data"]
    stored = read_parameters(picture(data))
    assert (stored["prompt"], stored["steps"], stored["cache_interval"]) == (PROMPT, 20, 2)
    assert stored["seed"] == data["seed"]
    assert (body["size"], body["quality"], body["output_format"]) == ("128x128", "medium", "png")
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] == 77
    assert data["timings"]["denoise_s"] > 0 and data["deep_steps"] == 10
    assert isinstance(body["created"], int) and "url" not in data


def test_every_field_reaches_the_picture(worker: Worker) -> None:
    params = {"negative_prompt": "blue", "steps": 5, "scheduler": "ddim", "cache_interval": 3}
    openai = {"model": "sdxl-mini", "n": 2, "size": "96x160", "quality": "hd", "user": "me"}
    rest = {"output_format": "webp", "output_compression": 40, "moderation": "low", "style": None}
    asked = {"prompt": PROMPT, "seed": 7, "guidance_scale": 3, **params, **openai, **rest}
    body = post(worker, asked).json()
    assert [data["seed"] for data in body["data"]] == [7, 8]
    stored = read_parameters(picture(body["data"][1]))
    wanted = params | {"seed": 8, "guidance": 3}
    assert {name: stored[name] for name in wanted} == wanted
    with Image.open(io.BytesIO(picture(body["data"][1]))) as image:
        assert (image.format, image.size) == ("WEBP", (96, 160))
    assert (body["size"], body["quality"], body["output_format"]) == ("96x160", "high", "webp")


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, 1),
        ({"quality": "auto"}, 1),
        ({"quality": "standard"}, 2),
        ({"quality": "medium"}, 2),
        ({"quality": "high", "steps": 8}, 1),
        ({"steps": 8}, 2),
    ],
)
def test_the_interval_follows_the_quality_and_the_steps(
    worker: Worker, fields: dict[str, Any], interval: int
) -> None:
    asked = {"prompt": PROMPT, "steps": 4, "seed": 3, **fields}
    (data,) = post(worker, asked).json()["data"]
    stored = read_parameters(picture(data))
    assert stored["cache_interval"] == interval
    assert (data["shallow_steps"] > 0) == (interval > 1)


@pytest.mark.parametrize(
    ("accept", "fields", "kind"),
    [
        ("image/png", {}, "PNG"),
        ("image/webp", {"n": 1}, "WEBP"),
        ("image/jpeg, image/png;q=0.5", {"output_format": "jpeg"}, "JPEG"),
        ("image/*", {"output_format": "webp"}, "WEBP"),
        ("image/*", {}, "PNG"),
    ],
)
def test_accept_gives_the_picture_itself(
    worker: Worker, accept: str, fields: dict[str, Any], kind: str
) -> None:
    body = {"prompt": PROMPT, "steps": 2, "seed": 5, **fields}
    answer = call(worker, "POST", GENERATE, json=body, headers={"accept": accept})
    assert answer.headers["content-type"] == f"image/{kind.lower()}", answer.text
    with Image.open(io.BytesIO(answer.content)) as image:
        assert image.format == kind
    assert read_parameters(answer.content)["seed"] == 5
    same = post(worker, body | {"output_format": kind.lower()}).json()
    assert answer.content == picture(same["data"][0])


@pytest.mark.parametrize("accept", ["*/*", "application/json", "image/png, application/json"])
def test_accept_of_json_gives_json(worker: Worker, accept: str) -> None:
    body = {"prompt": PROMPT, "steps": 2}
    answer = call(worker, "POST", GENERATE, json=body, headers={"accept": accept})
    assert answer.headers["content-type"] == "application/json" and answer.json()["data"]


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"output_format": "webp"}, {"stream": True}, {"response_format": "url"}],
    ids=str,
)
def test_fields_that_a_bare_picture_cannot_have_are_refused(
    worker: Worker, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "steps": 2, **fields}
    answer = call(worker, "POST", GENERATE, json=body, headers={"accept": "image/png"})
    error = error_of(answer)
    assert answer.status_code == 400 and [error["param"]] == list(fields)
    assert "with Accept: image/png" in error["message"]


async def test_an_absolute_url_gives_the_picture(worker: Worker, settings: dict[str, Any]) -> None:
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


def test_a_url_that_cannot_be_stored_is_refused_first(
    worker: Worker, settings: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "steps": 2, "n": 2, "response_format": "url"}
    taken = worker.steps_taken
    answer = post(worker, body, **settings, results_max_bytes=90_000)
    assert answer.status_code == 507 and error_of(answer)["code"] == "results_full"
    assert worker.steps_taken == taken


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.replace(":\n\n", "").strip().split("\n\n"):
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


def test_a_stream_that_pauses_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "COMMENT_S", 0.02)
    with running(fake_pipeline(tick_s=0.08)) as worker:
        text = post(worker, {"prompt": PROMPT, "steps": 4, "stream": True}).text
    before, _, event = text.partition("event: ")
    assert before == ":\n\n" * before.count(":") and before.count(":") >= 5
    (last,) = events_of(f"event: {event}")
    assert last["type"] == "image_generation.completed"


def test_an_error_in_the_middle_of_a_stream_is_an_event(worker: Worker) -> None:
    fake(worker.pipeline, "vae_decoder").fault = RuntimeError("/secret")
    answer = post(worker, {"prompt": PROMPT, "steps": 2, "stream": True})
    (event,) = events_of(answer.text)
    assert answer.status_code == 200 and event["error"]["type"] == "server_error"
    assert "secret" not in answer.text


async def test_models_docs_metrics_and_health_are_served(worker: Worker) -> None:
    async with client(worker) as http:
        models = (await http.get("/v1/models")).json()
        assert models["object"] == "list" and models["data"][0]["id"] == "sdxl-mini"
        assert (await http.get("/v1/models/sdxl-mini")).json()["object"] == "model"
        ready, engines = (await http.get("/readyz")).json(), models["data"][0]["engines"]
        assert ready["status"] == "ready" and "slower" not in ready
        described = worker.pipeline.engines.description
        for found in (ready, engines):
            assert found["backend"] == described.get("backend", "")
            assert found["precision"] == described.get("precision", "")
        assert models["data"][0]["images"]["at_once"] == worker.pipeline.engines.buckets[-1]
        assert "swagger" in (await http.get("/docs")).text
        await http.post(GENERATE, json={"prompt": PROMPT, "steps": 2})
        page = (await http.get("/metrics")).text
        assert 'sdxl_http_requests_total{route="/v1/images/generations",status="200"} 1' in page
        assert 'sdxl_images_total{model="sdxl-mini",outcome="done"}' in page
        assert re.search(r'^sdxl_engines_info{.*slower="0"} 1.0', page, re.M)


async def test_readiness_and_metrics_name_slower_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "tensorrt: no engines to run"
    monkeypatch.setattr("serve.worker.worker.why_slower", lambda description: reason)
    with running() as slower:
        async with client(slower) as http:
            assert (await http.get("/readyz")).json()["slower"] == {"sdxl-mini": reason}
            page = (await http.get("/metrics")).text
    assert re.search(r'^sdxl_engines_info{.*slower="1"} 1.0', page, re.M)


async def test_the_client_s_request_id_is_kept_if_it_is_harmless(worker: Worker) -> None:
    async with client(worker) as http:
        kept = await http.get("/healthz", headers={"x-request-id": "abc-1_Z"})
        assert kept.headers["x-request-id"] == "abc-1_Z"
        for bad in ("a b", "x" * 65, "<script>"):
            other = await http.get("/healthz", headers={"x-request-id": bad})
            assert other.headers["x-request-id"].startswith("req_")


OPEN = ("/healthz", "/readyz", "/v1/results/unknown", "/", "/web/main.js", "/web/nowhere")
CLOSED = (
    *("/v1/models", "/metrics", "/docs", "/docs/start.js", "/openapi.json", "/nowhere", "/web"),
    GENERATE,
)


async def test_keys_close_every_route_but_the_named_ones(worker: Worker, tmp_path: Path) -> None:
    async with client(worker, keys=file_of_keys(tmp_path, right="ann")) as http:
        for path in CLOSED:
            for header in ("", "Bearer wrong", "Basic right", "right"):
                answer = await http.get(path, headers={"authorization": header})
                assert answer.status_code == 401, path
                assert error_of(answer)["type"] == "authentication_error"
        for path in OPEN:
            assert (await http.get(path)).status_code != 401, path
        right = ("authorization", "Bearer right")
        assert (await http.get("/v1/models", headers=[right])).status_code == 200
        for other in (right, ("authorization", "Bearer wrong")):
            answer = await http.get("/v1/models", headers=[other, right])
            assert (answer.status_code, error_of(answer)["param"]) == (400, "Authorization")


async def test_a_key_s_rate_is_a_429_that_says_when(worker: Worker, tmp_path: Path) -> None:
    async with client(worker, "right", keys=file_of_keys(tmp_path, right="ann 2")) as http:
        body = {"prompt": PROMPT, "steps": 1, "n": 2}
        assert (await http.post(GENERATE, json=body)).status_code == 200
        answer = await http.post(GENERATE, json=body)
        assert answer.status_code == 429 and 50 <= int(answer.headers["retry-after"]) <= 60
        assert error_of(answer)["type"] == "rate_limit_error"


def test_the_documentation_says_what_one_event_of_a_stream_is(worker: Worker) -> None:
    paths = call(worker, "GET", "/openapi.json").json()["paths"]
    for path in (GENERATE, "/v1/images/edits"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert content["text/event-stream"]["itemSchema"]["required"] == ["data"], path
        assert "application/json" in content, path


def test_the_documentation_groups_its_routes(worker: Worker) -> None:
    paths = call(worker, "GET", "/openapi.json", {"sdapi": True}).json()["paths"]
    tags = {path: {*each["tags"]} for path, ways in paths.items() for each in ways.values()}
    assert tags["/v1/images/generations"] == {"Pictures"} and tags["/v1/models"] == {"Models"}
    assert tags["/sdapi/v1/txt2img"] == {"stable-diffusion-webui"}
    assert tags["/readyz"] == {"Service"} and all(len(each) == 1 for each in tags.values())
