"""Where the pictures of an evaluation come from: engines here, a folder, a service (or LoadGen's
accuracy log, which has a module of its own). Each is asked for pictures by number, a chunk at a
time, so none holds all of them, and each checks what it can before anything is computed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eval.quality.task import QualityTask
from eval.service import api_key
from sdxl.handover import in_threads
from sdxl.images import Pixels, to_pixels
from sdxl.params import GenerationParams, InvalidParams

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
AT_ONCE = 16
"""requests under way at a service that does not say how many it takes"""
TIMEOUT_S = 600.0
"""for one picture, and for refusals of one"""


class NoPicture(RuntimeError):
    """A picture that could not be had: which, and why."""


class Source(Protocol):
    def describe(self) -> dict[str, Any]:
        """What tells this source from another: an evaluation resumes with the same one alone."""

    def pictures(self, indices: Sequence[int]) -> list[Pixels]: ...


class Painted:
    """By engines in this process. A chunk is always painted whole and in the same order, so
    each has the same ones beside it, and the same rounding, after a resume."""

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
        found = []
        for index, result in zip(indices, self._results(indices), strict=True):
            if result.image is None:
                raise NoPicture(f"picture {index}: {result.error}") from result.error
            found.append(to_pixels(result.image))
        return found

    def _results(self, indices: Sequence[int]) -> list[Any]:
        return self.pipeline.generate(self.requests[i] for i in indices)


class Folder:
    """Files in the order of their names."""

    is_stored = True

    def __init__(self, folder: Path, task: QualityTask) -> None:
        self.folder = folder
        files = sorted(p for p in _listed(folder) if p.suffix.lower() in SUFFIXES)
        if len(files) < len(task.captions):
            refuse_count("images", folder, len(files), len(task.captions))
        self.files = files[: len(task.captions)]
        for file in self.files:
            self._check(file, task.side)

    def describe(self) -> dict[str, Any]:
        return {"folder": str(self.folder.resolve()), "stamp": stamp_of(self.files)}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        from PIL import Image

        found = []
        for index in indices:
            with Image.open(self.files[index]) as image:
                found.append(np.array(image.convert("RGB")))
        return found

    def _check(self, file: Path, side: int) -> None:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(file) as image:
                size = image.size
        except (OSError, UnidentifiedImageError) as error:
            raise InvalidParams("images", str(file), f"needed an image ({error})") from error
        if size != (side, side):
            shown = f"{file} of {size[0]}×{size[1]}"
            raise InvalidParams("images", shown, f"needed {side}×{side}")


class Service:
    """A service that is running, over HTTP, as its clients ask."""

    def __init__(self, url: str, requests: Sequence[GenerationParams]) -> None:
        self.url, self.requests = url.rstrip("/"), requests

    def describe(self) -> dict[str, Any]:
        running = self._model.get("engines", {})
        facts = {name: running.get(name) for name in ("backend", "precision")}
        return {"url": self.url, "model": self._model.get("id"), **facts}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        import httpx

        limits = httpx.Limits(max_connections=self.at_once)
        with httpx.Client(
            base_url=self.url, timeout=TIMEOUT_S, headers=api_key.headers(), limits=limits
        ) as http:
            return list(in_threads(lambda i: ask(http, self.requests[i]), indices, self.at_once))

    @property
    def at_once(self) -> int:
        return at_once(self._model)

    @cached_property
    def _model(self) -> dict[str, Any]:
        import httpx

        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=api_key.headers()) as http:
            return image_model(http)


def image_model(http: Any) -> dict[str, Any]:
    """What the service says of the model that a request gets which names none."""
    answer = http.get("/v1/models")
    models = answer.json().get("data", []) if answer.status_code == 200 else []
    return next((model for model in models if model.get("images")), {})


def at_once(model: dict[str, Any]) -> int:
    """Pictures that the service says are best under way."""
    return int(model.get("images", {}).get("at_once") or AT_ONCE)


def ask(http: Any, request: GenerationParams) -> Pixels:
    """One picture of a service; a refusal for lack of room is asked again when it says. Not for
    ever: a service too slow for any deadline refuses in the same words."""
    body, until_s = {**request.as_rest(), "deadline_s": 120.0}, time.perf_counter() + TIMEOUT_S
    while True:
        answer = http.post("/v1/images/generations", json=body)
        wait_s = float(answer.headers.get("retry-after", 1))
        if answer.status_code != 429 or time.perf_counter() + wait_s > until_s:
            break
        time.sleep(wait_s)
    if answer.status_code != 200:
        message = " ".join(answer.text.split())[:200]
        raise NoPicture(f"{http.base_url} answered {answer.status_code}: {message}")
    return from_base64(answer.json()["data"][0]["b64_json"])


def from_base64(text: str) -> Pixels:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.array(image.convert("RGB"))


def _listed(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InvalidParams("images", str(folder), "needed a folder of pictures")
    return list(folder.iterdir())


def stamp_of(files: Iterable[Path]) -> str:
    """Another one once a file is written anew."""
    found = [(file.name, (at := file.stat()).st_size, at.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def refuse_count(field: str, place: Path, found: int, needed: int) -> None:
    shown = f"{place} with {found} pictures"
    raise InvalidParams(field, shown, f"needed one for each of the {needed} captions")
