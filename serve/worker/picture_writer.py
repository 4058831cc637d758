"""Turns latents into image files, beside the denoising loop: finished pictures and previews.

One thread decodes. Compressing a file takes longer and releases the interpreter's lock, so it has
several threads. Pictures that are pasted into a larger image have one more thread, so that few of
the large images are in memory and no other file waits for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import PriorityQueue
from typing import TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from sdxl import images
from sdxl.cost import Costs, smoothed
from sdxl.editing import SourceLatents
from sdxl.flight import Priority
from sdxl.params import LATENT
from sdxl.pipeline import Pipeline
from sdxl.provenance import OFF, Provenance
from sdxl.source import DecodedWhole, SourceImage, WholeImage
from serve.orders import Done, Preview, Update
from serve.worker.job import ImageJob
from serve.worker.safety import UNCHECKED, Safety, Shown, blurred
from serve.worker.side_stream import Mark, SideStream, mark
from serve.worker.stalls import STALL_S, Calls

T = TypeVar("T")

FILE_THREADS = 2
PREVIEW_QUALITY = 80
Enlarged = Callable[[ImageJob, SourceImage | SourceLatents], None]
UNMARKED = Provenance(OFF)


class PictureWriter:
    def __init__(
        self,
        pipeline: Pipeline,
        costs: Costs,
        stall_s: float = STALL_S,
        provenance: Provenance = UNMARKED,
        safety: Safety = UNCHECKED,
    ) -> None:
        self.pipeline, self.costs = pipeline, costs
        self.provenance, self.safety = provenance, safety
        self.calls = Calls("decoding a picture", pipeline.clock, stall_s)
        self._stream = SideStream(pipeline.engines)
        self._preview_map = pipeline.preview_map
        self._latents = PriorityQueue[tuple[tuple[Priority, float, int], Callable[[], None]]]()
        self._arrivals = itertools.count()
        self._decoder = ThreadPoolExecutor(1, "decode")
        self._files = ThreadPoolExecutor(FILE_THREADS, "file")
        self._pastes = ThreadPoolExecutor(1, "paste")
        self._pasting: dict[ImageJob, float] = {}
        """predicted seconds of pasting for jobs without remaining steps"""
        self._whole: tuple[str, DecodedWhole] | None = None
        """the last decoded whole image and its key, for the pasting thread"""

    def finish(self, job: ImageJob, latents: Tensor) -> None:
        if job.flight.pasted:
            self._pasting[job] = self.costs.pasted_s(job.flight)
            self.costs.pasting_s = sum([*self._pasting.values()])
        self._submit(job, partial(self._decode, job, latents))

    def enlarge(self, job: ImageJob, latents: Tensor, then: Enlarged) -> None:
        """Enlarge a leg's latents for the next leg."""
        self._submit(job, partial(self._enlarge, job, latents, then))

    def _submit(self, job: ImageJob, work: Callable[[], None]) -> None:
        place = job.order.priority, job.flight.due, next(self._arrivals)
        self._latents.put((place, work))
        self._decoder.submit(self._decode_next)

    def preview(self, job: ImageJob, step: int, latents: Tensor) -> None:
        ready = mark(self.pipeline.engines)
        self._make(job, partial(self._preview, job, step, latents, ready))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the decoding thread and wait for its result."""
        return self._decoder.submit(self._stream.run, function).result()

    def close(self) -> None:
        self._decoder.shutdown(cancel_futures=True)
        self._files.shutdown(cancel_futures=True)
        self._pastes.shutdown(cancel_futures=True)

    def _make(self, job: ImageJob, make: Callable[[], Update]) -> None:
        """Write the files of a job at the same time and report them in order."""
        threads = self._pastes if job.flight.pasted else self._files
        job.last_file = threads.submit(self._write_file, job, make, job.last_file)

    def _write_file(
        self, job: ImageJob, make: Callable[[], Update], before: Future[None] | None
    ) -> None:
        if job.is_cancelled:
            return
        try:
            made: Update | Exception = make()
        except Exception as error:
            made = error
        if before is not None:
            # This cannot deadlock: the earlier work already has a thread.
            wait([before])
        job.send(made)

    def _decode_next(self) -> None:
        """Decode the most urgent job; among equals, the first."""
        _, decode = self._latents.get_nowait()
        decode()

    def _pixels(self, latents: Tensor) -> images.Pixels:
        """Decode final latents, which the loop has completed."""
        size = tuple(latents.shape[-2:])
        with self.calls.watch(size), self._stream.beside(latents):
            return self.pipeline.pixels(latents)

    def _decode(self, job: ImageJob, latents: Tensor) -> None:
        if job.is_cancelled:
            self._forget(job)
            return
        try:
            pixels = self._pixels(latents)
            with self._stream.beside():
                shown = self.safety.apply(pixels, is_lenient=job.order.is_lenient)
        except Exception as error:
            self._forget(job)
            job.failed(error)
            return
        decode_s = job.stage("decode_s")
        self._make(job, partial(self._picture, job, shown, decode_s))
        assert job.last_file is not None
        job.last_file.add_done_callback(lambda _: self._forget(job))

    def _forget(self, job: ImageJob) -> None:
        """Forget a job that is pasted or cancelled."""
        # Its callback refers to the job, so the job would keep its LoRAs and pictures in memory.
        job.last_file = None
        if self._pasting.pop(job, None) is not None:
            self.costs.pasting_s = sum([*self._pasting.values()])
            if not self._pasting:
                self._whole = None

    def _enlarge(self, job: ImageJob, latents: Tensor, then: Enlarged) -> None:
        if job.is_cancelled:
            return
        try:
            if job.params.upscaler == LATENT:
                with self._stream.beside(latents):
                    then(job, self.pipeline.enlarged(job.leg, latents))
            else:
                then(job, images.enlarged(self._pixels(latents), job.leg))
        except Exception as error:
            job.failed(error)

    def _picture(self, job: ImageJob, shown: Shown, decode_s: float) -> Done:
        pixels, order = shown.pixels, job.order
        size = pixels.size / pixels.shape[-1]
        standard, began_s = self.pipeline.sizes.default**2, self.pipeline.clock()
        with self._pasted(job, pixels) as image:
            file = self._file(job, image, order.compression)
        file = self.provenance.sign(file, order.format)
        took_s = decode_s + job.stage("file_s")
        if job.flight.pasted:
            paste_s = (self.pipeline.clock() - began_s) * standard / order.result_pixels
            self.costs.paste_s = smoothed(self.costs.paste_s or None, paste_s)
        else:
            self.costs.decode_s = smoothed(self.costs.decode_s, took_s * standard / size)
        job.timings["total_s"] = job.stage_s - job.began_s
        return Done(
            file,
            job.params,
            job.timings,
            job.deep_steps,
            shallow_steps=job.params.all_steps - job.deep_steps,
            prompt_tokens=job.prompt_tokens,
            model=self.pipeline.checkpoint.name,
            is_flagged=shown.is_flagged,
        )

    def _preview(self, job: ImageJob, step: int, latents: Tensor, ready: Mark) -> Preview:
        if ready is not None:
            ready.synchronize()
        pixels = images.forming(latents, self._preview_map, job.params.result_size)
        if self.safety.checker is not None:
            # A checker judges finished pictures only.
            pixels = blurred(pixels)
        quality = None if job.order.format == "png" else PREVIEW_QUALITY
        with self._pasted(job, pixels, is_marked=False) as image:
            return Preview(self._file(job, image, quality), step)

    @contextmanager
    def _pasted(
        self, job: ImageJob, pixels: images.Pixels, *, is_marked: bool = True
    ) -> Iterator[Image.Image]:
        image, source = Image.fromarray(pixels), job.order.source
        with ExitStack() as stack:
            if source is not None and source.whole is not None:
                image = stack.enter_context(self._decoded(source.whole).pasted(image))
            elif source is not None:
                image = source.pasted(image)
            if is_marked and self.provenance.is_watermarked:
                image = Image.fromarray(self.provenance.mark(np.asarray(image)))
            yield image

    def _decoded(self, whole: WholeImage) -> DecodedWhole:
        """Decode a whole image, once for consecutive pictures of a request."""
        if self._whole is None or self._whole[0] != whole.key:
            self._whole = None
            self._whole = whole.key, whole.decoded()
        return self._whole[1]

    def _file(self, job: ImageJob, image: Image.Image, compression: int | None) -> bytes:
        """Encode the image with its metadata."""
        source = job.order.source
        digests = {} if source is None else source.digests
        files = {} if job.conditioning is None else job.conditioning.adapters.facts
        facts = {**job.params.as_dict(), "model": self.pipeline.origin, **digests, **files}
        return images.encode(image, job.order.format, facts, compression, self.provenance.xmp)
