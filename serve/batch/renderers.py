"""Renders a batch worker's pictures: with a model in this process, or through a running service.

A renderer takes an order for each picture. A worker keeps `window` orders with its renderer, so
that the renderer never idles.
"""

from __future__ import annotations

import asyncio
import base64
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from sdxl.params import PICTURED, InvalidParams, Sizes
from sdxl.picture_files import opened
from sdxl.presets import UNMEASURED, Presets, presets_of
from sdxl.prompt import MAX_TOKENS
from sdxl.provenance import Provenance
from serve.batch.batch_spec import BatchSpec
from serve.errors import Problem
from serve.models import own_names
from serve.orders import Done, ImageOrder, ModelCard, Update

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline

THROUGH_WINDOW = 32
"""The least window for a service: enough for several devices, less than one replica's queue."""
BUSY = (429, 502, 503, 504)
CLOSED = (401, 403, 404, 405)
"""The key, the address or the model is wrong, and every row would fail."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 15.0
"""Pauses between tries; each is twice as long as the last, and at least as the service asks."""
ANSWER_S = 3600.0
"""Timeout of an answer: a picture of low priority may wait long."""
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]
"""With these a dead machine is noticed in seconds, although an answer may take an hour."""


class RendererLost(RuntimeError):
    """No picture can be made until a person fixes the renderer."""


class Renderer(Protocol):
    window: int

    async def card(self) -> ModelCard: ...
    def generate(self, order: ImageOrder) -> AsyncGenerator[Update]: ...
    def steps(self) -> int:
        """Return a count that rises while work advances."""
        ...

    def occupancy(self) -> float:
        """Return the share of places in use."""
        ...

    def check(self) -> None:
        """Raise if the renderer cannot make pictures any more."""
        ...

    async def close(self) -> None: ...


class LocalRenderer:
    """The service's worker, alone on one device."""

    def __init__(self, pipeline: Pipeline, provenance: Provenance) -> None:
        from sdxl.pipeline import ENCODE_BATCH
        from serve.worker.worker import Worker

        # The queue is longer than any window, so that the worker never refuses an order.
        self.worker = Worker(
            pipeline, queue=10_000, max_prompt_tokens=MAX_TOKENS, provenance=provenance
        )
        self.worker.start()
        self.window = 2 * max(self.worker.limits.rows // 2, 1) + ENCODE_BATCH

    async def card(self) -> ModelCard:
        return await self.worker.card()

    def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        return self.worker.generate(order)

    def steps(self) -> int:
        return self.worker.steps_taken

    def occupancy(self) -> float:
        return min(self.worker.rows_running / self.worker.limits.rows, 1.0)

    def check(self) -> None:
        """Raise if the engines are broken, which would make every row a dead letter, or hang."""
        self.worker.check_health()

    async def close(self) -> None:
        self.worker.close()


def load_local(order: BatchSpec) -> LocalRenderer:
    refiner = order.parameters.get("refiner")
    pipeline = order.load(refiner=refiner, is_deterministic=order.deterministic)
    return LocalRenderer(pipeline, order.provenance)


class ServiceRenderer:
    """Renders through a service at low priority; waits while it is busy or restarts. A subclass
    sends the orders."""

    window = THROUGH_WINDOW
    _answers = _open = 0

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        order, pause_s = await self._prepare(order), FIRST_PAUSE_S
        self._open += 1
        try:
            while True:
                try:
                    async with aclosing(self._send(order)) as updates:
                        async for update in updates:
                            yield update
                    return
                except Problem as problem:
                    if problem.status not in BUSY:
                        raise
                    asked_s = problem.retry_after_s or 0.0
                pause_s = max(asked_s, pause_s)
                await asyncio.sleep(min(pause_s, MAX_PAUSE_S) * random.uniform(0.8, 1.2))
                pause_s *= 2
        finally:
            self._open -= 1
            self._answers += 1

    async def _prepare(self, order: ImageOrder) -> ImageOrder:
        return order

    def _send(self, order: ImageOrder) -> AsyncGenerator[Update]:
        """Raises Problem; the order is sent again if the service is busy."""
        raise NotImplementedError

    def _keep_window(self, card: ModelCard) -> None:
        self.window = max(THROUGH_WINDOW, card.at_once)

    def steps(self) -> int:
        return self._answers

    def occupancy(self) -> float:
        return min(self._open / self.window, 1.0)

    def check(self) -> None:
        """The service checks its health itself."""

    async def close(self) -> None:
        """The service goes on."""


class HttpRenderer(ServiceRenderer):
    def __init__(self, url: str, key: str | None, model: str = "") -> None:
        import httpx

        self.url, self._key, self._model = url.rstrip("/"), key, model
        limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(30, read=ANSWER_S)
        transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE)
        self._http = httpx.AsyncClient(
            headers=headers_of(key), transport=transport, timeout=timeout
        )

    async def card(self) -> ModelCard:
        card = await asyncio.to_thread(service_card, self.url, self._key, self._model)
        self._model = card.id
        self._keep_window(card)
        return card

    async def _send(self, order: ImageOrder) -> AsyncGenerator[Update]:
        import httpx

        body = body_of(order, self._model)
        try:
            answer = await self._http.post(f"{self.url}/v1/images/generations", json=body)
        except httpx.TransportError as error:
            raise Problem(503, str(error)) from error
        if answer.status_code in CLOSED:
            message = f"{self.url} answered {answer.status_code}: {problem_of(answer)}"
            raise RendererLost(message)
        if answer.status_code != 200:
            raise problem_of(answer)
        yield done_of(order, answer.json()["data"][0])

    async def close(self) -> None:
        await self._http.aclose()


def headers_of(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def service_card(url: str, key: str | None, asked: str) -> ModelCard:
    """Return the card of the model of this name, or of the service's first model."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers_of(key), timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        needed = f"must be the URL of a running service ({error})"
        raise InvalidParams("through", url, needed) from error
    if answer.status_code != 200:
        needed = f"must be a service that accepts the request ({problem_of(answer).message})"
        raise InvalidParams("through", url, needed)
    models = answer.json()["data"]
    named = [each for each in models if not asked or asked in own_names(each["id"])]
    if not named:
        ids = ", ".join(each["id"] for each in models)
        raise InvalidParams("model", asked, f"must be a model that {url} serves: {ids}")
    id_, images = str(named[0]["id"]), named[0].get("images") or {}
    try:
        presets: Presets = presets_of(images["presets"])
    except (KeyError, TypeError, ValueError):
        # The service is an older version, or another program.
        presets = UNMEASURED
    at_once = int(images.get("at_once") or 0)
    return ModelCard(
        id_, Sizes(0, 0, 0), engines={"service": id_}, at_once=at_once, presets=presets
    )


def body_of(order: ImageOrder, model: str) -> dict[str, Any]:
    body = order.params.as_rest()
    for name in PICTURED:
        for each in body.get(name, ()):
            each["image"] = data_url(order.maps[each["image"]])
    return {
        **body,
        "model": model,
        "output_format": order.format,
        "response_format": "b64_json",
        "priority": "batch",
    }


def data_url(file: bytes) -> str:
    with opened(file) as picture:
        kind = str(picture.format).lower()
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def done_of(order: ImageOrder, data: dict[str, Any]) -> Done:
    image = base64.b64decode(data["b64_json"])
    steps = data["deep_steps"], data["shallow_steps"]
    params = replace(order.params, cache_interval=order.params.interval)
    return Done(image, params, data["timings"], *steps, prompt_tokens=0)


def problem_of(answer: Any) -> Problem:
    hint, status = answer.headers.get("retry-after", ""), answer.status_code
    # The hint may also be a date.
    retry_after_s = float(hint) if hint.isascii() and hint.isdigit() else None
    try:
        error = answer.json()["error"]
        facts = error["message"], error["param"], error["code"]
    except (ValueError, KeyError, TypeError):
        facts = f"the service answered {status}", None, None
    return Problem(status, *facts, retry_after_s)
