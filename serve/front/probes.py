"""What operators' tools ask of a service by the names that other inference services gave it: is it
alive, is it ready, what is it, which licence has it.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import FastAPI

import sdxl
from serve.front.openai_images import Reply
from serve.front.served_models import ServedModels

PACKAGE, LICENSE = "sdxl-deepcache", "Apache-2.0"
LIVE, READY = "/v1/health/live", "/v1/health/ready"
API = "1"


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


def add_probe_routes(app: FastAPI, models: ServedModels) -> None:
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
        """Which models there are, and what computes them."""
        infos = [ModelInfo(shortName=m.id, engines=c.engines) for m, c in await models.cards()]
        return Metadata(version=sdxl.__version__, modelInfo=infos)

    @app.get("/v1/license")
    async def tell_license() -> License:
        text = license_text()
        data = text.encode()
        digest = hashlib.sha256(data).hexdigest()
        return License(name=LICENSE, sha=digest, size=len(data), content=text)


def license_text() -> str:
    """As it was installed with the package."""
    for file in metadata.files(PACKAGE) or ():
        if file.name == "LICENSE" and file.parts[0] != "serve":
            return Path(str(file.locate())).read_text(encoding="utf-8")
    return f"{LICENSE}; https://www.apache.org/licenses/LICENSE-2.0"
