"""One picture's job in a worker: connects the waiting asyncio task with the working threads.

Updates go to the task, and a cancellation to the threads. It computes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from sdxl.adapters import Use
from sdxl.conditioning import Conditioning, TokenRow
from sdxl.deepcache import deep_count
from sdxl.flight import Flight
from sdxl.params import GenerationParams
from sdxl.pipeline import WithPictures
from sdxl.policy import Group
from serve.orders import Done, ImageOrder, ImageProgress, Update
from serve.tracing import TimedPart

News = Update | Exception


@dataclass(eq=False)
class ImageJob:
    """All methods but `updates` may be called from any thread."""

    order: ImageOrder
    params: GenerationParams
    uses: list[Use]
    """its LoRAs, embeddings and ControlNets"""
    rows: list[TokenRow]
    """its prompts, tokenised"""
    flight: Flight
    """as admitted"""
    clock: Callable[[], float]
    on_latents: Callable[[ImageJob, Tensor], None]
    """takes the last leg's latents"""
    on_preview: Callable[[ImageJob, int, Tensor], None]
    on_leg: Callable[[ImageJob, Tensor], None]
    """takes the latents of a leg before the last"""
    is_cancelled: bool = False
    last_file: Future[None] | None = None
    """writes the latest picture or preview"""
    timings: dict[str, float] = field(default_factory=dict)
    """seconds by finished stage"""
    parts: list[TimedPart] = field(default_factory=list)
    """stages and engine calls, if the request is traced"""
    conditioning: Conditioning | None = None
    """kept for later legs"""
    _number: int = 0
    """index of the current leg"""
    _ready_s: float | None = None
    """when the picture will be ready, as last reported; None without progress updates"""

    def __post_init__(self) -> None:
        self.began_s = self.stage_s = self.clock()
        self._tasks_loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._legs = self.params.legs

    async def updates(self) -> AsyncGenerator[Update]:
        while True:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            yield news
            if isinstance(news, Done):
                return

    def send(self, news: News) -> None:
        try:
            self._tasks_loop.call_soon_threadsafe(self._news.put_nowait, news)
        except RuntimeError:
            # The event loop was closed, so no client is left.
            self.is_cancelled = True

    def stage(self, name: str, now: float | None = None) -> float:
        """End a stage and record how long it took."""
        now = self.clock() if now is None else now
        began_s, self.stage_s = self.stage_s, max(now, self.stage_s)
        self.timings[name] = self.timings.get(name, 0.0) + self.stage_s - began_s
        self.note(name.removesuffix("_s"), began_s, self.stage_s)
        return self.stage_s - began_s

    def note(self, name: str, began_s: float, ended_s: float, **facts: str | int) -> None:
        if self.order.trace:
            self.parts.append(TimedPart(name, began_s, ended_s, facts))

    @property
    def prompt_tokens(self) -> int:
        return dict(self.flight.axes)["tokens"]

    @property
    def deep_steps(self) -> int:
        later = self.flight.later
        return deep_count(self.flight.plan) + (deep_count(later.plan) if later else 0)

    @property
    def with_pictures(self) -> WithPictures:
        return WithPictures(self.params, self.order.source, self.order.maps)

    @property
    def leg(self) -> GenerationParams:
        return self._legs[self._number]

    @property
    def leg_flight(self) -> Flight:
        return self.flight.next_leg if self._number else self.flight

    @property
    def steps_before(self) -> int:
        """Number of steps of the earlier legs."""
        return sum(leg.taken_steps for leg in self._legs[: self._number])

    # -- called by the denoiser; times are on its clock ----------------------------------------

    @property
    def preview_steps(self) -> tuple[int, ...]:
        return tuple(step - self.steps_before for step in self.order.preview_steps)

    def started(self, at_s: float) -> None:
        self.stage("queue_s", at_s)

    def ran(self, group: Group, began_s: float, ended_s: float) -> None:
        self.note(group.network, began_s, ended_s, images=len(group.ids), bucket=group.bucket)

    def stepped(self, flight: Flight, position: int, ready_s: float) -> None:
        self._ready_s = ready_s
        # A later leg is not in the queue, even while it waits.
        self._send_progress(flight.steps_left, 0 if self._number else position)

    def _send_progress(self, left: int, position: int) -> None:
        steps, ready_s = self.flight.steps_left, self._ready_s or 0.0
        eta_s = max(ready_s - self.clock(), 0.0)
        self.send(ImageProgress(steps - left, steps, position, eta_s))

    def previewed(self, step: int, latents: Tensor) -> None:
        self.on_preview(self, self.steps_before + step, latents)

    def finished(self, latents: Tensor) -> None:
        self.stage("denoise_s")
        if self._number + 1 == len(self._legs):
            self.on_latents(self, latents)
            return
        self._number += 1
        if self._ready_s is not None:
            # The loop's next report comes only after the next leg's start.
            self._send_progress(self.leg_flight.steps_left, 0)
        if 0 in self.preview_steps:
            # The loop does not report a leg's last step.
            self.previewed(0, latents)
        self.on_leg(self, latents)

    def failed(self, cause: Exception) -> None:
        self.send(cause)
