"""By which names a client may ask for a model: its own, and those that the operator gave it.

Many programs have names such as gpt-image-1 built in. It knows no HTTP server.
"""

from __future__ import annotations

from sdxl.checkpoint import MINI_NAMES
from serve.errors import Problem
from serve.settings import ServeSettings


def names_of(model: str, settings: ServeSettings) -> set[str]:
    own = {model, *(MINI_NAMES if model in MINI_NAMES else ())}
    return own | {alias for alias, target in settings.alias_table.items() if target in own}


def check_model(asked: str | None, model: str, settings: ServeSettings) -> None:
    """Raises Problem, 404, for a name that is not the model's."""
    if asked is None or asked in names_of(model, settings):
        return
    message = f"The model {asked[:100]!r} does not exist; here is {model!r}."
    raise Problem(404, message, "model", "model_not_found")
