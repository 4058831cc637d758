"""The events of a streamed request, as OpenAI's clients read them, and their text on the wire."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from serve.errors import Problem
from serve.front.openai_images import ImageRequest, Usage
from serve.orders import Done, Preview, Progress

PARTIAL = "image_generation.partial_image"
COMPLETED = "image_generation.completed"
PROGRESS = "image_generation.progress"


def b64(file: bytes) -> str:
    return base64.b64encode(file).decode("ascii")


def partial(request: ImageRequest, size: str, image: int, number: int, update: Preview) -> str:
    return wire(
        _picture(PARTIAL, request, size, image, update.image)
        | {"partial_image_index": number, "step": update.step}
    )


def completed(request: ImageRequest, size: str, image: int, done: Done) -> str:
    return wire(
        _picture(COMPLETED, request, size, image, done.image)
        | ({"revised_prompt": request.prompt} if request.expand_prompt else {})
        | {
            "usage": Usage.of([done]).model_dump(),
            "seed": done.params.seed,
            "timings": done.timings,
        }
    )


def progress(image: int, update: Progress) -> str:
    return wire(
        {
            "type": PROGRESS,
            "image_index": image,
            "step": update.step,
            "steps": update.steps,
            "queue_position": update.position,
            "eta_s": round(update.eta_s, 3),
        }
    )


def failure(problem: Problem) -> str:
    return wire({"type": "error", **problem.body()})


def wire(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _picture(
    kind: str, request: ImageRequest, size: str, image: int, file: bytes
) -> dict[str, Any]:
    return {
        "type": kind,
        "b64_json": b64(file),
        "created_at": int(time.time()),
        "size": size,
        "quality": request.effective_quality,
        "background": "opaque",
        "output_format": request.format,
        "image_index": image,
    }
