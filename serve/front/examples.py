"""What to begin with: prompts, and of the embedded model what it makes of some of them.

What another model is good at nobody here knows, so of it there are only words. The embedded one
makes its pictures itself, once, in ticks that nobody else needs, and they are not chosen: one
prompt a shape, the first seed.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from dataclasses import dataclass

from sdxl.model_names import MINI_NAME
from serve.front.generations import collect
from serve.front.image_orders import orders_of
from serve.front.openai_images import ImageRequest
from serve.front.served_models import ServedModel

EMBEDDED = (
    "a red circle on a blue background",
    "a yellow star on a black background",
    "two white squares on a purple background",
    "a green triangle on a white background",
    "a purple ring on a yellow background",
    "an orange cross on a green background",
)
ANY = (
    "a lighthouse at dusk, waves against the rocks, oil painting",
    "a bowl of lemons by a window, morning light, photograph",
    "macro photograph of a beetle on a fern, shallow depth of field",
)
SEED = 1
DEADLINE_S = 300.0
"""for all of them; after it, whoever asks next has them tried again"""
MORE = 40
"""further prompts for the embedded model"""


@dataclass(frozen=True)
class Example:
    prompt: str
    seed: int | None = None
    image: bytes | None = None
    """as whoever names only this prompt and this seed gets it"""


class Examples:
    """By model."""

    def __init__(self) -> None:
        self._making: dict[str, asyncio.Task[list[Example]]] = {}

    async def of(self, model: ServedModel) -> list[Example]:
        """Raises Problem; whoever comes after that has them tried again."""
        if model.id != MINI_NAME:
            return [Example(prompt) for prompt in ANY]
        making = self._making.get(model.id)
        if making is None or (making.done() and (making.cancelled() or making.exception())):
            # Whoever leaves meanwhile takes nothing from those who wait as well: in this request's
            # context Ray Serve would cancel the pictures with it.
            making = asyncio.create_task(made(model), context=Context())
            self._making[model.id] = making
        return await asyncio.shield(making)


async def made(model: ServedModel) -> list[Example]:
    card = await model.backend.card()
    asked = (ImageRequest(prompt=prompt, seed=SEED, priority="batch") for prompt in EMBEDDED)
    orders = [o for each in asked for o in orders_of(each, card, model.settings, SEED, DEADLINE_S)]
    done = await collect(model.backend, orders)
    pictures = [Example(d.params.prompt, d.params.seed, d.image) for d in done]
    return pictures + [Example(prompt) for prompt in await asyncio.to_thread(captions)]


def captions() -> list[str]:
    """Of the scenes that the embedded model knows."""
    # Here and not above: a front of another model needs no arrays.
    import numpy as np

    from sdxl.mini import scenes

    rng = np.random.default_rng(SEED)
    return [scenes.caption(scenes.sample_scene(rng)) for _ in range(MORE)]
