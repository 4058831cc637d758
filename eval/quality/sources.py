"""Sources of pictures: engines in this process, a folder, a service. LoadGen's log is in
accuracy_log.py. A source returns pictures by index, so memory holds one chunk. It checks its input
when it is made.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from PIL import Image

from eval.quality.task import QualityTask
from eval.service.client import PICTURE_S, http_client
from sdxl.handover import in_threads
from sdxl.images import Pixels, to_pixels
from sdxl.params import GenerationParams, InvalidParams

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
AT_ONCE = 16
"""concurrent requests to a service that does not publish a limit"""


class NoPicture(RuntimeError):
    """A picture could not be made."""


class Source(Protocol):
    def describe(self) -> dict[str, Any]:
        """The source's identity: an evaluation resumes only with an equal identity."""

    def pictures(self, indices: Sequence[int]) -> list[Pixels]: ...


class Painted:
    """Pictures made by engines in this process. A chunk is made whole and in order, so a resumed
    run has the same batches and the same rounding."""

    def __init__(self, pipeline: Pipeline, requests: Sequence[GenerationParams]) -> None:
        self.pipeline, self.requests = pipeline, requests

    def describe(self) -> dict[str, Any]:
        shown = self.pipeline.engines.description
        facts = {name: shown.get(name) for name in ("backend", "precision", "device")}
        digest = self.pipeline.checkpoint.digest
        request = {k: v for k, v in self.requests[0].as_dict().items() if k != "prompt"}
        cut = self.pipeline.engines.cut
        return {"model": self.pipeline.origin, "digest": digest, "cut": cut, **facts, **request}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        pictures = []
        results = self.pipeline.generate(self.requests[i] for i in indices)
        for index, result in zip(indices, results, strict=True):
            if result.image is None:
                raise NoPicture(f"picture {index}: {result.error}") from result.error
            pictures.append(to_pixels(result.image))
        return pictures


class Folder:
    """Picture files in the order of their names."""

    is_stored = True

    def __init__(self, folder: Path, task: QualityTask) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise InvalidParams("images", str(folder), "must be a folder of pictures")
        files = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)
        if len(files) < len(task.captions):
            refuse_count("images", folder, len(files), len(task.captions))
        self.files = files[: len(task.captions)]
        for file in self.files:
            self._check(file, task.side)

    def describe(self) -> dict[str, Any]:
        return {"folder": str(self.folder.resolve()), "stamp": stamp_of(self.files)}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        return [read_picture(self.files[index]) for index in indices]

    def _check(self, file: Path, side: int) -> None:
        try:
            with Image.open(file) as image:
                size = image.size
        except OSError as error:
            raise InvalidParams("images", str(file), f"must be an image ({error})") from error
        if size != (side, side):
            shown = f"{file} of {size[0]}×{size[1]}"
            raise InvalidParams("images", shown, f"must be {side}×{side}")


class Service:
    """Pictures of a running service, over HTTP."""

    def __init__(self, url: str, requests: Sequence[GenerationParams]) -> None:
        self.url, self.requests = url.rstrip("/"), requests

    def describe(self) -> dict[str, Any]:
        running = self._model.get("engines", {})
        facts = {name: running.get(name) for name in ("backend", "precision")}
        return {"url": self.url, "model": self._model.get("id"), **facts}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        with http_client(self.url, self.at_once) as http:
            requests = [self.requests[i] for i in indices]
            return list(in_threads(partial(request_picture, http), requests, self.at_once))

    @property
    def at_once(self) -> int:
        return concurrent_pictures(self._model)

    @cached_property
    def _model(self) -> dict[str, Any]:
        with http_client(self.url) as http:
            return first_image_model(http)


def first_image_model(http: Any) -> dict[str, Any]:
    """The first image model in the service's list, which is its default; empty if there is none."""
    answer = http.get("/v1/models")
    models = answer.json().get("data", []) if answer.status_code == 200 else []
    return next((model for model in models if model.get("images")), {})


def concurrent_pictures(model: dict[str, Any]) -> int:
    """The number of concurrent pictures that the service recommends."""
    return int(model.get("images", {}).get("at_once") or AT_ONCE)


def request_picture(http: Any, request: GenerationParams) -> Pixels:
    """Request one picture. A request refused with 429 is repeated after Retry-After, but not after
    PICTURE_S, because a service that is too slow for any deadline also refuses with 429."""
    body, until_s = {**request.as_rest(), "deadline_s": 120.0}, time.perf_counter() + PICTURE_S
    while True:
        answer = http.post("/v1/images/generations", json=body)
        wait_s = float(answer.headers.get("retry-after", 1))
        if answer.status_code != 429 or time.perf_counter() + wait_s > until_s:
            break
        time.sleep(wait_s)
    if answer.status_code != 200:
        message = " ".join(answer.text.split())[:200]
        raise NoPicture(f"{http.base_url} answered {answer.status_code}: {message}")
    return read_picture(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))


def read_picture(file: Path | BinaryIO) -> Pixels:
    with Image.open(file) as image:
        return np.array(image.convert("RGB"))


def stamp_of(files: Iterable[Path]) -> str:
    """A digest that changes when a file is rewritten."""
    stamps = [(file.name, (at := file.stat()).st_size, at.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def refuse_count(field: str, place: Path, count: int, needed: int) -> None:
    shown = f"{place} with {count} pictures"
    raise InvalidParams(field, shown, f"must hold one picture for each of the {needed} captions")
