"""The flags of commands that load a model: the model and its backend."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from engines import BACKENDS, CONTROLNETS, FOLDER, IP_ADAPTERS, LORAS, PRECISION
from sdxl.arguments import MODEL, UNCHECKED, VAE

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline


@dataclass(frozen=True)
class ModelFlags:
    """The values of these flags. A command's other flags may follow in a subclass."""

    model: str
    backend: str
    precision: str | None
    engines: str
    takes_unchecked: bool
    lora_folder: str
    control_folder: str
    image_folder: str

    def load(self, *, refiner: str | None, is_deterministic: bool = False) -> Pipeline:
        import engines

        return engines.load(
            model=self.model,
            backend=self.backend,
            precision=self.precision,
            is_deterministic=is_deterministic,
            folder=self.engines,
            takes_unchecked=self.takes_unchecked,
            loras=self.lora_folder,
            controlnets=self.control_folder,
            ip_adapters=self.image_folder,
            refiner=refiner,
        )


def given_engine_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values by the names of ModelFlags' fields."""
    return {each.name: getattr(options, each.name) for each in fields(ModelFlags)}


def add_engine_flags(flags: argparse._ActionsContainer, remark: str) -> None:
    """Add the flags to a parser or a group; `remark` ends the help of --model."""
    add = flags.add_argument
    add("--model", help=f"{MODEL} {remark}")
    add("--vae", metavar="FILE", help=VAE)
    add("--backend", default="auto", help=f"{', '.join(BACKENDS)} (default %(default)s)")
    add("--precision", help=PRECISION)
    add_folder_flags(flags)
    add("--loras", default="", dest="lora_folder", metavar="DIR", help=LORAS)
    add("--controlnets", default="", dest="control_folder", metavar="DIR", help=CONTROLNETS)
    add("--ip-adapters", default="", dest="image_folder", metavar="DIR", help=IP_ADAPTERS)


def add_folder_flags(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add("--engines", default="", metavar="DIR", help=FOLDER)
    add("--unchecked", action="store_true", dest="takes_unchecked", help=UNCHECKED)
