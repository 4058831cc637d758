"""Refusals and failures of the REST application have the same envelope."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve.errors import Problem
from serve.front.a1111.wire import TextToImage
from serve.front.a1111.wire import request_of as webui_request
from serve.front.error_envelope import reason_of
from serve.front.openai_text import CompletionRequest, check
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, call, client, error_of, post
from tests.serve.workers import fake_pipeline, running

PROMPT = "a red circle on a blue background"
BAD: dict[str, tuple[Any, str | None]] = {
    "surrogate": ({"prompt": "\ud800"}, "prompt"),
    "surrogate as a model": ({"prompt": "a", "model": "\ud800"}, "model"),
    "long prompt": ({"prompt": "a" * 4001}, "prompt"),
    "n 0": ({"prompt": "a", "n": 0}, "n"),
    "n 11": ({"prompt": "a", "n": 11}, "n"),
    "n text": ({"prompt": "a", "n": "2"}, "n"),
    "n true": ({"prompt": "a", "n": True}, "n"),
    "size odd": ({"prompt": "a", "size": "100x100"}, "size"),
    "size large": ({"prompt": "a", "size": "1024x1024"}, "size"),
    "size small": ({"prompt": "a", "size": "16x16"}, "size"),
    "response_format": ({"prompt": "a", "response_format": "file"}, "response_format"),
    "guidance": ({"prompt": "a", "guidance_scale": 101}, "guidance_scale"),
    "guidance nan": ('{"prompt": "a", "guidance_scale": NaN}', "guidance_scale"),
    "seed": ({"prompt": "a", "seed": -1}, "seed"),
    "seed too far": ({"prompt": "a", "seed": 2**63 - 1, "n": 2}, "seed"),
    "deadline": ({"prompt": "a", "deadline_s": 0}, "deadline_s"),
    "partial_images": ({"prompt": "a", "stream": True, "partial_images": 4}, "partial_images"),
    "streamed url": ({"prompt": "a", "stream": True, "response_format": "url"}, "response_format"),
    "jpeg prompt": ({"prompt": "円" * 4000, "output_format": "jpeg"}, "prompt"),
    "not json": ("{", None),
    "not utf-8": (b'{"prompt": "\xff"}', None),
    "a huge number": ('{"prompt": "a", "n": ' + "9" * 5000 + "}", None),
    "nested": ("[" * 9000, None),
    "utf-16": (
        ('{"prompt": "\u2200", "svg": {"a": ' + "[" * 900 + "]" * 900 + "}}").encode("utf-16"),
        None,
    ),
    "empty": ("", None),
}


def refusal_of(worker: Worker, body: Any) -> dict[str, Any]:
    raw = body if isinstance(body, str | bytes) else json.dumps(body)
    headers = {"content-type": "application/json"}
    answer = call(worker, "POST", GENERATE, content=raw, headers=headers)
    error = error_of(answer)
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert "Traceback" not in answer.text and "/work" not in answer.text
    return error


@pytest.mark.parametrize(("body", "param"), BAD.values(), ids=BAD)
def test_a_bad_request_is_a_400_that_names_the_field(
    worker: Worker, body: Any, param: str | None
) -> None:
    error = refusal_of(worker, body)
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt is required"),
        ({"prompt": "a", "stepz": 3}, "stepz", "stepz is not a field here; did you mean steps?"),
        (
            {"prompt": "a", "num_inference_step": 3},
            "num_inference_step",
            "num_inference_step is not a field here; did you mean num_inference_steps?",
        ),
        ({"promt": "a"}, "promt", "promt is not a field here; did you mean prompt?"),
        ({"prompt": "a", "width": 64}, "size", "size must be set alone, or width and height"),
        ({"prompt": "a", "size": "64"}, "size", "size must be auto or WIDTHxHEIGHT, such as "),
        (
            {"prompt": "a", "steps": 4, "num_inference_steps": 4},
            "num_inference_steps",
            "num_inference_steps must not be set beside steps: it is the same",
        ),
        (
            {"prompt": "a", "n": 2, "num_images_per_prompt": 1},
            "num_images_per_prompt",
            "num_images_per_prompt must not be set beside n: it is the same",
        ),
        (
            {"prompt": "a", "steps": 0},
            "steps",
            "steps must be a whole number from 1 to 1000, got 0",
        ),
        ({"prompt": "a", "steps": 101}, "steps", "steps must be at most 100, got 101"),
        ({"prompt": "a", "n": 1.5}, "n", "n must be a valid integer, got 1.5"),
        (
            {"prompt": "a", "strength": 0.5},
            "strength",
            "strength needs an image; use /v1/images/edits",
        ),
        ({"prompt": "a", "user": "b" * 300 + "\udfff"}, "user", "user must be valid Unicode"),
        ({"prompt": ["a"]}, "prompt", "prompt must be a valid string"),
        ([1], None, "the body must be a JSON object"),
    ],
)
def test_a_refusal_says_what_the_field_must_be_and_was(
    worker: Worker, body: Any, param: str | None, message: str
) -> None:
    error = refusal_of(worker, body)
    text = error["message"]
    assert error["param"] == param and text.startswith(message) and len(text) < 300, error


@pytest.mark.parametrize(
    ("param", "value", "hint"),
    [
        ("scheduler", "dpm2m", "dpmpp_2m"),
        ("quality", "mediun", "medium"),
        ("output_format", "jpg", "jpeg"),
        ("model", "sdxl-mimi", "sdxl-mini"),
    ],
)
def test_a_refused_value_has_the_nearest_one_beside_it(
    worker: Worker, param: str, value: str, hint: str
) -> None:
    error = error_of(post(worker, {"prompt": "a", param: value}))
    assert error["param"] == param and error["message"].endswith(f"; did you mean {hint}?"), error


def test_a_body_without_its_content_type_is_told_so(worker: Worker) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = call(worker, "POST", GENERATE, content=b'{"prompt": "a"}', headers=headers)
    assert error_of(answer)["message"].endswith("sent with content-type: application/json")


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/nowhere", 404, None),
        ("GET", "/v1/images/generations/", 404, None),
        ("GET", GENERATE, 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET, POST"),
        ("GET", "/v1/models/other", 404, None),
    ],
)
def test_a_wrong_path_or_method_has_the_envelope(
    worker: Worker, method: str, path: str, status: int, allowed: str | None
) -> None:
    answer = call(worker, method, path)
    assert answer.status_code == status and error_of(answer)["type"] == "invalid_request_error"
    assert answer.headers.get("allow") == allowed


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/images/generations", "a client's base URL ends with /v1"),
        ("/models/sdxl-mini", "a client's base URL ends with /v1"),
        ("/sdapi/v1/txt2img", "it needs the setting `sdapi`"),
        ("/v1/chat/completions", "it needs the setting `llm`"),
        ("/v1/embeddings", "/docs lists what is"),
        ("/%2e%2e/\u2028\\x00", "/docs lists what is"),
        ("/" + "x" * 5000, "/docs lists what is"),
    ],
)
def test_an_error_for_a_wrong_path_names_the_usual_cause(
    worker: Worker, path: str, hint: str
) -> None:
    error = error_of(answer := post(worker, {"prompt": PROMPT}, path))
    assert (answer.status_code, error["code"]) == (404, "not_found")
    assert error["message"].endswith(f"is not served here; {hint}.")
    assert len(error["message"]) < 200


def test_a_wrong_path_does_not_suggest_a_setting_that_is_on(worker: Worker) -> None:
    answer = post(worker, {}, "/sdapi/v1/interrogate", sdapi=True)
    assert error_of(answer)["message"].endswith("/docs lists what is.")


async def test_a_body_is_bounded_with_and_without_a_length(worker: Worker) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1024

    limits: dict[str, Any] = {"max_body_bytes": 4096, "max_edit_bytes": 4096}
    async with client(worker, **limits) as http:
        for path in (GENERATE, "/v1/images/prompts"):
            for content in (b" " * 5000, chunks()):
                answer = await http.post(path, content=content)
                assert answer.status_code == 413 and error_of(answer)["code"] == "body_too_large"


def test_a_body_that_does_not_arrive_is_a_408(worker: Worker) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    answer = call(worker, "POST", GENERATE, content=slow(), settings={"edit_timeout_s": 0.1})
    assert answer.status_code == 408 and error_of(answer)["code"] == "body_timeout"


async def test_a_request_that_cannot_meet_its_deadline_is_a_429_with_retry_after() -> None:
    with running(fake_pipeline(tick_s=0.02)) as worker:
        body = {"prompt": PROMPT, "steps": 100}
        async with client(worker) as http:
            by_field = await http.post(GENERATE, json={**body, "deadline_s": 0.2})
            by_header = await http.post(GENERATE, json=body, headers={"x-deadline-s": "0.2"})
            low = {**body, "priority": "batch"}
            of_batch = await http.post(GENERATE, json=low, headers={"x-deadline-s": "0.2"})
            bad = [
                await http.post(GENERATE, json=body, headers={"x-deadline-s": text})
                for text in ("soon", "1_0", "nan", "-1", "inf")
            ]
            stream = await http.post(GENERATE, json={**body, "deadline_s": 0.2, "stream": True})
        for answer in (by_field, by_header, of_batch, stream):
            assert answer.status_code == 429 and error_of(answer)["code"] == "overloaded"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert [answer.status_code for answer in bad] == [400] * 5


def test_a_deadline_is_capped_by_the_server() -> None:
    with running(fake_pipeline(tick_s=0.02)) as worker:
        body = {"prompt": PROMPT, "steps": 100, "deadline_s": 1000}
        answer = post(worker, body, max_deadline_s=0.2, deadline_s=0.1)
    assert answer.status_code == 429


def test_a_bug_is_a_500_without_secrets(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(order: object) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(worker, "generate", fail)
    answer = post(worker, {"prompt": PROMPT})
    assert answer.status_code == 500 and error_of(answer)["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_a_service_that_is_not_ready_answers_503() -> None:
    async with client(Worker(fake_pipeline())) as http:
        assert (await http.get("/healthz")).status_code == 200
        for answer in (
            await http.get("/readyz"),
            await http.get("/v1/models"),
            await http.post(GENERATE, json={"prompt": PROMPT}),
        ):
            assert answer.status_code == 503 and error_of(answer)["code"] == "starting"
            assert int(answer.headers["retry-after"]) >= 1


def test_a_problem_survives_pickling() -> None:
    problem = Problem(429, "m", "p", "c", 1.5)
    again = pickle.loads(pickle.dumps(problem))
    assert again.body() == problem.body() and again.retry_after_s == 1.5


SECRET = "a secret wish"
FIELDS = ("hr_prompt", "hr_negative_prompt", "infotext", "styles", "firstpass_image", "init_images")


@pytest.mark.parametrize("field", FIELDS)
def test_the_log_has_none_of_the_words_that_a_webui_client_sent(field: str) -> None:
    asked = TextToImage.model_validate({"prompt": "a", "enable_hr": True, field: [SECRET]})
    with pytest.raises(Problem) as caught:
        webui_request(asked, {})
    assert caught.value.param == field and SECRET in caught.value.message
    assert reason_of(caught.value) == f"{field}: invalid_value"


def test_the_log_has_none_of_the_words_that_should_follow_a_completion() -> None:
    asked = CompletionRequest(prompt="a", suffix=SECRET)
    with pytest.raises(Problem, match=SECRET) as caught:
        check(asked, "m", ServeSettings())
    assert reason_of(caught.value) == "suffix: invalid_value"
