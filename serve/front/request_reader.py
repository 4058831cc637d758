"""Reads and checks a request for pictures before it is queued: its model, limits and files.

A job's request is read when it arrives, and again when it runs. It knows no routes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from sdxl.control_maps import Pictures
from sdxl.source import SourceImage
from serve.front.edits import SentEdit, check_can_edit, checked, of_json, read_images
from serve.front.image_orders import check_limits, check_plain, orders_of
from serve.front.openai_images import ImageRequest
from serve.front.sent_pictures import DecodingThread, has_pictures, read_attached
from serve.front.served_models import ServedModel, ServedModels
from serve.orders import ImageOrder, ModelCard


@dataclass(frozen=True)
class CheckedRequest:
    """A request, its model, and its decoded files."""

    request: ImageRequest
    model: ServedModel
    card: ModelCard
    source: SourceImage | None = None
    """the image of an edit"""
    maps: Pictures = field(default_factory=dict)
    """pictures of ControlNets and image prompts"""

    def orders(self, seed: int, deadline_s: float, marks: Mapping[str, Any]) -> list[ImageOrder]:
        """Return the orders. Raises Problem if the service or its model refuse the request."""
        orders = orders_of(self.request, self.card, self.model.settings, seed, deadline_s)
        files: dict[str, Any] = {"source": self.source, "maps": self.maps}
        return [replace(order, **marks, **files) for order in orders]


@dataclass
class RequestReader:
    models: ServedModels
    decoding: DecodingThread

    async def read(self, sent: ImageRequest | SentEdit, until_s: float = inf) -> CheckedRequest:
        """`until_s`: when its pictures must be decoded. Raises Problem."""
        if isinstance(sent, SentEdit):
            return await self._read_edit(sent, until_s)
        asked = sent
        check_plain(asked)
        model, card = await self._model(asked)
        if not has_pictures(asked):
            return CheckedRequest(asked, model, card)
        read = partial(read_attached, asked, card, model.settings)
        asked, maps = await self.decoding.run(read, until_s)
        return CheckedRequest(asked, model, card, maps=maps)

    async def _read_edit(self, sent: SentEdit, until_s: float) -> CheckedRequest:
        model, card = await self._model(sent.request)
        check_can_edit(card)
        check_limits(sent.request, card, model.settings)
        read = partial(read_images, sent, card, model.settings)
        asked, source, maps = await self.decoding.run(read, until_s)
        return CheckedRequest(asked, model, card, source, maps)

    async def read_json(self, body: bytes) -> CheckedRequest:
        """Read a body; with `images` it is an edit."""
        if "images" in fields_of(body):
            return await self.read(of_json(body))
        return await self.read(checked(ImageRequest, body))

    async def _model(self, asked: ImageRequest) -> tuple[ServedModel, ModelCard]:
        model = await self.models.choose(asked.model)
        return model, await model.backend.card()


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object; empty for other texts, which `checked` refuses."""
    try:
        fields = json.loads(body)
    except (RecursionError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
