"""A request's loaded additions to the model: pages of LoRAs in a bank with a scale for each,
vectors of embeddings for the text encoders, ControlNets, and image adapters.

A page holds PAGE_RANK ranks of every adapted layer. This module does not read files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sdxl.catalogue import FILE_KEYS, AdapterFile
from sdxl.flight import PLAIN, Variant
from sdxl.specs import PAGE_COUNTS

Use = tuple[AdapterFile, float, float]
"""a file, its weight in the UNet, and in the text encoders; the weights are 1 except for LoRAs"""


@dataclass(frozen=True)
class Pages:
    """The pages of an image's rows, and the scale of each."""

    numbers: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """The number of pages, padded, of a call with these pages."""
        return next(count for count in (0, *PAGE_COUNTS) if count >= len(self.numbers))


def lora_inputs(rows: Sequence[Pages], count: int) -> dict[str, Tensor]:
    """Return each row's pages and scales, the inputs of networks with LoRAs. Page 0 is padding."""
    missing = [count - len(row.numbers) for row in rows]
    pages = [(*row.numbers, *[0] * n) for row, n in zip(rows, missing, strict=True)]
    scales = [(*row.scales, *[0.0] * n) for row, n in zip(rows, missing, strict=True)]
    return {"pages": torch.tensor(pages), "scales": torch.tensor(scales)}


@dataclass(frozen=True, eq=False)
class LoadedFile:
    """A file's networks on the device, which stay there while this object exists."""

    file: AdapterFile
    digests: Mapping[str, str]
    number: int
    """identifies the addresses of the weights"""


@dataclass(frozen=True, eq=False)
class ControlNet(LoadedFile):
    engines: Mapping[str, Any]
    """sdxl.engine.Engine by the names of specs.control_specs"""
    types: int = 0
    """number of a union's map types; 0: not a union"""

    @property
    def key(self) -> str:
        """An identifier of the content."""
        return f"{self.file.name}@{self.digests['sha256'][:12]}"


@dataclass(frozen=True, eq=False)
class ImageAdapter(LoadedFile):
    """An IP-Adapter."""

    encode: Callable[[bytes], Sequence[Tensor]]
    """Returns keys and values of every cross-attention, [1, tokens, width], for a picture's file.
    Raises InvalidParams for a file that is not a picture."""
    negative: Sequence[Tensor]
    """keys and values in negative rows"""
    layers: Mapping[str, Container[int]]
    """the cross-attentions that attend to the picture, by mode"""


@dataclass(frozen=True, eq=False)
class Adapters:
    """A request's LoRAs and embeddings in a bank, its ControlNets and its image adapters. They stay
    loaded while this object exists."""

    unet: Pages = Pages()
    text: Pages = Pages()
    variant: Variant = PLAIN
    """variant of the UNet"""
    vectors: tuple[int, ...] = ()
    """vectors of all embeddings, in the order of `files`"""
    files: tuple[tuple[AdapterFile, Mapping[str, str]], ...] = ()
    """LoRAs and embeddings with their digests"""
    nets: Mapping[str, ControlNet] = field(default_factory=dict)
    """by name"""
    image_adapters: Mapping[str, ImageAdapter] = field(default_factory=dict)
    """by name"""
    leases: Sequence[object] = field(default=(), repr=False)

    @property
    def in_text(self) -> Pages:
        """Pages for the text encoders; page 0 with embeddings alone, which need these networks."""
        return self.text if self.text.numbers or not self.vectors else Pages((0,), (0.0,))

    @property
    def facts(self) -> dict[str, Any]:
        """The digests of the files for a picture's metadata."""
        facts: dict[str, Any] = {}
        loaded = [*self.nets.values(), *self.image_adapters.values()]
        for file, digests in (*self.files, *((each.file, each.digests) for each in loaded)):
            facts.setdefault(FILE_KEYS[file.kind], {})[file.name] = dict(digests)
        return facts


NO_ADAPTERS = Adapters()


class AdapterShelf(Protocol):
    """Loads files into a bank of limited size when requests ask for them."""

    def delay_s(self, uses: Sequence[Use]) -> float:
        """Predict the seconds to load the files."""
        ...

    def variant(self, uses: Sequence[Use]) -> Variant:
        """Return the UNet's variant; a guess if files are not loaded."""
        ...

    def lease(self, uses: Sequence[Use]) -> Adapters:
        """Load the files. Raise InvalidParams for files of other models, NoRoom if the bank is in
        use."""
        ...


T_co = TypeVar("T_co", covariant=True)


class Shelf(Protocol[T_co]):
    """Loads ControlNets or image adapters of requests to the device's limited memory."""

    def delay_s(self, files: Sequence[AdapterFile]) -> float:
        """Predict the seconds to load the files."""
        ...

    def lease(self, files: Sequence[AdapterFile]) -> Mapping[str, T_co]:
        """Load the files and return them by name. Raise InvalidParams for files that do not fit the
        model, NoRoom if other requests use the memory."""
        ...


class NoRoom(RuntimeError):
    """Other requests use the whole bank, or all memory for ControlNets or image adapters."""
