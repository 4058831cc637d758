"""What a client sees of streamed answers becomes figures beside their limits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from eval.llm.bench import Figures, joules_of, poisson, streams
from eval.llm.client import AnswerTimes, Client
from eval.llm.limits import LIMITS

SERVER, INTERACTIVE = LIMITS["server"], LIMITS["interactive"]


PAGE = """sdxl_gpu_energy_joules_total{gpu="0",model="sdxl",replica="a",work="images"} 9000.0
sdxl_gpu_energy_joules_total{gpu="6",replica="b",work="llm"} 30.0
sdxl_gpu_energy_joules_total{gpu="7",replica="b",work="llm"} 10.0
sdxl_gpu_memory_bytes{gpu="7",replica="b",work="llm"} 5.0
"""


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def answer(_: httpx.Request) -> httpx.Response:
    """Its role, three pieces of text, its usage: as the service streams it."""
    deltas = [{"role": "assistant"}, *({"content": word} for word in ("a", "red", "ring"))]
    events = [event(choices=[{"delta": delta}]) for delta in deltas]
    usage = event(choices=[], usage={"completion_tokens": 4})
    return httpx.Response(200, text="".join((*events, usage, "data: [DONE]\n\n")))


def client_of(respond: object = answer) -> Client:
    client = Client("http://service", "mini", "", 64)
    transport = httpx.MockTransport(respond)  # type: ignore[arg-type]
    client.http = httpx.AsyncClient(base_url="http://service", transport=transport)
    return client


def test_an_answer_is_timed_from_its_first_text_to_its_last() -> None:
    firsts = list[None]()
    heard = asyncio.run(client_of().ask("ring", 1, on_first=lambda: firsts.append(None)))
    assert (heard.status, heard.tokens, len(firsts)) == (200, 4, 1)
    assert heard.began_s <= heard.first_s <= heard.last_s


def test_what_is_refused_or_breaks_off_counts_as_failed() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": {}})

    def break_off(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=event(error={"message": "gone"}))

    def hang_up(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone")

    for respond in (refuse, break_off, hang_up):
        figures = asyncio.run(streams(client_of(respond), 1, 0.01))
        assert figures.failed == len(figures.answers) > 0


def test_arrivals_that_come_by_themselves_are_all_counted() -> None:
    figures = asyncio.run(poisson(client_of(), 200.0, 0.5))
    assert 60 <= len(figures.answers) <= 140 and not figures.failed
    assert figures.tokens_per_s == pytest.approx(4 * len(figures.answers) / figures.took_s)


def test_both_limits_count_and_no_answers_keep_none() -> None:
    quick = AnswerTimes(0.0, first_s=0.4, last_s=0.4 + 3 * 0.03, tokens=4, status=200)
    late = replace(quick, first_s=0.5, last_s=0.5 + 3 * 0.03)
    slow = replace(quick, last_s=0.4 + 3 * 0.05)
    held = [
        [Figures([heard], 1.0).holds(limits) for limits in (SERVER, INTERACTIVE)]
        for heard in (quick, late, slow)
    ]
    assert held == [[True, True], [True, False], [True, False]]
    assert not Figures([], 1.0).holds(SERVER)


def test_answers_of_one_token_are_held_against_the_first_limit_alone() -> None:
    quick = AnswerTimes(0.0, first_s=0.4, last_s=0.4, tokens=1, status=200)
    slow = AnswerTimes(0.0, first_s=3.0, last_s=3.0, tokens=1, status=200)
    assert Figures([quick], 1.0).holds(SERVER) and not Figures([slow], 1.0).holds(SERVER)


def test_a_few_quick_answers_among_refusals_keep_no_limits() -> None:
    quick = AnswerTimes(0.0, first_s=0.1, last_s=0.2, tokens=4, status=200)
    refused = AnswerTimes(0.0, status=429)
    assert not Figures([quick, *[refused] * 9], 1.0).holds(SERVER)


def test_a_table_says_what_tokens_cost() -> None:
    heard = AnswerTimes(0.0, first_s=0.1, last_s=0.4, tokens=4, status=200)
    table = Figures([heard], 2.0, joules=8.0).table(SERVER, price=3.6)
    assert table["tokens_per_s"] == 2.0 and table["tokens_per_dollar"] == 2000.0
    assert table["tokens_per_joule"] == 0.5 and table["is_within_limits"]


@pytest.mark.parametrize(("page", "joules"), [(PAGE, 40.0), (PAGE.split("\n")[0], None)])
def test_only_the_language_models_own_gpus_count(
    page: str, joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(200, text=page))
    assert joules_of("http://service", "") == joules
