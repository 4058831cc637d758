"""Routes for the web page's form, besides `/v1/models`: facts about a prompt, a ControlNet's map
after preprocessing, other programs' settings, and example prompts with pictures.
"""

from __future__ import annotations

import asyncio
import base64
from contextvars import Context
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field
from starlette.responses import Response

from sdxl.controls import Control
from sdxl.infotext import read_metadata
from sdxl.model_names import MINI_NAME
from serve.errors import invalid
from serve.front.generations import collect
from serve.front.image_orders import check_characters, orders_of
from serve.front.openai_images import ImageRequest, Reply, RequestModel
from serve.front.pictures import PicturesResponse
from serve.front.sent_pictures import DATA_URL_ONLY, DecodingThread, file_in, preview_of
from serve.front.served_models import ServedModel, ServedModels

EMBEDDED = (
    "a red circle on a blue background",
    "a yellow star on a black background",
    "two white squares on a purple background",
    "a green triangle on a white background",
    "a purple ring on a yellow background",
    "an orange cross on a green background",
)
"""One prompt for each shape. Their pictures are made once and are not a selection."""
ANY = (
    "a lighthouse at dusk, waves against the rocks, oil painting",
    "a bowl of lemons by a window, morning light, photograph",
    "macro photograph of a beetle on a fern, shallow depth of field",
)
"""Prompts without pictures, for any other model."""
SEED = 1
DEADLINE_S = 300.0
"""Deadline of all example pictures; after a failure the next request tries again."""
MAPS_PATH = "/v1/images/maps"
MORE = 40
"""Number of further prompts for the embedded model."""


class PromptAsked(RequestModel):
    prompt: str
    model: Annotated[str | None, Field(description="without it, the first")] = None


class PromptAnswer(Reply):
    tokens: int
    """number of the text's tokens, by the tokenizer that counts more"""
    max_tokens: int
    """limit of a prompt; also of a negative prompt"""
    unknown_words: tuple[str, ...]
    """words that the embedded model does not know; empty for other models"""


class MapAsked(RequestModel):
    """Fields of an entry of `controls`."""

    image: Annotated[str, Field(description=DATA_URL_ONLY)]
    preprocess: str
    low: int = Control.low
    high: int = Control.high


class MapAnswer(Reply):
    b64_json: str
    """a PNG"""


class SettingsAsked(RequestModel):
    """Texts in the metadata of a picture of another program."""

    parameters: Annotated[str, Field(description="stable-diffusion-webui's")] = ""
    prompt: Annotated[str, Field(description="ComfyUI's graph, as JSON")] = ""


class SettingsAnswer(Reply):
    params: dict[str, Any]
    """by their names in the metadata of this service's pictures"""
    unread: list[str]
    """settings that have no parameter here"""


class ExamplePicture(Reply):
    prompt: str
    seed: int | None = None
    b64_json: str | None = None
    """the PNG of prompt and seed; from the embedded model only"""


class ExamplesResponse(Reply):
    data: list[ExamplePicture]


PicturesWithFiles = tuple[list[ExamplePicture], list[bytes]]


def add_form_routes(app: FastAPI, models: ServedModels, decoding: DecodingThread) -> None:
    examples = Examples()

    @app.post("/v1/images/prompts")
    async def examine_prompt(body: PromptAsked) -> PromptAnswer:
        """Count a prompt's tokens before it is sent."""
        model = await models.choose(body.model)
        check_characters("prompt", body.prompt, model.settings)
        facts = await model.backend.examine(body.prompt)
        return PromptAnswer(
            tokens=facts.tokens, max_tokens=facts.most_tokens, unknown_words=facts.unknown_words
        )

    @app.post(MAPS_PATH)
    async def show_map(body: MapAsked) -> MapAnswer:
        """Preprocess a picture as a ControlNet's map."""
        file = file_in(body.image, "image")
        fields = {"preprocess": body.preprocess, "low": body.low, "high": body.high}
        png = await decoding.run(partial(preview_of, file, **fields))
        return MapAnswer(b64_json=base64.b64encode(png).decode())

    @app.post("/v1/images/settings")
    async def read_settings(body: SettingsAsked) -> SettingsAnswer:
        """Read the settings of a picture of stable-diffusion-webui or ComfyUI."""
        try:
            infotext = read_metadata(body.model_dump(exclude_unset=True))
        except ValueError:
            raise invalid("parameters", "parameters must name a prompt") from None
        nets = [each["name"] for each in infotext.params.pop("controls", ())]
        unread = [f"ControlNet {name}, whose map a picture does not hold" for name in nets]
        return SettingsAnswer(params=infotext.params, unread=[*infotext.unread, *unread])

    @app.get("/v1/images/examples", response_model=ExamplesResponse)
    async def show_examples(model: str | None = None) -> Response:
        """Example prompts, with pictures for the embedded model."""
        data, files = await examples.of(await models.choose(model))
        text = ExamplesResponse(data=data).model_dump_json(exclude_none=True).encode()
        return PicturesResponse(text, files)


class Examples:
    """Each model's examples, made once, with the pictures' files."""

    def __init__(self) -> None:
        self._making: dict[str, asyncio.Task[PicturesWithFiles]] = {}

    async def of(self, model: ServedModel) -> PicturesWithFiles:
        """Return the model's examples. After a Problem the next request tries again."""
        if model.id != MINI_NAME:
            return [ExamplePicture(prompt=prompt) for prompt in ANY], []
        making = self._making.get(model.id)
        if making is None or (making.done() and (making.cancelled() or making.exception())):
            # In a new context: in this request's, Ray Serve would cancel the pictures with this
            # request, but other requests wait for them too.
            making = asyncio.create_task(make_examples(model), context=Context())
            self._making[model.id] = making
        return await asyncio.shield(making)


async def make_examples(model: ServedModel) -> PicturesWithFiles:
    card = await model.backend.card()
    requests = (ImageRequest(prompt=prompt, seed=SEED, priority="batch") for prompt in EMBEDDED)
    orders = [o for r in requests for o in orders_of(r, card, model.settings, SEED, DEADLINE_S)]
    done = await collect(model.backend, orders)
    examples = [
        ExamplePicture(prompt=each.params.prompt, seed=each.params.seed, b64_json="")
        for each in done
    ]
    others = await asyncio.to_thread(captions)
    examples += [ExamplePicture(prompt=prompt) for prompt in others]
    return examples, [each.image for each in done]


def captions() -> list[str]:
    """Captions of scenes that the embedded model knows."""
    # Imported here, since front ends of other models do not need NumPy.
    import numpy as np

    from sdxl.mini import scenes

    rng = np.random.default_rng(SEED)
    return [scenes.caption(scenes.sample_scene(rng)) for _ in range(MORE)]
