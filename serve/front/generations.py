"""Answers checked requests for pictures over HTTP, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sdxl.attachments import take_tags
from sdxl.params import DRAWN_SEEDS
from sdxl.work import standard_images
from serve import errors
from serve.errors import Problem
from serve.front.access import client_of, origin_of
from serve.front.answering import deadline_of, fan_out, server_event, stream, take_rate
from serve.front.edits import SentEdit
from serve.front.keys import RateLimiter
from serve.front.openai_images import MEDIA, ImageData, ImageRequest, ImagesResponse, Usage
from serve.front.pictures import PicturesResponse, filled
from serve.front.request_reader import RequestReader
from serve.front.results import ResultStore
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
    reader: RequestReader
    settings: ServeSettings
    store: ResultStore
    limiter: RateLimiter
    expander: Expander | None = None

    async def answer(self, sent: ImageRequest | SentEdit, request: Request) -> Response:
        asked = sent.request if isinstance(sent, SentEdit) else sent
        # A low-priority request may wait long.
        is_patient = asked.priority == "batch"
        deadline_s = deadline_of(asked.deadline_s, request, self.settings, is_patient=is_patient)
        until_s = time.monotonic() + deadline_s
        take_rate(self.limiter, request, asked.n or 1, is_charged=False)
        read = await self.reader.read(sent, until_s)
        # The files are not kept, since an answer may take long.
        del sent
        asked, is_bare = with_accepted(read.request, request)
        model, marks = read.model, marks_of(request, read.model)
        seed = secrets.randbelow(DRAWN_SEEDS)

        def orders_from(asked: ImageRequest) -> list[ImageOrder]:
            left_s = until_s - time.monotonic()
            return replace(read, request=asked).orders(seed, left_s, marks)

        orders = orders_from(asked)
        if asked.response_format == "url":
            # A file has at most about 3 bytes a pixel; metadata is small.
            most = sum(3 * order.result_pixels for order in orders)
            await asyncio.to_thread(self.store.check_room, most)
        take_rate(self.limiter, request, len(orders), work_of(orders, read.card))
        if asked.expand_prompt:
            asked = await self._expand(asked, seed)
            orders = orders_from(asked)
        if asked.stream:
            return await stream_pictures(asked, orders, model.backend)
        done = await collect(model.backend, orders)
        if is_bare:
            return Response(done[0].image, media_type=MEDIA[asked.format])
        origin, urls = origin_of(request, self.settings.public_url), list[str]()
        if asked.response_format == "url":
            for each in done:
                name = await asyncio.to_thread(self.store.put, each.image, asked.format)
                urls.append(f"{origin}/v1/results/{name}")
        reply = reply_of(asked, size(orders[0]), done, urls).model_dump_json(exclude_none=True)
        return PicturesResponse(reply.encode(), [] if urls else [each.image for each in done])

    async def _expand(self, asked: ImageRequest, seed: int) -> ImageRequest:
        """Return the request with its prompt expanded."""
        if self.expander is None:
            raise errors.invalid("expand_prompt", "expand_prompt: no language model is served here")
        seed = seed if asked.seed is None else asked.seed
        plain, tags = take_tags(asked.prompt, "prompt")
        prompt = await self.expander.expand(plain, seed, self.settings.max_prompt_chars)
        loras = [*(asked.loras or ()), *tags] or None
        return asked.model_copy(update={"prompt": prompt, "loras": loras})


def with_accepted(asked: ImageRequest, request: Request) -> tuple[ImageRequest, bool]:
    """Return the request with the format in `Accept`, and whether the answer is the bare picture.
    `Accept: */*`, which most clients send, names no format."""
    kinds = [
        each.partition(";")[0].strip() for each in request.headers.get("accept", "").split(",")
    ]
    named = [format for format, kind in MEDIA.items() if kind in kinds]
    if "application/json" in kinds or not (named or "image/*" in kinds):
        return asked, False
    accept = f"with Accept: {request.headers['accept'][:100]}"
    if asked.n not in (None, 1):
        raise errors.invalid("n", f"n must be 1 {accept}, got {asked.n}")
    if asked.output_format is not None and named and asked.output_format not in named:
        needed = f"must be {' or '.join(named)} {accept}"
        raise errors.invalid(
            "output_format", f"output_format {needed}, got {asked.output_format!r}"
        )
    for field in ("stream", "response_format"):
        if getattr(asked, field):
            raise errors.invalid(field, f"{field} must be left out {accept}")
    format = asked.output_format or (named[0] if named else "png")
    return asked.model_copy(update={"output_format": format}), True


def reply_of(
    asked: ImageRequest, size: str, done: Sequence[Done], urls: Sequence[str] | None = None
) -> ImagesResponse:
    """Make the answer; without URLs the pictures must be filled in."""
    return ImagesResponse(
        created=int(time.time()),
        data=[
            ImageData(
                b64_json=None if urls else "",
                url=urls[index] if urls else None,
                revised_prompt=asked.prompt if asked.expand_prompt else None,
                flagged=each.is_flagged or None,
                seed=each.params.seed or 0,
                timings={name: round(seconds, 6) for name, seconds in each.timings.items()},
                deep_steps=each.deep_steps,
                shallow_steps=each.shallow_steps,
            )
            for index, each in enumerate(done)
        ],
        output_format=asked.format,
        size=size,
        quality=asked.effective_quality,
        model=done[0].model,
        usage=Usage.of(sum(picture.prompt_tokens for picture in done)),
        safety_identifier=asked.identifier,
    )


async def stream_pictures(
    asked: ImageRequest, orders: Sequence[ImageOrder], backend: ImageBackend
) -> Response:
    previews = Counter[int]()

    def describe(index: int, update: Update) -> bytes:
        match update:
            case ImageProgress():
                return progress_event(asked, index, update)
            case Preview():
                number, previews[index] = previews[index], previews[index] + 1
                return partial_event(asked, size(orders[index]), index, number, update)
            case Done():
                return completed_event(asked, size(orders[index]), index, update)
            case Queued():
                return b""

    updates = fan_out(backend, orders, orders[0].deadline_s)
    return await stream(updates, len(orders), Queued, describe, error_event)


def marks_of(request: Request, model: ImageModel) -> dict[str, Any]:
    """Return an order's fields that follow from the HTTP request: its id, trace and client."""
    client, weight = client_of(request, model.settings.client_header)
    return {
        "request_id": request.state.request_id,
        "trace": str(getattr(request.state, "trace", "")),
        "client": client,
        "weight": weight,
    }


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
    """Return the pictures in the order of `orders`."""
    done: dict[int, Done] = {}
    async with aclosing(fan_out(backend, orders, orders[0].deadline_s)) as updates:
        async for index, update in updates:
            if isinstance(update, Done):
                done[index] = update
    return [done[index] for index in sorted(done)]


def size(order: ImageOrder) -> str:
    return "{}x{}".format(*order.result_size)


# -- events of a stream, in OpenAI's format ------------------------------------------------------


def partial_event(
    request: ImageRequest, size: str, image: int, number: int, update: Preview
) -> bytes:
    return wire(
        _picture("partial_image", request, size, image)
        | {"partial_image_index": number, "step": update.step},
        update.image,
    )


def completed_event(request: ImageRequest, size: str, image: int, done: Done) -> bytes:
    return wire(
        _picture("completed", request, size, image)
        | ({"safety_identifier": request.identifier} if request.identifier else {})
        | ({"revised_prompt": request.prompt} if request.expand_prompt else {})
        | ({"flagged": True} if done.is_flagged else {})
        | {
            "model": done.model,
            "usage": Usage.of(done.prompt_tokens).model_dump(),
            "seed": done.params.seed,
            "timings": done.timings,
        },
        done.image,
    )


def progress_event(request: ImageRequest, image: int, update: ImageProgress) -> bytes:
    return wire(
        {
            "type": f"{request.kind}.progress",
            "image_index": image,
            "step": update.step,
            "steps": update.steps,
            "queue_position": update.position,
            "eta_s": round(update.eta_s, 3),
        }
    )


def error_event(problem: Problem) -> bytes:
    return wire({"type": "error", **problem.body()})


def wire(event: dict[str, Any], *files: bytes) -> bytes:
    """Return the event with its empty `b64_json` filled."""
    return server_event(filled(json.dumps(event).encode(), files), event["type"])


def _picture(event: str, request: ImageRequest, size: str, image: int) -> dict[str, Any]:
    return {
        "type": f"{request.kind}.{event}",
        "b64_json": "",
        "created_at": int(time.time()),
        "size": size,
        "quality": request.effective_quality,
        "background": "opaque",
        "output_format": request.format,
        "image_index": image,
    }
