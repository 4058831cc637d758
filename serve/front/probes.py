"""Routes for operators and their tools: liveness, readiness, metrics, version and licence, under
the names that other inference services also use.
"""

from __future__ import annotations

import hashlib
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

import sdxl
from serve.errors import Problem
from serve.front import metrics
from serve.front.error_envelope import LIVE, READY, Front
from serve.front.openai_images import Reply, RunningEngines
from serve.front.served_models import ServedModels
from serve.llm.text_orders import TextBackend
from serve.orders import ModelCard

PACKAGE, LICENSE = "sdxl-deepcache", "Apache-2.0"
API = "1"
STARTING = "starting"


class Health(Reply):
    object: str = "health.response"
    message: str
    status: str


class Version(Reply):
    release: str
    api: str = API


class ModelInfo(Reply):
    shortName: str
    engines: dict[str, Any]


class Metadata(Reply):
    version: str
    modelInfo: list[ModelInfo]


class License(Reply):
    name: str
    type: str = "file"
    sha: str
    size: int
    content: str
    note: str = "of this program; the model's weights have a licence of their own"


class Readiness:
    """The language model's state. The service is ready when the model has started or failed."""

    def __init__(self, text: TextBackend, start_s: float) -> None:
        self._text = text
        self._until_s, self._has_started = time.monotonic() + start_s, False

    async def state(self) -> str:
        """Return `ready` or `unavailable`, or raise Problem 503 while it may still start."""
        try:
            await self._text.card()
        except Problem as problem:
            is_first = not self._has_started and time.monotonic() < self._until_s
            if is_first and problem.code == STARTING:
                raise
            self._has_started = True
            return "unavailable"
        self._has_started = True
        return "ready"


def add_probe_routes(
    app: FastAPI,
    models: ServedModels,
    front: Front,
    text: TextBackend | None,
    llm_start_s: float,
) -> None:
    readiness = Readiness(text, llm_start_s) if text else None

    @app.get("/healthz")
    async def is_alive() -> dict[str, str]:
        """This process answers."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def is_ready() -> dict[str, Any]:
        """A real picture was made, and more can be. Every model has started or failed."""
        each = await models.ready()
        cards = [(model.id, card) for model, card in each if isinstance(card, ModelCard)]
        first, engines = cards[0][0], RunningEngines.of(cards[0][1])
        # The models that run on slower engines than their GPU allows, and why.
        slower = {id_: card.why_slower for id_, card in cards if card.why_slower}
        return {
            "status": "ready",
            "model": first,
            "backend": engines.backend,
            "precision": engines.precision,
            "models": {
                model.id: "unavailable" if isinstance(card, Problem) else "ready"
                for model, card in each
            },
            **({"slower": slower} if slower else {}),
            **({"llm": await readiness.state()} if readiness else {}),
        }

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "for Prometheus"}},
    )
    async def show_metrics() -> Response:
        texts = await text.metrics() if text else []
        page = metrics.page([*await models.metrics(), *texts, *await front.metrics_of_all()])
        return Response(page, media_type="text/plain; version=0.0.4")

    @app.get(LIVE)
    async def is_live() -> Health:
        """This process answers."""
        return Health(message="Service is live.", status="live")

    @app.get(READY)
    async def is_ready_for_pictures() -> Health:
        """A picture was made, and more can be."""
        await models.ready()
        return Health(message="Service is ready.", status="ready")

    @app.get("/v1/version")
    async def tell_version() -> Version:
        return Version(release=sdxl.__version__)

    @app.get("/v1/metadata")
    async def tell_metadata() -> Metadata:
        """The models, and the engines that run them."""
        infos = [ModelInfo(shortName=m.id, engines=c.engines) for m, c in await models.cards()]
        return Metadata(version=sdxl.__version__, modelInfo=infos)

    @app.get("/v1/license")
    async def tell_license() -> License:
        text = license_text()
        data = text.encode()
        digest = hashlib.sha256(data).hexdigest()
        return License(name=LICENSE, sha=digest, size=len(data), content=text)


def license_text() -> str:
    """Return the licence that was installed with the package."""
    for file in metadata.files(PACKAGE) or ():
        if file.name == "LICENSE" and file.parts[0] != "serve":
            return Path(str(file.locate())).read_text(encoding="utf-8")
    return f"{LICENSE}; https://www.apache.org/licenses/LICENSE-2.0"
