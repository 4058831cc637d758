"""`POST /v1/images/edits`: an image and a mask, checked and brought to size, and then an order like
any other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from sdxl.params import InvalidParams
from sdxl.source import GivenImage, SourceImage
from serve import errors
from serve.front.generations import Generations
from serve.front.image_orders import check_limits, params_of
from serve.front.openai_edits import EditAsked, EditRequest, read_edit
from serve.orders import ModelCard


@dataclass
class Edits:
    generations: Generations
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Pictures are decoded one at a time: a large one takes a hundred megabytes."""

    async def answer(self, request: Request) -> Response:
        card = await self.generations.backend.card()
        if not card.can_edit:
            message = "This model's engines have no encoder for images; export and build them anew."
            raise errors.Problem(501, message, None, "edits_unavailable")
        asked, source = await self._read(request, card)
        return await self.generations.answer(asked, request, source)

    async def _read(self, request: Request, card: ModelCard) -> tuple[EditRequest, SourceImage]:
        """The files are let go here: an answer may take long."""
        sent = await read_edit(request)
        check_limits(sent.request, card, self.generations.settings)
        async with self._turn:
            return await asyncio.to_thread(self._prepared, sent, card)

    def _prepared(self, sent: EditAsked, card: ModelCard) -> tuple[EditRequest, SourceImage]:
        """The request with its size and strength filled, and its image at that size."""
        settings = self.generations.settings
        try:
            given = GivenImage.read(sent.image, sent.mask)
            asked = sent.request
            if asked.size in (None, "auto"):
                is_part = asked.mask_padding is not None
                width, height = given.size(card.sizes, is_part=is_part)
                asked = asked.model_copy(update={"size": f"{width}x{height}"})
            params = params_of(asked, card, settings)
            params = params.for_edit(has_mask=given.mask is not None)
            source = given.source(params)
        except InvalidParams as error:
            raise errors.of_params(error) from None
        return asked.model_copy(update={"strength": params.strength}), source
