"""The image that a command's pictures are made from, if it names one: read before the model is
loaded, brought to size when it is known what the model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdxl.params import GenerationParams, InvalidParams
from sdxl.source import GivenImage

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline


@dataclass(frozen=True)
class ImageToEdit:
    given: GivenImage

    @classmethod
    def read(cls, image: str | None, mask: str | None) -> ImageToEdit | None:
        if image is None:
            if mask is not None:
                raise InvalidParams("mask", mask, "needs --image")
            return None
        return cls(
            GivenImage.read(content(image, "image"), content(mask, "mask") if mask else None)
        )

    def check(self, params: GenerationParams) -> None:
        params.for_edit(has_mask=self.given.mask is not None)

    def sized(self, params: GenerationParams, pipeline: Pipeline) -> GenerationParams:
        return self.given.sized(params, pipeline.sizes)

    @property
    def digests(self) -> Mapping[str, str]:
        return self.given.digests


def content(name: str, field: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        needed = f"must be a readable file ({error.strerror})"
        raise InvalidParams(field, name, needed) from error
