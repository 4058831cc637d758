"""The service's image models: their names and settings, and the choice for a request.

An operator gives aliases to models because many programs have built-in names such as gpt-image-1.
No model is loaded here. It knows no HTTP server.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TypeVar

from sdxl.model_names import MINI_NAMES, name_of
from sdxl.params import InvalidParams
from sdxl.suggestions import did_you_mean
from serve.errors import Problem
from serve.llm.names import id_of
from serve.settings import ServeSettings

DEPLOYMENT = "ImageReplica"


@dataclass(frozen=True)
class ImageModel:
    id: str
    settings: ServeSettings
    """the service's settings, overridden by this model's"""

    @cached_property
    def names(self) -> set[str]:
        return names_of(self.id, self.settings)

    @property
    def deployment(self) -> str:
        """The name of its Ray Serve deployment."""
        return f"{DEPLOYMENT}-{plain(self.id)}"


M = TypeVar("M", bound=ImageModel)


def image_models(settings: ServeSettings) -> tuple[ImageModel, ...]:
    """Return the models; the first is the default. Raises InvalidParams if a name is missing or
    ambiguous."""
    models = tuple(ImageModel(name_of(each.model_name), each) for each in settings.of_models)
    ids = [model.id for model in models]
    if settings.llm != "none":
        ids.append(id_of(settings.llm))
    for name, count in Counter(map(plain, ids)).items():
        if count > 1:
            raise InvalidParams("model", name, "must be unique: rename one folder")
    for alias, target in settings.alias_table.items():
        if not any(target in own_names(id_) for id_ in ids):
            needed = f"must name one of {', '.join(ids)} for {alias!r}"
            raise InvalidParams("aliases", target, needed)
        if any(alias in own_names(id_) for id_ in ids):
            raise InvalidParams("aliases", alias, "must not be the name of a model")
    return models


def deployment_names(models: Sequence[ImageModel]) -> list[str]:
    """Name the deployments of Ray Serve. The first name does not depend on the model, so that
    another default model is rolled out replica by replica."""
    return [DEPLOYMENT, *(model.deployment for model in models[1:])]


def plain(id_: str) -> str:
    """Return a name that Ray takes. Different models have different names."""
    name = re.sub(r"[^\w.+-]", "-", id_, flags=re.ASCII)
    return name if name == id_ else f"{name}-{sha256(id_.encode()).hexdigest()[:8]}"


def choose(asked: str | None, models: Sequence[M]) -> M:
    """Return the named model, or raise Problem 404."""
    if asked is None:
        return models[0]
    for model in models:
        if asked in model.names:
            return model
    raise unknown(asked, [model.id for model in models])


def own_names(id_: str) -> set[str]:
    return {id_, *(MINI_NAMES if id_ in MINI_NAMES else ())}


def names_of(id_: str, settings: ServeSettings) -> set[str]:
    own = own_names(id_)
    return own | {alias for alias, target in settings.alias_table.items() if target in own}


def check_model(asked: str | None, id_: str, settings: ServeSettings) -> None:
    """Raise Problem 404 for another model's name."""
    if asked is not None and asked not in names_of(id_, settings):
        raise unknown(asked, [id_])


def unknown(asked: str, ids: Sequence[str]) -> Problem:
    here = f"here {'is' if len(ids) == 1 else 'are'} {', '.join(map(repr, ids))}"
    message = f"The model {asked[:100]!r} does not exist; {here}{did_you_mean(asked, ids) or '.'}"
    return Problem(404, message, "model", "model_not_found")
