"""The models that an operator loads while the service runs: their files, names and settings.

The files lie below `models_dir`. It knows no Ray and no HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, urlencode

from sdxl.checkpoint_checks import CheckpointError
from sdxl.model_names import name_of
from sdxl.params import InvalidParams
from sdxl.suggestions import did_you_mean
from serve.errors import Problem
from serve.models import ImageModel
from serve.orders import ImageBackend
from serve.settings import ServeSettings

SUFFIX = ".safetensors"
PREFIX = "model-"
"""Prefix of the names of these models' Ray Serve applications."""
MOST_NAME = 150
"""The longest name of an application."""


class ModelPool(Protocol):
    """Loads models onto devices that all front ends share."""

    async def loaded(self) -> Sequence[ImageModel]:
        """Return the models that any front end has loaded."""
        ...

    async def load(self, model: ImageModel) -> None:
        """Load the model; return after its first picture. Raises Problem."""
        ...

    async def unload(self, model: ImageModel) -> None:
        """Unload the model; return when its last picture is made and its memory is free."""
        ...

    def backend(self, model: ImageModel) -> ImageBackend:
        """Return this process's backend of the model."""
        ...

    async def forget(self, model: ImageModel) -> None:
        """Release the backend of a model that another front end unloaded."""
        ...


@dataclass(frozen=True)
class ModelFile:
    """A model below `models_dir`."""

    name: str
    """path below `models_dir`, as clients of stable-diffusion-webui see it"""

    def path(self, folder: str) -> str:
        return str(Path(folder).expanduser() / self.name)

    def is_named(self, asked: str) -> bool:
        plain = self.name.removesuffix(SUFFIX)
        return asked.removesuffix(SUFFIX) in (plain, name_of(plain))


def files_below(folder: str) -> list[ModelFile]:
    """Find folders in diffusers' layout, and single files of SDXL."""
    root = Path(folder).expanduser()
    return [ModelFile(str(path.relative_to(root))) for path in sorted(_paths(root))]


def _paths(root: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(root, followlinks=True):
        if "model_index.json" in files:
            folders.clear()
            yield Path(place)
            continue
        for name in files:
            path = Path(place, name)
            if (
                path.suffix == SUFFIX
                and path.is_file()
                and _is_model(path, path.stat().st_mtime_ns)
            ):
                yield path


@lru_cache(maxsize=4096)
def _is_model(path: Path, _changed_ns: int) -> bool:
    """Check the file's header: LoRAs, among others, have the same suffix."""
    from sdxl.checkpoint import check_files

    try:
        check_files(str(path))
    except CheckpointError:
        return False
    return True


def find_file(folder: str, asked: str) -> ModelFile:
    """Find a model, or raise Problem 404. A name matches only existing files, so that no name leads
    out of the folder."""
    files = files_below(folder)
    for file in files:
        if file.is_named(asked):
            return file
    names = [file.name for file in files]
    here = f"here are {', '.join(map(repr, names))}" if names else "there is none"
    message = f"There is no model {asked[:100]!r} below models_dir; {here}"
    raise Problem(404, message + (did_you_mean(asked, names) or "."), "model", "model_not_found")


def model_of(
    settings: ServeSettings, file: ModelFile, id_: str = "", precision: str = ""
) -> ImageModel:
    """Return the model with its settings; an `id_` becomes an alias of the file's name."""
    path = file.path(settings.models_dir)
    name = name_of(path)
    aliases = settings.aliases
    if id_ and id_ != name:
        aliases = ",".join(filter(None, (aliases, f"{id_}={name}")))
    try:
        changed = replace(
            settings,
            models=(),
            model=path,
            vae="",
            engines="",
            refiner="",
            replicas=1,
            max_replicas=0,
            precision=precision,
            aliases=aliases,
        )
    except InvalidParams as error:
        raise Problem(400, error.message(error.field), error.field, "invalid_value") from None
    return ImageModel(id_ or name, changed)


def application_name(model: ImageModel) -> str:
    """Return a name from which `model_in` makes the model again. Raises Problem."""
    root = Path(model.settings.models_dir).expanduser()
    file = str(Path(model.settings.model).relative_to(root))
    facts = {"id": model.id, "file": file, "precision": model.settings.precision}
    name = PREFIX + urlencode(facts)
    if len(name) > MOST_NAME:
        message = f"model: its path and id must have fewer characters, got {len(name)}"
        raise Problem(400, message, "model", "invalid_value")
    return name


def model_in(settings: ServeSettings, application: str) -> ImageModel:
    facts = dict(parse_qsl(application.removeprefix(PREFIX)))
    return model_of(settings, ModelFile(facts["file"]), facts["id"], facts.get("precision", ""))
