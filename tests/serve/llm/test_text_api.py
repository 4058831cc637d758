"""Chat and completions over REST with the official `openai` package, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from serve.llm.speaker import Speaker
from serve.worker.worker import Worker
from tests.serve.llm.texts import CHAT, FakeLlm, asked_of, fake_speaker, listening
from tests.serve.servers import error_of
from tests.serve.test_openai_client import client_of
from tests.waiting import wait_until
from training.llm.grammar import parse

MODEL = "mini-llm"
CIRCLE: list[Any] = [{"role": "user", "content": "a red circle"}]


@pytest.fixture(scope="module")
def url(speaker: Speaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("results")
    with listening(speaker, results_dir=str(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as found:
        yield found


def test_both_models_are_listed_the_image_model_first(ai: openai.OpenAI) -> None:
    first, second = (model.id for model in ai.models.list().data)
    assert "sdxl" in first and second == MODEL and "sdxl" not in second
    assert ai.models.retrieve(MODEL).id == MODEL


def test_a_chat_is_answered(ai: openai.OpenAI) -> None:
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


def test_a_stream_reports_usage_only_if_asked(ai: openai.OpenAI) -> None:
    chunks = list(ai.chat.completions.create(model=MODEL, messages=CIRCLE, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_choice_i_uses_seed_plus_i(ai: openai.OpenAI) -> None:
    def contents(**asked: Any) -> list[str | None]:
        answer = ai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "circle"}], **asked
        )
        return [choice.message.content for choice in answer.choices]

    three = contents(seed=1, n=3, temperature=1.0)
    assert three == contents(seed=1, n=3, temperature=1.0) and len(set(three)) > 1
    assert three[1:] == contents(seed=2, n=2, temperature=1.0), "choice i uses seed + i"


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
        {"role": "user", "content": [TEXT | {"text": "make it "}, TEXT | {"text": "green"}]},
    ]
    answer = ai.chat.completions.create(model=MODEL, messages=turns, temperature=0)
    assert answer.choices[0].message.content == "a green circle on a blue background"


def test_an_answer_can_be_sent_back_unchanged(ai: openai.OpenAI) -> None:
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
    # This backend has no grammars. Its refusal shows that it has read the field.
    assert caught.value.param == "response_format"


def test_a_picture_to_look_at_is_refused_by_its_kind(ai: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]
    with pytest.raises(openai.BadRequestError, match="'image_url' is not possible") as caught:
        ai.chat.completions.create(model=MODEL, messages=turns)
    assert caught.value.param == "messages"


def test_texts_are_completed(ai: openai.OpenAI) -> None:
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


BAD = openai.BadRequestError
LONG = [{"role": "user", "content": "circle " * 600}]
TEXT = {"type": "text"}
HALF = TEXT | {"text": "\udfff"}


@pytest.mark.parametrize(
    ("changed", "kind", "param", "code"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": []}, BAD, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "a"}]}, BAD, "messages", None),
        ({"messages": [{"role": "user"}]}, BAD, "messages", None),
        ({"n": 11}, BAD, "n", "invalid_value"),
        ({"n": 1000}, BAD, "n", "invalid_value"),
        ({"n": 0}, BAD, "n", "invalid_value"),
        ({"messages": LONG}, BAD, "messages", "context_length_exceeded"),
        ({"max_tokens": 5000}, BAD, "messages", "context_length_exceeded"),
        ({"logprobs": True}, BAD, "logprobs", "invalid_value"),
        ({"temperature": 3}, BAD, "temperature", "invalid_value"),
        ({"presence_penalty": 1}, BAD, "presence_penalty", "invalid_value"),
        ({"stop": ""}, BAD, "stop", "invalid_value"),
        ({"seed": -1}, BAD, "seed", "invalid_value"),
        ({"tools": []}, BAD, "tools", "unknown_parameter"),
        ({"response_format": {"type": "json_object"}}, BAD, "response_format", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, BAD, "stream_options", "invalid_value"),
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


@pytest.mark.parametrize(
    ("route", "asked", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a \ud800"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [HALF]}]}, "messages"),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": ["円", "\ud800"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop": ["\ud800"]}, "stop"),
        ("/v1/completions", {"prompt": "a", "model": "\ud800"}, "model"),
    ],
)
def test_half_a_character_is_a_400(url: str, route: str, asked: Any, param: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{url}{route}", content=json.dumps(asked), headers=headers)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param), answer.text


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
        event = json.loads(chunk.removeprefix("data: "))
        assert event["object"] == "chat.completion.chunk" and len(event["choices"]) == 1


def test_a_failure_in_the_middle_of_a_stream_is_an_api_error() -> None:
    engine = FakeLlm()
    engine.fault = RuntimeError("broken")
    with listening(fake_speaker(engine)) as url, client_of(url) as ai:
        stream = ai.chat.completions.create(model=MODEL, messages=CIRCLE, stream=True)
        with pytest.raises(openai.APIError, match="language model failed"):
            list(stream)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_frees_its_cache(is_streamed: bool) -> None:
    engine = FakeLlm(token_s=60)
    with listening(fake_speaker(engine)) as url:
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": CIRCLE, "stream": is_streamed, "n": 3}
            httpx.post(f"{url}{CHAT}", json=body, timeout=3)
        wait_until(lambda: not engine.open)
    assert engine.cancelled == len(engine.asked) > 0


def test_a_deadline_is_a_408(worker: Worker) -> None:
    body = {"messages": CIRCLE, "deadline_s": 0.2}
    answer = asked_of(worker, fake_speaker(FakeLlm(token_s=0.3)), CHAT, body)
    assert answer.status_code == 408 and error_of(answer)["param"] == "deadline_s"
