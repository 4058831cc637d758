"""What whoever builds a form asks besides `/v1/models`: what there is to say of a prompt before it
is sent, and what the model's pictures look like."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI
from pydantic import Field
from starlette.responses import Response

from serve.front.examples import Examples
from serve.front.image_orders import check_characters
from serve.front.openai_images import Reply, RequestModel
from serve.front.pictures import PicturesResponse
from serve.front.served_models import ServedModels


class PromptAsked(RequestModel):
    prompt: str
    model: Annotated[str | None, Field(description="without it, the first")] = None


class PromptAnswer(Reply):
    tokens: int
    """of the text alone, by whichever of the model's tokenizers finds more"""
    max_tokens: int
    """of a prompt; a negative one may have as many"""
    unknown_words: tuple[str, ...]
    """that mean nothing to the model; known of the embedded one alone"""


class ExamplePicture(Reply):
    prompt: str
    seed: int | None = None
    b64_json: str | None = None
    """a PNG that prompt and seed give; of the embedded model alone"""


class ExamplesResponse(Reply):
    data: list[ExamplePicture]


def add_form_routes(app: FastAPI, models: ServedModels) -> None:
    examples = Examples()

    @app.post("/v1/images/prompts")
    async def examine_prompt(body: PromptAsked) -> PromptAnswer:
        """How long a prompt is, before pictures are asked of it."""
        model = models.choose(body.model)
        check_characters("prompt", body.prompt, model.settings)
        facts = await model.backend.examine(body.prompt)
        return PromptAnswer(
            tokens=facts.tokens, max_tokens=facts.most_tokens, unknown_words=facts.unknown_words
        )

    @app.get("/v1/images/examples", response_model=ExamplesResponse)
    async def show_examples(model: str | None = None) -> Response:
        """Prompts to begin with, and what the embedded model makes of its own."""
        found = await examples.of(models.choose(model))
        data = [
            ExamplePicture(prompt=e.prompt, seed=e.seed, b64_json=None if e.image is None else "")
            for e in found
        ]
        text = ExamplesResponse(data=data).model_dump_json(exclude_none=True).encode()
        return PicturesResponse(text, [each.image for each in found if each.image is not None])
