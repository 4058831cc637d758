"""Requests sent through `litellm`; test_litellm.py judges the answers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import litellm

from tests.serve.service.clients.reports import Call, report

SDXL, LLM = "openai/sdxl-mini", "openai/mini-llm"
TURNS = [{"role": "user", "content": "a red circle"}]
SEEDED = {"prompt": "a green star", "seed": 5, "steps": 4, "deadline_s": 300}


def pictures(answer: Any) -> list[str]:
    return [each.b64_json for each in answer.data]


def calls(url: str, folder: Path) -> dict[str, Call]:
    common: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    sdxl, llm = {"model": SDXL, **common}, {"model": LLM, "messages": TURNS, **common}

    def generate(**asked: Any) -> Any:
        return litellm.image_generation(**{**sdxl, **SEEDED, **asked})

    def edit(**asked: Any) -> list[str]:
        with (folder / "image.png").open("rb") as image, (folder / "mask.png").open("rb") as mask:
            files = {"image": image, "mask": mask}
            return pictures(litellm.image_edit(**{**sdxl, **SEEDED, **files, **asked}))

    def stream() -> list[str]:
        chunks = litellm.completion(**llm, temperature=0, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    return {
        "generate": lambda: pictures(generate(n=2, size="128x96", quality="low", user="me")),
        "generate again": lambda: pictures(generate(size="128x96", quality="low")),
        "webp": lambda: pictures(generate(output_format="webp")),
        "usage": lambda: generate().usage.model_dump(),
        "asynchronous": lambda: pictures(asyncio.run(litellm.aimage_generation(**sdxl, **SEEDED))),
        "edit": lambda: edit(n=2, size="128x128", deep_steps="0,2"),
        "chat": lambda: litellm.completion(**llm, temperature=0).choices[0].message.content,
        "chat stream": stream,
        "size": lambda: pictures(generate(size="100x100")),
        "model": lambda: pictures(generate(model="openai/dall-e-2")),
        "deadline": lambda: pictures(generate(deadline_s=0.001)),
        "not a picture": lambda: edit(image=b"<svg/>"),
    }


if __name__ == "__main__":
    report(calls(sys.argv[1], Path(sys.argv[2])))
