"""What makes a batch worker's pictures: a model in this process, or a service that runs already.

Both are asked as the REST front asks its backend, one order a picture, and `window` orders are kept
with them so that nothing idles.
"""

from __future__ import annotations

import asyncio
import base64
import random
import socket
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Protocol

from sdxl.params import InvalidParams, Sizes
from sdxl.presets import UNMEASURED, Presets, presets_of
from sdxl.prompt import MAX_TOKENS
from sdxl.provenance import OFF, Provenance
from serve.errors import Problem
from serve.models import own_names
from serve.orders import Done, ImageOrder, ModelCard, Update

THROUGH_WINDOW = 32
"""Pictures asked of a service at a time, unless it says that more are best: enough for several
devices, less than one's queue."""
BUSY = (429, 502, 503, 504)
CLOSED = (401, 403, 404, 405)
"""The service, its key or its model is another one: no row's fault."""
MAX_PAUSE_S = 15.0
ANSWER_S = 3600.0
"""A picture of low priority may wait long for its turn."""
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]
"""An answer may take an hour, but a machine that is gone is noticed in seconds."""


class RendererLost(RuntimeError):
    """Nothing will be drawn before somebody mends it: what, and where."""


class Renderer(Protocol):
    window: int

    async def card(self) -> ModelCard: ...
    def generate(self, order: ImageOrder) -> AsyncGenerator[Update]: ...
    def steps(self) -> int:
        """Rises as long as work advances."""
        ...

    def occupancy(self) -> float:
        """The share of its places that are taken."""
        ...

    def check(self) -> None:
        """Raises where it will never make a picture again."""
        ...

    async def close(self) -> None: ...


class LocalRenderer:
    """The service's own worker, on the whole of one device."""

    def __init__(self, worker: Any) -> None:
        from sdxl.pipeline import ENCODE_BATCH

        self.worker = worker
        limits = worker.limits
        self.window = 2 * max(limits.rows // 2, 1) + ENCODE_BATCH

    @classmethod
    def load(cls, pipeline: Any, provenance: Provenance | None = None) -> LocalRenderer:
        from serve.worker.worker import Worker

        # It never has more than a window's worth, so that it never turns one away.
        marks = provenance or Provenance(OFF)
        worker = Worker(pipeline, queue=10_000, max_prompt_tokens=MAX_TOKENS, provenance=marks)
        worker.start()
        return cls(worker)

    async def card(self) -> ModelCard:
        card: ModelCard = await self.worker.card()
        return card

    def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        updates: AsyncGenerator[Update] = self.worker.generate(order)
        return updates

    def steps(self) -> int:
        return int(self.worker.steps_taken)

    def occupancy(self) -> float:
        return min(self.worker.rows_running / self.worker.limits.rows, 1.0)

    def check(self) -> None:
        """Engines that keep failing would make dead letters of everything; of one that never
        returns nothing would come."""
        self.worker.check_health()

    async def close(self) -> None:
        self.worker.close()


def load_local(
    model: str,
    backend: str,
    precision: str | None,
    folder: str,
    exact: bool,
    provenance: Provenance,
    takes_unchecked: bool = False,
) -> LocalRenderer:
    import engines

    pipeline = engines.load(
        model,
        backend,
        precision=precision,
        folder=folder,
        is_deterministic=exact,
        takes_unchecked=takes_unchecked,
    )
    return LocalRenderer.load(pipeline, provenance)


class HttpRenderer:
    """A running service, asked at low priority. That it is busy or restarts is waited out."""

    def __init__(self, url: str, key: str | None, model: str = "") -> None:
        import httpx

        self.url, self.window, self._key = url.rstrip("/"), THROUGH_WINDOW, key
        headers = headers_of(key)
        limits = httpx.Limits(max_connections=None)
        door = httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE)
        self._http = httpx.AsyncClient(
            headers=headers, transport=door, timeout=httpx.Timeout(30, read=ANSWER_S)
        )
        self._model = model
        self._answers = 0
        self._asked = 0

    async def card(self) -> ModelCard:
        card = await asyncio.to_thread(service_card, self.url, self._key, self._model)
        self._model, self.window = card.id, window_of(card)
        return card

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        import httpx

        pause_s = 0.5
        while True:
            self._asked += 1
            try:
                answer = await self._http.post(
                    f"{self.url}/v1/images/generations", json=body_of(order, self._model)
                )
            except httpx.TransportError:
                answer = None
            finally:
                self._asked -= 1
            if answer is not None and answer.status_code not in BUSY:
                break
            hinted = 0.0 if answer is None else hinted_s(answer)
            await asyncio.sleep(min(max(hinted, pause_s), MAX_PAUSE_S) * random.uniform(0.8, 1.2))
            pause_s *= 2
        self._answers += 1
        if answer.status_code in CLOSED:
            raise RendererLost(f"{self.url} said {answer.status_code}: {problem_of(answer)}")
        if answer.status_code != 200:
            raise problem_of(answer)
        yield done_of(order, answer.json()["data"][0])

    def steps(self) -> int:
        return self._answers

    def occupancy(self) -> float:
        return self._asked / self.window

    def check(self) -> None:
        """Its health is its owner's to mend."""

    async def close(self) -> None:
        await self._http.aclose()


def headers_of(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def window_of(card: ModelCard) -> int:
    return max(THROUGH_WINDOW, card.at_once)


def service_card(url: str, key: str | None, asked: str) -> ModelCard:
    """What a job need know of one of its image models, of the first unless one is asked for."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers_of(key), timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidParams("through", url, f"needed a service that runs ({error})") from error
    if answer.status_code != 200:
        raise InvalidParams("through", url, problem_of(answer).message)
    models = answer.json()["data"]
    named = [each for each in models if not asked or asked in own_names(each["id"])]
    if not named:
        ids = ", ".join(each["id"] for each in models)
        raise InvalidParams("model", asked, f"needed one that {url} has: {ids}")
    id_, images = str(named[0]["id"]), named[0].get("images") or {}
    try:
        presets: Presets = presets_of(images["presets"])
    except (KeyError, TypeError, ValueError):
        # Of an older version, or of another make.
        presets = UNMEASURED
    at_once = int(images.get("at_once") or 0)
    return ModelCard(
        id_, Sizes(0, 0, 0), engines={"service": id_}, at_once=at_once, presets=presets
    )


def body_of(order: ImageOrder, model: str) -> dict[str, Any]:
    return {
        **order.params.as_rest(),
        "model": model,
        "output_format": order.format,
        "response_format": "b64_json",
        "priority": "batch",
    }


def hinted_s(answer: Any) -> float:
    """What a busy service asks for; 0 where it names a date or nothing, for pauses grow anyway."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def done_of(order: ImageOrder, data: dict[str, Any]) -> Done:
    image = base64.b64decode(data["b64_json"])
    steps = data["deep_steps"], data["shallow_steps"]
    params = replace(order.params, cache_interval=order.params.interval)
    return Done(image, params, data["timings"], *steps, prompt_tokens=0)


def problem_of(answer: Any) -> Problem:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return Problem(answer.status_code, f"the service said {answer.status_code}")
    return Problem(answer.status_code, error["message"], error["param"], error["code"])
