"""Chat and completions over REST: the official `openai` package, unchanged, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from serve.errors import Problem
from serve.front.keys import sha256
from serve.llm.mini.grammar import parse
from serve.llm.speaker import Speaker
from serve.worker.worker import Worker
from tests.serve.llm.texts import CHAT, WORDS, FakeLlm, client, fake_speaker, listening
from tests.serve.servers import GENERATE
from tests.serve.test_api import error_of
from tests.serve.workers import running

MODEL = "mini-llm"
CIRCLE: list[Any] = [{"role": "user", "content": "a red circle"}]
SAID = "".join(WORDS)


@pytest.fixture(scope="module")
def url(speaker: Speaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("results")
    with listening(speaker, results_dir=str(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running() as found:
        yield found


def test_both_models_are_listed_the_image_model_first(ai: openai.OpenAI) -> None:
    first, second = (model.id for model in ai.models.list().data)
    assert "sdxl" in first and second == MODEL and "sdxl" not in second
    assert ai.models.retrieve(MODEL).id == MODEL


def test_it_chats(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(model=MODEL, messages=CIRCLE, temperature=0)
    (choice,) = answer.choices
    scene = parse(choice.message.content or "")
    assert scene is not None and scene.things[0].shape == "circle", choice
    assert choice.finish_reason == "stop" and choice.message.role == "assistant"
    assert answer.usage is not None and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_text_and_ends_with_its_usage(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CIRCLE, "seed": 5, "temperature": 1}
    whole = ai.chat.completions.create(**asked)
    chunks = list(
        ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *rest, last = chunks
    text = "".join(c.choices[0].delta.content or "" for c in rest)
    assert text == whole.choices[0].message.content
    assert rest[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in rest if c.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None for chunk in rest) and len({c.id for c in chunks}) == 1


def test_without_being_asked_a_stream_tells_no_usage(ai: openai.OpenAI) -> None:
    chunks = list(ai.chat.completions.create(model=MODEL, messages=CIRCLE, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_seeds_and_n(ai: openai.OpenAI) -> None:
    def said(**asked: Any) -> list[str | None]:
        answer = ai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "circle"}], **asked
        )
        return [choice.message.content for choice in answer.choices]

    three = said(seed=1, n=3, temperature=1.0)
    assert three == said(seed=1, n=3, temperature=1.0) and len(set(three)) > 1
    assert three[1:] == said(seed=2, n=2, temperature=1.0), "choice i uses seed + i"


def test_a_prompt_counts_once_however_many_choices(ai: openai.OpenAI) -> None:
    one, two = (
        ai.chat.completions.create(model=MODEL, messages=CIRCLE, n=n, temperature=0) for n in (1, 2)
    )
    assert one.usage is not None and two.usage is not None
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert two.usage.completion_tokens == 2 * one.usage.completion_tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_hold(ai: openai.OpenAI, name: str) -> None:
    limit: dict[str, Any] = {name: 2}
    answer = ai.chat.completions.create(model=MODEL, messages=CIRCLE, **limit)
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_a_conversation_goes_on(ai: openai.OpenAI) -> None:
    turns: list[Any] = [
        {"role": "system", "content": "Describe pictures."},
        *CIRCLE,
        {"role": "assistant", "content": "a red circle on a blue background"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "make it "}, {"type": "text", "text": "green"}],
        },
    ]
    answer = ai.chat.completions.create(model=MODEL, messages=turns, temperature=0)
    assert answer.choices[0].message.content == "a green circle on a blue background"


def test_an_answer_goes_back_as_it_came(ai: openai.OpenAI) -> None:
    turns: list[Any] = [*CIRCLE]
    first = ai.chat.completions.create(model=MODEL, messages=turns, temperature=0)
    turns += [first.choices[0].message, {"role": "user", "content": "make it green"}]
    second = ai.chat.completions.create(model=MODEL, messages=turns, temperature=0)
    assert "green" in (second.choices[0].message.content or "")


class Shape(BaseModel):
    name: str
    colour: str | None


class Scene(BaseModel):
    shapes: list[Shape]


def test_a_schema_of_lists_of_things_is_not_too_deep(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.parse(model=MODEL, messages=CIRCLE, response_format=Scene)
    # This backend has no grammars: that it says so, it has read it.
    assert caught.value.param == "response_format"


def test_it_completes_texts(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(
        model=MODEL, prompt=["a red circle on", "two"], max_tokens=20, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" a") and answer.object == "text_completion"
    stream = ai.completions.create(
        model=MODEL, prompt="a red circle on", max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_a_stop_string_never_shows(ai: openai.OpenAI) -> None:
    for stop in ("circle", ["cle", "zzz"], "le o"):
        asked: dict[str, Any] = {"model": MODEL, "messages": CIRCLE, "temperature": 0, "stop": stop}
        whole = ai.chat.completions.create(**asked).choices[0]
        chunks = ai.chat.completions.create(**asked, stream=True)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert text == whole.message.content and whole.finish_reason == "stop"
        assert not any(each in text for each in ([stop] if isinstance(stop, str) else stop))


@pytest.mark.parametrize(
    ("changed", "kind", "param", "code"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_value"),
        (
            {"messages": [{"role": "king", "content": "a"}]},
            openai.BadRequestError,
            "messages",
            None,
        ),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages", None),
        ({"n": 11}, openai.BadRequestError, "n", "invalid_value"),
        ({"n": 1000}, openai.BadRequestError, "n", "invalid_value"),
        ({"n": 0}, openai.BadRequestError, "n", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "circle " * 600}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
        ({"max_tokens": 5000}, openai.BadRequestError, "messages", "context_length_exceeded"),
        ({"logprobs": True}, openai.BadRequestError, "logprobs", "invalid_value"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"presence_penalty": 1}, openai.BadRequestError, "presence_penalty", "invalid_value"),
        ({"stop": ""}, openai.BadRequestError, "stop", "invalid_value"),
        ({"seed": -1}, openai.BadRequestError, "seed", "invalid_value"),
        ({"tools": []}, openai.BadRequestError, "tools", "unknown_parameter"),
        (
            {"response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "response_format",
            "invalid_value",
        ),
        (
            {"stream_options": {"include_usage": True}},
            openai.BadRequestError,
            "stream_options",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_bad_input_is_openai_s_error(
    ai: openai.OpenAI, changed: Any, kind: Any, param: str, code: str | None, is_streamed: bool
) -> None:
    if is_streamed and "stream_options" in changed:
        return
    with pytest.raises(kind) as caught:
        ai.chat.completions.create(
            **{"model": MODEL, "messages": CIRCLE, "stream": is_streamed, **changed}
        )
    assert caught.value.param == param and code in (None, caught.value.code)


def test_invalid_json_is_a_400(url: str) -> None:
    answer = httpx.post(f"{url}{CHAT}", content=b'{"messages": [')
    assert answer.status_code == 400 and error_of(answer)


def test_the_wire_is_server_sent_events(url: str) -> None:
    body = {"model": MODEL, "messages": CIRCLE, "stream": True}
    answer = httpx.post(f"{url}{CHAT}", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last, rest = answer.text.split("\n\n")
    assert last == "data: [DONE]" and rest == ""
    for chunk in chunks:
        told = json.loads(chunk.removeprefix("data: "))
        assert told["object"] == "chat.completion.chunk" and len(told["choices"]) == 1


def test_a_failure_in_the_middle_of_a_stream_is_an_api_error() -> None:
    engine = FakeLlm()
    engine.fault = RuntimeError("broken")
    with (
        listening(fake_speaker(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as ai,
        pytest.raises(openai.APIError, match="language model failed"),
    ):
        list(ai.chat.completions.create(model=MODEL, messages=CIRCLE, stream=True))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_frees_its_cache(is_streamed: bool) -> None:
    engine = FakeLlm(token_s=60)
    with listening(fake_speaker(engine)) as url:
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": CIRCLE, "stream": is_streamed, "n": 3}
            httpx.post(f"{url}{CHAT}", json=body, timeout=3)
        until = time.monotonic() + 10
        while engine.open:
            assert time.monotonic() < until, f"{engine.open} still open after the client left"
            time.sleep(0.01)
    assert engine.cancelled == len(engine.asked) > 0


def test_the_openai_client_can_break_off_a_stream() -> None:
    engine = FakeLlm(token_s=0.1)
    with (
        listening(fake_speaker(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as ai,
    ):
        with ai.chat.completions.create(model=MODEL, messages=CIRCLE, stream=True) as stream:
            next(stream)
        until = time.monotonic() + 5
        while engine.open and time.monotonic() < until:
            time.sleep(0.01)
    assert engine.open == 0 and engine.cancelled == 1


def asked_of(
    worker: Worker, speaker: Any, path: str, body: Any, key: str | None = None, **settings: Any
) -> httpx.Response:
    async def call() -> httpx.Response:
        async with client(worker, speaker, key, **settings) as http:
            return await http.post(path, json=body)

    return asyncio.run(call())


def test_keys_and_their_rates_are_the_same_as_for_images(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text(f"{sha256('k')} me 2\n")
    settings = {"keys": str(tmp_path / "keys.txt")}

    async def scenario() -> list[int]:
        async with client(worker, fake_speaker(), "k", **settings) as http:
            asked = [(CHAT, {"messages": CIRCLE}), (GENERATE, {"prompt": "a", "steps": 2})] * 2
            return [(await http.post(path, json=body)).status_code for path, body in asked]

    assert asyncio.run(scenario()) == [200, 200, 429, 429]
    assert asked_of(worker, fake_speaker(), CHAT, {}, "x", **settings).status_code == 401


def test_a_deadline_is_a_408(worker: Worker) -> None:
    body = {"messages": CIRCLE, "deadline_s": 0.2}
    answer = asked_of(worker, fake_speaker(FakeLlm(token_s=0.3)), CHAT, body)
    assert answer.status_code == 408 and error_of(answer)["param"] == "deadline_s"


def test_without_a_language_model_there_is_none(worker: Worker) -> None:
    assert asked_of(worker, None, CHAT, {"messages": CIRCLE}).status_code == 404
    expanded = asked_of(worker, None, GENERATE, {"prompt": "a", "expand_prompt": True})
    assert expanded.status_code == 400 and error_of(expanded)["param"] == "expand_prompt"


class Broken:
    """A TextBackend whose replica is gone, or does not load."""

    def __init__(self, code: str) -> None:
        self.problem = Problem(503, "gone", None, code, 1.0)

    async def card(self) -> Any:
        raise self.problem

    async def generate(self, ask: Any) -> Any:
        if self.problem:
            raise self.problem
        yield

    async def metrics(self) -> list[Any]:
        return []


@pytest.mark.parametrize(("code", "ready"), [("llm_failed", 200), ("starting", 503)])
def test_pictures_do_not_wait_for_a_language_model_that_fails(
    worker: Worker, code: str, ready: int
) -> None:
    async def scenario() -> list[int]:
        async with client(worker, Broken(code)) as http:
            picture = {"prompt": "a", "steps": 2}
            answers = [
                await http.post(GENERATE, json=picture),
                await http.post(GENERATE, json={**picture, "expand_prompt": True}),
                await http.post(CHAT, json={"messages": CIRCLE}),
                await http.get("/v1/models"),
                await http.get("/metrics"),
                await http.get("/readyz"),
            ]
            return [answer.status_code for answer in answers]

    assert asyncio.run(scenario()) == [200, 200, 503, 200, 200, ready]


def test_one_that_was_ready_once_is_not_waited_for_again(worker: Worker) -> None:
    backend: Any = fake_speaker()

    async def scenario() -> list[Any]:
        async with client(worker, backend) as http:
            first = (await http.get("/readyz")).json()["llm"]
            backend.card = Broken("starting").card
            return [first, (await http.get("/readyz")).json()["llm"]]

    assert asyncio.run(scenario()) == ["ready", "unavailable"]


# -- expand_prompt ----------------------------------------------------------------------------


def test_a_picture_is_made_of_the_expanded_prompt(worker: Worker) -> None:
    body = {"prompt": "circle", "expand_prompt": True, "steps": 2, "n": 2, "seed": 4}
    answer = asked_of(worker, fake_speaker(), GENERATE, body).json()
    assert [data["revised_prompt"] for data in answer["data"]] == [SAID] * 2


def test_a_stream_tells_the_expanded_prompt(worker: Worker) -> None:
    body = {"prompt": "circle", "expand_prompt": True, "steps": 2, "stream": True}
    assert SAID in asked_of(worker, fake_speaker(), GENERATE, body).text


def test_the_embedded_model_expands_alike_for_a_seed(worker: Worker, speaker: Speaker) -> None:
    body = {"prompt": "circle", "expand_prompt": True, "steps": 2, "seed": 4}
    first, second = (
        asked_of(worker, speaker, GENERATE, body).json()["data"][0]["revised_prompt"]
        for _ in range(2)
    )
    scene = parse(first)
    assert first == second and scene is not None and scene.things[0].shape == "circle"


def test_what_is_too_slow_leaves_the_prompt_as_it_was(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "circle", "expand_prompt": True, "steps": 2}
    engine = FakeLlm(token_s=1.0)
    answer = asked_of(worker, fake_speaker(engine), GENERATE, body, expand_s=0.2).json()
    assert answer["data"][0]["revised_prompt"] == "circle" and engine.open == 0
    # The exception of a timeout has no words of its own.
    assert "a prompt was not expanded: TimeoutError" in caplog.text


def test_what_did_not_end_leaves_the_prompt_as_it_was(worker: Worker) -> None:
    body = {"prompt": "circle", "expand_prompt": True, "steps": 2}
    engine = FakeLlm(WORDS * 30)
    answer = asked_of(worker, fake_speaker(engine), GENERATE, body).json()
    assert answer["data"][0]["revised_prompt"] == "circle"
