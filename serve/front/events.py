"""The events of a streamed request for pictures, in OpenAI's format."""

from __future__ import annotations

import json
import time
from typing import Any

from serve.errors import Problem
from serve.front.answering import server_event
from serve.front.openai_images import ImageRequest, Usage
from serve.front.pictures import filled
from serve.orders import Done, ImageProgress, Preview

PARTIAL, COMPLETED, PROGRESS = "partial_image", "completed", "progress"
"""The second part of events' names, as in image_generation.completed."""


def partial(request: ImageRequest, size: str, image: int, number: int, update: Preview) -> bytes:
    return wire(
        _picture(PARTIAL, request, size, image)
        | {"partial_image_index": number, "step": update.step},
        update.image,
    )


def completed(request: ImageRequest, size: str, image: int, done: Done) -> bytes:
    return wire(
        _picture(COMPLETED, request, size, image)
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


def progress(request: ImageRequest, image: int, update: ImageProgress) -> bytes:
    return wire(
        {
            "type": f"{request.kind}.{PROGRESS}",
            "image_index": image,
            "step": update.step,
            "steps": update.steps,
            "queue_position": update.position,
            "eta_s": round(update.eta_s, 3),
        }
    )


def failure(problem: Problem) -> bytes:
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
