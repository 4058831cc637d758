"""Orders from the REST front to image replicas, and the updates that come back.

Plain data that any process can send to any other, and the one protocol between the two. It imports
no tensor library: a front restarts in a moment.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sdxl.flight import Priority
from sdxl.params import GenerationParams, Sizes
from sdxl.presets import UNMEASURED, Presets
from sdxl.source import SourceImage


@dataclass(frozen=True)
class ImageOrder:
    """One picture. Its seed is fixed, so that it can be made again elsewhere."""

    params: GenerationParams
    format: str = "png"
    compression: int | None = None
    deadline_s: float = math.inf
    """seconds from when it is handed over, picture included"""
    preview_steps: tuple[int, ...] = ()
    """after which steps to show how the picture forms"""
    wants_progress: bool = False
    priority: Priority = Priority.INTERACTIVE
    request_id: str = ""
    client: str = ""
    """the client's name; the queue is shared between clients"""
    weight: float = 1.0
    """of this client's share"""
    trace: str = ""
    """W3C traceparent of the HTTP request; empty when tracing is off"""
    source: SourceImage | None = None
    """what it is made from, of an edit"""
    model: str = ""
    """which alone may make it, as the settings name it; empty: whichever has this order"""

    @property
    def pasted_pixels(self) -> int:
        """Pixels of the files, previews included, that the result is pasted into; 0: of none."""
        whole = self.source and self.source.whole
        return math.prod(whole.size) * (1 + len(self.preview_steps)) if whole else 0

    @property
    def result_pixels(self) -> int:
        whole = self.source and self.source.whole
        return math.prod(whole.size if whole else self.params.result_size)


@dataclass(frozen=True)
class Queued:
    """Taken on: it will be made, and in time. The first update of every order."""

    position: int


@dataclass(frozen=True)
class ImageProgress:
    """`position` is the place in the queue; 0 is being made."""

    step: int
    steps: int
    position: int
    eta_s: float


@dataclass(frozen=True)
class Preview:
    """The picture as it is expected to become, after `step` steps."""

    image: bytes
    step: int


@dataclass(frozen=True)
class Done:
    image: bytes
    params: GenerationParams
    """with its size and seed filled"""
    timings: dict[str, float]
    deep_steps: int
    shallow_steps: int
    prompt_tokens: int
    model: str = ""
    """which made it; empty: not known"""


Update = Queued | ImageProgress | Preview | Done


@dataclass(frozen=True)
class ModelCard:
    """What a client may know of a model before it asks."""

    id: str
    sizes: Sizes
    created: int = 0
    engines: dict[str, Any] = field(default_factory=dict)
    why_slower: str = ""
    """why other engines run in TensorRT's place; empty where none do"""
    can_edit: bool = False
    """make a picture from another one"""
    at_once: int = 0
    """images that are best under way at once; 0: not known"""
    presets: Presets = field(default_factory=lambda: UNMEASURED)
    """what the names of `quality` stand for"""
    embeds_guidance: bool = False
    """it needs no negative row under guidance"""


@dataclass(frozen=True)
class PromptFacts:
    """Facts about a prompt that are known before its picture is made."""

    tokens: int
    """by whichever of the model's tokenizers finds more"""
    most_tokens: int
    """that it may have"""
    unknown_words: tuple[str, ...] = ()
    """that mean nothing to the model; known of the embedded one alone"""


class ImageBackend(Protocol):
    """Whatever makes pictures: a worker in this process, or replicas behind a handle."""

    async def card(self) -> ModelCard:
        """Raises Problem, 503, until a real image was made."""
        ...

    async def ready(self) -> ModelCard:
        """The same, and raises also while no image can be made, though one may be again soon."""
        ...

    async def examine(self, prompt: str) -> PromptFacts:
        """Raises Problem for one that cannot be read, whatever its length."""
        ...

    def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        """Ends with Done, or raises Problem. Closing it cancels the image."""
        ...

    async def metrics(self) -> Sequence[Any]:
        """prometheus_client's Metric objects."""
        ...
