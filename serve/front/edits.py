"""`POST /v1/images/edits`: an image and a mask, checked and brought to size, and then an order like
any other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from sdxl.params import InvalidParams, of_rest
from sdxl.source import GivenImage, SourceImage
from serve import errors
from serve.front.decoding import DecodingThread
from serve.front.generations import Generations
from serve.front.image_orders import check_limits, params_of, served_sizes
from serve.front.openai_edits import EditAsked, EditRequest, read_edit
from serve.front.openai_images import ImageRequest
from serve.orders import ModelCard
from serve.settings import ServeSettings

R = TypeVar("R", bound=ImageRequest)


@dataclass
class Edits:
    generations: Generations
    decoding: DecodingThread

    async def answer(self, request: Request) -> Response:
        asked, source = await self._read(request)
        return await self.generations.answer(asked, request, source)

    async def _read(self, request: Request) -> tuple[EditRequest, SourceImage]:
        """The files are let go here: an answer may take long."""
        sent = await read_edit(request)
        model = self.generations.models.choose(sent.request.model)
        card = await model.backend.card()
        check_can_edit(card)
        check_limits(sent.request, card, model.settings)
        return await self.decoding.run(partial(read_images, sent, card, model.settings))


def read_images(
    sent: EditAsked, card: ModelCard, settings: ServeSettings
) -> tuple[EditRequest, SourceImage]:
    try:
        return prepared(sent.request, GivenImage.read(sent.image, sent.mask), card, settings)
    except InvalidParams as error:
        raise errors.of_params(error) from None


def prepared(
    asked: R, given: GivenImage, card: ModelCard, settings: ServeSettings
) -> tuple[R, SourceImage]:
    """The request with all that it leaves open filled, and its image at its size. Raises
    InvalidParams."""
    if asked.size in (None, "auto"):
        width, height = given.size(card.sizes, is_part=asked.mask_padding is not None)
        asked = asked.model_copy(update={"size": f"{width}x{height}"})
    params = params_of(asked, card, settings, given.edit_strength)
    params = given.sized(params, served_sizes(card, settings))
    fields = {each.client_name: None for each in of_rest()} | params.as_rest()
    return asked.model_copy(update=fields), given.source(params)


def check_can_edit(card: ModelCard) -> None:
    if not card.can_edit:
        message = "This model's engines have no encoder for images; export and build them anew."
        raise errors.Problem(501, message, None, "edits_unavailable")
