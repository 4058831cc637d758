"""Pictures over HTTP: from a checked request to its answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sdxl.attachments import take_tags
from sdxl.control_maps import Pictures
from sdxl.params import DRAWN_SEEDS
from sdxl.source import SourceImage
from sdxl.work import standard_images
from serve import errors
from serve.front import events
from serve.front.access import client_of
from serve.front.answering import deadline_of, fan_out, stream, take_rate
from serve.front.attached_pictures import has_pictures, read_attached
from serve.front.image_orders import check_plain, orders_of
from serve.front.keys import RateLimiter
from serve.front.openai_images import ImageData, ImageRequest, ImagesResponse, Usage
from serve.front.pictures import PicturesResponse
from serve.front.results import ResultStore
from serve.front.sent_pictures import DecodingThread
from serve.front.served_models import ServedModels
from serve.llm.expansion import Expander
from serve.models import ImageModel
from serve.orders import (
    Done,
    ImageBackend,
    ImageOrder,
    ImageProgress,
    ModelCard,
    Preview,
    Queued,
    Update,
)
from serve.settings import ServeSettings


@dataclass
class Generations:
    models: ServedModels
    settings: ServeSettings
    store: ResultStore
    limiter: RateLimiter
    decoding: DecodingThread
    expander: Expander | None = None

    async def answer(
        self,
        asked: ImageRequest,
        request: Request,
        source: SourceImage | None = None,
        maps: Pictures | None = None,
    ) -> Response:
        """`source`: the image that an edit begins from; `maps`: an edit's other pictures."""
        if source is None:
            check_plain(asked)
        model = self.models.choose(asked.model)
        card = await model.backend.card()
        if source is None and has_pictures(asked):
            read = partial(read_attached, asked, card, model.settings)
            asked, maps = await self.decoding.run(read)
        # A request that only uses spare ticks may wait long.
        is_patient = asked.priority == "batch"
        deadline_s = deadline_of(asked.deadline_s, request, self.settings, is_patient=is_patient)
        seed = secrets.randbelow(DRAWN_SEEDS)

        def orders_from(asked: ImageRequest, left_s: float) -> list[ImageOrder]:
            orders = orders_of(asked, card, model.settings, seed, left_s)
            return marked(orders, request, model, source=source, maps=maps or {})

        orders = orders_from(asked, deadline_s)
        if asked.response_format == "url":
            await asyncio.to_thread(self.store.check_room, most_bytes(orders))
        take_rate(self.limiter, request, len(orders), work_of(orders, card))
        if asked.expand_prompt:
            began_s = time.monotonic()
            asked = await self._expanded(asked, seed)
            orders = orders_from(asked, deadline_s - (time.monotonic() - began_s))
        if asked.stream:
            return await streamed(asked, orders, model.backend)
        done = await collect(model.backend, orders)
        data = [await self._data(asked, picture, request) for picture in done]
        reply = ImagesResponse(
            created=int(time.time()),
            data=data,
            output_format=asked.format,
            size=size(orders[0]),
            quality=asked.effective_quality,
            model=done[0].model,
            usage=Usage.of(sum(picture.prompt_tokens for picture in done)),
            safety_identifier=asked.identifier,
        )
        text = reply.model_dump_json(exclude_none=True).encode()
        is_url = asked.response_format == "url"
        return PicturesResponse(text, [] if is_url else [picture.image for picture in done])

    async def _expanded(self, asked: ImageRequest, seed: int) -> ImageRequest:
        """The request with its prompt expanded."""
        if self.expander is None:
            raise errors.invalid("expand_prompt", "expand_prompt: no language model is served here")
        words = seed if asked.seed is None else asked.seed
        most = self.settings.max_prompt_chars
        plain, typed = take_tags(asked.prompt, "prompt")
        prompt = await self.expander.expand(plain, words, most)
        loras = [*(asked.loras or ()), *typed] or None
        return asked.model_copy(update={"prompt": prompt, "loras": loras})

    async def _data(self, asked: ImageRequest, done: Done, request: Request) -> ImageData:
        facts: dict[str, Any] = {
            "seed": done.params.seed or 0,
            "timings": {name: round(seconds, 6) for name, seconds in done.timings.items()},
            "deep_steps": done.deep_steps,
            "shallow_steps": done.shallow_steps,
        }
        if asked.expand_prompt:
            facts["revised_prompt"] = asked.prompt
        if done.is_flagged:
            facts["flagged"] = True
        if asked.response_format != "url":
            return ImageData(b64_json="", **facts)
        name = await asyncio.to_thread(self.store.put, done.image, asked.format)
        origin = self.settings.public_url or str(request.base_url)
        return ImageData(url=f"{origin.rstrip('/')}/v1/results/{name}", **facts)


async def streamed(
    asked: ImageRequest, orders: Sequence[ImageOrder], backend: ImageBackend
) -> Response:
    previews = Counter[int]()

    def describe(index: int, update: Update) -> bytes:
        match update:
            case ImageProgress():
                return events.progress(asked, index, update)
            case Preview():
                number, previews[index] = previews[index], previews[index] + 1
                return events.partial(asked, size(orders[index]), index, number, update)
            case Done():
                return events.completed(asked, size(orders[index]), index, update)
            case Queued():
                return b""

    updates = fan_out(backend, orders, orders[0].deadline_s)
    return await stream(updates, set(range(len(orders))), Queued, describe, events.failure)


def marked(
    orders: Sequence[ImageOrder], request: Request, model: ImageModel, **more: Any
) -> list[ImageOrder]:
    """The orders with this HTTP request's id, trace and client."""
    client, weight = client_of(request, model.settings.client_header)
    marks: dict[str, Any] = {
        "request_id": request.state.request_id,
        "trace": trace_of(request),
        "client": client,
        "weight": weight,
    }
    return [replace(order, **marks, **more) for order in orders]


def most_bytes(orders: Sequence[ImageOrder]) -> int:
    """No file is larger than its pixels by more than its metadata."""
    return sum(3 * order.result_pixels for order in orders)


def work_of(orders: Sequence[ImageOrder], card: ModelCard) -> float:
    return sum(
        standard_images(
            order.params,
            card.sizes,
            embeds_guidance=card.embeds_guidance,
            pasted=order.pasted_pixels,
        )
        for order in orders
    )


async def collect(backend: ImageBackend, orders: Sequence[ImageOrder]) -> list[Done]:
    """The pictures, in the order of their orders."""
    done: dict[int, Done] = {}
    async with aclosing(fan_out(backend, orders, orders[0].deadline_s)) as updates:
        async for index, update in updates:
            if isinstance(update, Done):
                done[index] = update
    return [done[index] for index in sorted(done)]


def trace_of(request: Request) -> str:
    return str(getattr(request.state, "trace", ""))


def size(order: ImageOrder) -> str:
    return "{}x{}".format(*order.params.result_size)
