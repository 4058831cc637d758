"""Requests whose front end dies or hangs: the client reads one normal answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.fleet.liveness import Liveness
from serve.front import handover
from serve.front.handover import Body, Handover
from serve.front.proxied import CARRIED, Proxied

Front = Callable[[bytes, Scope, Receive, Send], Awaitable[None]]
ASKED: list[Message] = [{"type": "http.request", "body": b"a"}, {"type": "http.disconnect"}]
"""the messages of a client that leaves"""


class Fronts:
    """Each request goes to the next front end, as with Ray's router; the last one stays."""

    def __init__(self, *fronts: Front) -> None:
        self.fronts, self.asked = list(fronts), list[tuple[bytes, bytes]]()
        self.known = Liveness()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self.fronts.pop(0) if len(self.fronts) > 1 else self.fronts[0]
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        name = dict(scope["headers"])[b"x-request-id"]
        self.asked.append((name, body))
        self.known.note_holder(name.decode(), front.__name__)
        await front(body, scope, receive, send)


async def answers(body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"you said " + body})


async def dies(body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    """Like Ray's proxy, return without an answer."""


async def hangs(body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def breaks_off(body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"you", "more_body": True})


def asked(fronts: Fronts, around: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> httpx.Response:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(around(Handover(fronts, fronts.known)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post("/v1/images/generations", content=b"a ring")

    return asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "LOOK_S", 0.05)
    monkeypatch.setattr(handover, "SILENCE_S", 0.2)


@pytest.mark.parametrize("lost", [(), (dies,), (dies, dies)])
def test_a_dead_front_s_whole_request_goes_to_another(lost: tuple[Front, ...]) -> None:
    fronts = Fronts(*lost, answers)
    answer = asked(fronts)
    assert (answer.status_code, answer.content) == (200, b"you said a ring")
    assert len(fronts.asked) == len(lost) + 1 and len(set(fronts.asked)) == 1


def test_a_front_that_hangs_is_left_if_another_answers() -> None:
    fronts = Fronts(hangs, answers)
    fronts.known.keep({"hangs", "answers"})
    fronts.known.note_lost("hangs")
    assert asked(fronts).content == b"you said a ring"
    assert len(fronts.asked) == 2


def test_a_hanging_replica_is_awaited_if_no_other_answers() -> None:
    late = asyncio.Event()

    async def slow(body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        asyncio.get_running_loop().call_later(1.0, late.set)
        await late.wait()
        await answers(body, scope, receive, send)

    fronts = Fronts(slow)
    fronts.known.keep({"slow"})
    fronts.known.note_lost("slow")
    assert asked(fronts).content == b"you said a ring" and len(fronts.asked) == 1


def test_a_request_that_ends_takes_no_other_of_its_id_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a third front end is silent, a request without a front end is soon retried."""
    monkeypatch.setattr(handover, "SILENCE_S", 2.0)
    known, paths = Liveness(), list[str]()
    known.keep(["works", "silent"])

    async def takes_its_time(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        known.note_holder("same", "works")
        for _ in range(1 if scope["path"] == "/short" else 20):
            await asyncio.sleep(0.2)
            known.note_answer("works")
        await answers(b"", scope, receive, send)

    async def scenario() -> list[httpx.Response]:
        transport = httpx.ASGITransport(Handover(takes_its_time, known))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            headers = {"x-request-id": "same"}
            both = (http.get(path, headers=headers) for path in ("/short", "/long"))
            return await asyncio.gather(*both)

    answered = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert [each.status_code for each in answered] == [200, 200]
    assert sorted(paths) == ["/long", "/short"] and not known.holders


@pytest.mark.parametrize(("front", "sent"), [(breaks_off, b"you"), (hangs, b"")])
async def test_a_begun_answer_or_a_client_that_left_is_not_asked_for_again(
    front: Front, sent: bytes
) -> None:
    fronts = Fronts(front, answers)
    messages: list[Message] = []
    body = iter(ASKED)

    async def receive() -> Message:
        return next(body, ASKED[-1])

    async def send(message: Message) -> None:
        messages.append(message)

    scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
    await Handover(fronts, fronts.known)(scope, receive, send)
    assert len(fronts.asked) == 1
    assert b"".join(message.get("body", b"") for message in messages) == sent


def test_a_failed_request_keeps_no_body() -> None:
    """The error refers to Ray's frames, which could keep the request in a reference cycle."""

    async def fails(body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError):
        asked(Fronts(fails))
    assert not [each for each in gc.get_objects() if type(each) is Body and each.kept]


def test_without_any_front_the_client_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PATIENCE_S", 0.3)
    answer = asked(Fronts(dies))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"


def test_a_body_sent_with_its_request_is_sent_again() -> None:
    """Ray's proxy does not send small bodies as messages."""
    carried: list[bytes] = []

    async def reads(body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        carried.append(scope["extensions"][CARRIED])
        if len(carried) == 2:
            await answers(carried[-1], scope, receive, send)

    class Carried(Fronts):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self.known.note_holder(dict(scope["headers"])[b"x-request-id"].decode(), "reads")
            await reads(b"", scope, receive, send)

    assert asked(Carried(reads), Proxied).content == b"you said a ring"
    assert carried == [b"a ring"] * 2
