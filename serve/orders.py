"""Orders from the REST front to image replicas, and the updates that come back, as plain data.

No tensor library is imported, so that a front restarts quickly.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sdxl.flight import Priority
from sdxl.params import GenerationParams, Sizes
from sdxl.presets import UNMEASURED, Presets
from sdxl.source import SourceImage


class KeptFile(NamedTuple):
    """A file that some replicas keep in memory, so that orders that need it go there."""

    name: str
    loading_s: float
    """typical time to load it"""


CONTROLNET_S, IMAGE_ADAPTER_S, LORA_S = 5.0, 1.5, 0.3
"""Seconds to load 2.5, 0.8 and 0.2 GB at 0.5 GB/s."""


@dataclass(frozen=True)
class ImageOrder:
    """One picture. Its seed is fixed, so that another replica can make it again."""

    params: GenerationParams
    format: str = "png"
    compression: int | None = None
    deadline_s: float = math.inf
    """seconds from submission to the finished picture"""
    preview_steps: tuple[int, ...] = ()
    """steps after which previews are sent"""
    wants_progress: bool = False
    priority: Priority = Priority.INTERACTIVE
    request_id: str = ""
    client: str = ""
    """the client's name; clients share the queue fairly"""
    weight: float = 1.0
    """weight of this client's share of the queue"""
    trace: str = ""
    """W3C traceparent of the HTTP request; empty when tracing is off"""
    source: SourceImage | None = None
    """source of an edit"""
    maps: Mapping[str, bytes] = field(default_factory=dict)
    """picture files by their `image` in `params.controls` and `params.image_prompts`"""
    model: str = ""
    """the required model, by its name in the settings; empty: any"""
    is_lenient: bool = False
    """whether the safety checker may be less strict"""

    @property
    def pasted_pixels(self) -> int:
        """Pixels of all whole images into which the result and previews are pasted."""
        whole = self.source and self.source.whole
        return math.prod(whole.size) * (1 + len(self.preview_steps)) if whole else 0

    @property
    def kept_file(self) -> KeptFile | None:
        """The file of the picture that takes longest to load; None if it needs none."""
        kinds = (
            (self.params.controls, CONTROLNET_S),
            (self.params.image_prompts, IMAGE_ADAPTER_S),
            (self.params.loras, LORA_S),
        )
        files = [KeptFile(each.name, seconds) for named, seconds in kinds for each in named or ()]
        return files[0] if files else None

    @property
    def result_size(self) -> tuple[int, int]:
        """Width and height of the file: of the whole image if only a part is redrawn."""
        whole = self.source and self.source.whole
        return whole.size if whole else self.params.result_size

    @property
    def result_pixels(self) -> int:
        return math.prod(self.result_size)


@dataclass(frozen=True)
class Queued:
    """The order was admitted: it should meet its deadline. The first update of every order."""

    position: int


@dataclass(frozen=True)
class ImageProgress:
    """`position` is the place in the queue; 0: the picture is being made."""

    step: int
    steps: int
    position: int
    eta_s: float


@dataclass(frozen=True)
class Preview:
    """The expected picture after `step` steps."""

    image: bytes
    step: int


@dataclass(frozen=True)
class Done:
    image: bytes
    params: GenerationParams
    """with size and seed filled in"""
    timings: dict[str, float]
    deep_steps: int
    shallow_steps: int
    prompt_tokens: int
    model: str = ""
    """empty: unknown"""
    is_flagged: bool = False
    """whether the safety checker flagged the picture, which is blurred then"""


Update = Queued | ImageProgress | Preview | Done


@dataclass(frozen=True)
class ModelCard:
    """A model's public facts."""

    id: str
    sizes: Sizes
    engines: dict[str, Any] = field(default_factory=dict)
    why_slower: str = ""
    """why TensorRT does not run; empty if it runs or cannot run here"""
    can_edit: bool = False
    at_once: int = 0
    """best number of images at once; 0: unknown"""
    presets: Presets = field(default_factory=lambda: UNMEASURED)
    """the presets of `quality`"""
    embeds_guidance: bool = False
    """whether guidance needs no negative row"""
    loras: tuple[str, ...] = ()
    """names of the LoRAs that requests may use now"""
    embeddings: Mapping[str, int] = field(default_factory=dict)
    """embeddings that prompts may use now: name to number of vectors"""
    controlnets: Mapping[str, str] = field(default_factory=dict)
    """ControlNets that requests may use now: name to stable-diffusion-webui's hash"""
    ip_adapters: Mapping[str, str] = field(default_factory=dict)
    """IP-Adapters that requests may use now: name to hash"""
    refiner: str = ""
    """name of the refiner; empty without one"""


@dataclass(frozen=True)
class PromptFacts:
    """Facts about a prompt that are known before its picture is made."""

    tokens: int
    """the larger count of the model's tokenizers"""
    most_tokens: int
    """the limit"""
    unknown_words: tuple[str, ...] = ()
    """words that the embedded model does not know; empty for other models"""


class ImageBackend(Protocol):
    """A source of pictures: a worker in this process, or replicas behind a handle."""

    async def card(self) -> ModelCard:
        """Return the card, or raise Problem 503 before the first picture."""
        ...

    async def ready(self) -> ModelCard:
        """Return the card, or raise Problem also while no image can be made for a moment."""
        ...

    async def examine(self, prompt: str) -> PromptFacts:
        """Examine a prompt of any length; raise Problem if it cannot be read."""
        ...

    def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        """Yield updates; the last is Done, or a Problem is raised. Closing cancels the picture."""
        ...

    async def metrics(self) -> Sequence[Any]:
        """Return prometheus_client's Metric objects."""
        ...
