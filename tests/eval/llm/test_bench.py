"""Figures of streamed answers, and MLPerf's limits on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval.llm.bench import Figures, run_poisson, run_streams
from eval.llm.client import (
    AT_ONCE,
    DEADLINE_S,
    LIMITS,
    PROMPTS,
    Client,
    LlmPrompt,
    StreamedAnswer,
    concurrent_requests,
    read_prompts,
)
from sdxl.params import InvalidParams
from serve.llm.speaker import Speaker
from tests.serve.llm.texts import FakeLlm, prompts


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


ERROR = event(error={"message": "gone"})


def answer(_: httpx.Request) -> httpx.Response:
    """A role, three pieces of text and the usage, as the service streams them."""
    deltas = [{"role": "assistant"}, *({"content": word} for word in ("a", "red", "ring"))]
    events = [event(choices=[{"delta": delta}]) for delta in deltas]
    usage = event(choices=[], usage={"completion_tokens": 4})
    return httpx.Response(200, text="".join((*events, usage, "data: [DONE]\n\n")))


def client_of(respond: object = answer, prompts: Sequence[LlmPrompt] = PROMPTS) -> Client:
    client = Client("http://service", "mini", "", 64, prompts)
    transport = httpx.MockTransport(respond)  # type: ignore[arg-type]
    client.http = httpx.AsyncClient(base_url="http://service", transport=transport)
    return client


def test_an_answer_has_the_times_of_its_first_and_last_text() -> None:
    firsts = list[None]()
    request = client_of().request(LlmPrompt("ring"), 1, on_first=lambda: firsts.append(None))
    received = asyncio.run(request)
    assert (received.status, received.tokens, len(firsts)) == (200, 4, 1)
    assert received.began_s <= received.first_s <= received.last_s


def hang_up(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("gone")


@pytest.mark.parametrize(
    "respond", [lambda _: httpx.Response(429), lambda _: httpx.Response(200, text=ERROR), hang_up]
)
def test_refused_and_interrupted_answers_count_as_failed(respond: object) -> None:
    figures = asyncio.run(run_streams(client_of(respond), 1, 0.01))
    assert figures.failed == len(figures.answers) > 0


def test_every_poisson_arrival_is_counted() -> None:
    figures = asyncio.run(run_poisson(client_of(), 200.0, 0.5))
    assert 60 <= len(figures.answers) <= 140 and not figures.failed
    assert figures.tokens_per_s == pytest.approx(4 * len(figures.answers) / figures.took_s)


def streamed(first_s: float, token_s: float = 0.03, tokens: int = 4) -> StreamedAnswer:
    last_s = first_s + (tokens - 1) * token_s
    return StreamedAnswer(0.0, first_s=first_s, last_s=last_s, tokens=tokens, status=200)


@pytest.mark.parametrize(
    ("answers", "holds"),
    [
        ([streamed(0.4)], [True, True]),
        ([streamed(0.5)], [True, False]),
        ([streamed(0.4, token_s=0.05)], [True, False]),
        ([streamed(0.4, tokens=1)], [True, True]),
        ([streamed(3.0, tokens=1)], [False, False]),
        ([streamed(0.1), *[StreamedAnswer(0.0, status=429)] * 9], [False, False]),
        ([], [False, False]),
    ],
)
def test_both_limits_must_hold(answers: list[StreamedAnswer], holds: list[bool]) -> None:
    """An answer of one token must keep only the first limit."""
    assert [Figures(answers, 1.0).holds(limits) for limits in LIMITS.values()] == holds


def test_the_table_has_tokens_per_dollar_and_per_joule() -> None:
    table = Figures([streamed(0.1)], 2.0, joules=8.0).table(LIMITS["server"], price=3.6)
    assert table["tokens_per_s"] == 2.0 and table["tokens_per_dollar"] == 2000.0
    assert table["tokens_per_joule"] == 0.5 and table["is_within_limits"]


def test_prompts_of_a_file_keep_their_max_tokens_and_get_a_long_deadline(tmp_path: Path) -> None:
    file, bodies = tmp_path / "prompts.jsonl", list[dict[str, Any]]()
    file.write_text('{"text": "long", "max_tokens": 900}\n\n{"text": "short"}\n')

    def note(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answer(request)

    client = client_of(note, read_prompts(str(file)))
    asyncio.run(run_streams(client, 1, 0.1))
    sent = [(body["messages"][0]["content"], body["max_tokens"]) for body in bodies[:3]]
    assert sent == [("long", 900), ("short", 64), ("long", 900)]
    assert {body["deadline_s"] for body in bodies} == {DEADLINE_S}


@pytest.mark.parametrize(
    "content",
    ["", "circle", '{"max_tokens": 3}', '{"text": ""}', '{"text": "a", "max_tokens": 0}', "[1]"],
)
def test_a_file_without_prompts_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(
        InvalidParams, match="prompts must hold (at least one line|JSON lines).*prompts.jsonl"
    ):
        read_prompts(str(file))


@pytest.mark.parametrize(("replicas", "most"), [(2, 2 * (10 + 64)), (0, AT_ONCE)])
def test_concurrent_requests_are_the_sum_over_the_replicas(
    replicas: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = asyncio.run(Speaker("llm", prompts(), FakeLlm()).metrics())
    (gauge,) = [each for each in metrics if each.name == "sdxl_llm_at_once"]
    lines = [f'{gauge.name}{{replica="{i}"}} {gauge.samples[0].value}' for i in range(replicas)]
    page = httpx.Response(200, text="\n".join(lines))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: page)
    assert concurrent_requests("http://service", "") == most
