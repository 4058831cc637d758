"""Systems under LoadGen's test: the loop in this process, or a service over HTTP with all of its
replicas. Neither caches results or encoded prompts.
"""

from __future__ import annotations

import queue
import threading
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from eval.quality.sources import concurrent_pictures, first_image_model, request_picture
from eval.service.client import http_client
from sdxl.handover import in_threads
from sdxl.images import Pixels, to_pixels
from sdxl.inflight import Event, Failed, InFlight
from sdxl.params import GenerationParams

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline

Complete = Callable[[int, bytes], None]
Sample = tuple[int, int]
"""response id, index of the caption"""


class Arrivals:
    """A queue of issued samples for other threads; None ends it."""

    def __init__(self, requests: Sequence[GenerationParams], complete: Complete) -> None:
        self.requests, self.complete = requests, complete
        self.error: Exception | None = None
        self._arrived: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()

    def issue(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._arrived.put(sample)


class InProcess(Arrivals):
    """Samples join the running loop at the next tick, as requests do at a replica."""

    def __init__(
        self, pipeline: Pipeline, requests: Sequence[GenerationParams], complete: Complete
    ) -> None:
        super().__init__([pipeline.resolve(request) for request in requests], complete)
        self.pipeline, self._is_open = pipeline, True
        self._thread = threading.Thread(target=self._run, name="system under test", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._arrived.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        under_way = set[int]()
        try:
            self._serve(under_way)
        except Exception as error:
            self.error = error
            # LoadGen waits until every sample is answered.
            for response in under_way:
                self.complete(response, b"")
            while self._is_open:
                for response, _ in self._take(1, waits=True):
                    self.complete(response, b"")

    def _serve(self, under_way: set[int]) -> None:
        """`under_way`: the samples that LoadGen waits for."""
        loop = self.pipeline.in_flight()
        responses: dict[int, int] = {}
        while self._is_open or not loop.is_idle:
            # Encode prompts as rows become free, so that a query of 5000 starts at once.
            room = 2 * loop.limits.rows - len(responses)
            samples = self._take(room, waits=loop.is_idle)
            under_way |= {response for response, _ in samples}
            self._submit(loop, samples, responses)
            for event in loop.tick():
                response = responses.pop(event.id)
                self.complete(response, self._picture(event))
                under_way.remove(response)

    def _take(self, room: int, waits: bool) -> list[Sample]:
        samples: list[Sample] = []
        while self._is_open and len(samples) < room:
            try:
                sample = self._arrived.get(block=waits and not samples)
            except queue.Empty:
                break
            if sample is None:
                self._is_open = False
            else:
                samples.append(sample)
        return samples

    def _submit(self, loop: InFlight, samples: list[Sample], responses: dict[int, int]) -> None:
        if not samples:
            return
        requests = [self.requests[index] for _, index in samples]
        conditionings = self.pipeline.encode(requests)
        for (response, _), request, conditioning in zip(
            samples, requests, conditionings, strict=True
        ):
            responses[loop.submit(self.pipeline.request(request, conditioning))] = response

    def _picture(self, event: Event) -> bytes:
        """The pixels. A failure returns no bytes, and `close` raises it."""
        try:
            if isinstance(event, Failed):
                raise event.cause
            return to_pixels(self.pipeline.image_decoder.image(event.latents)).tobytes()
        except Exception as error:
            self.error = error
            return b""


def in_process_at_once(pipeline: Pipeline, request: GenerationParams) -> int:
    """The pictures of two largest calls: one runs while the other's prompts are encoded."""
    return max(1, 2 * pipeline.engines.buckets[-1] // pipeline.plan(request).room[0])


class OverHttp(Arrivals):
    """A service over HTTP. A refused request is repeated; its latency includes all tries."""

    def __init__(self, url: str, requests: Sequence[GenerationParams], complete: Complete) -> None:
        super().__init__(requests, complete)
        with http_client(url) as http:
            self.model = first_image_model(http)
        self.connections = concurrent_pictures(self.model)
        self.http = http_client(url, self.connections)
        # Not an executor: an interrupt inside one would leave a lock held that its threads need.
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(self.connections):
            start_new_thread(self._serve, ())

    def close(self) -> None:
        """Drop the waiting samples, which only an interrupt leaves, and end the threads."""
        with suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()
        for _ in range(self.connections):
            self._arrived.put(None)
        for _ in range(self.connections):
            self._ended.get()
        self.http.close()
        if self.error is not None:
            raise self.error

    def make(self, requests: Sequence[GenerationParams]) -> list[Pixels]:
        """Make pictures with the concurrency of a LoadGen run."""
        return list(in_threads(partial(request_picture, self.http), requests, self.connections))

    def _serve(self) -> None:
        while (sample := self._arrived.get()) is not None:
            self._answer(*sample)
        self._ended.put(None)

    def _answer(self, response: int, index: int) -> None:
        data = b""
        try:
            data = request_picture(self.http, self.requests[index]).tobytes()
        except Exception as error:
            self.error = error
        self.complete(response, data)
