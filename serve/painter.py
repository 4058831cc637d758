"""Latents to image files, beside the denoising loop: the finished picture and its previews.

One thread decodes; compressing a file takes longer, lets go of the interpreter's lock, and has
threads of its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image
from torch import Tensor

from sdxl import images
from sdxl.cost import Costs, smoothed
from sdxl.pipeline import Pipeline
from serve.job import Job
from serve.orders import Done, Preview
from serve.side_stream import Mark, SideStream, mark

FILE_THREADS = 2
PREVIEW_QUALITY = 80


class Painter:
    def __init__(self, pipeline: Pipeline, costs: Costs) -> None:
        self.pipeline, self.costs = pipeline, costs
        self._stream = SideStream(pipeline.engines.device)
        channels = pipeline.engines.arch.latent_channels
        self._preview_map = images.load_preview_map(pipeline.checkpoint.folder, channels)
        self._decoder = ThreadPoolExecutor(1, "decode")
        self._files = ThreadPoolExecutor(FILE_THREADS, "file")

    def finish(self, job: Job, latents: Tensor) -> None:
        self._decoder.submit(self._decode, job, latents, mark(self.pipeline.engines.device))

    def preview(self, job: Job, step: int, latents: Tensor) -> None:
        self._files.submit(self._preview, job, step, latents, mark(self.pipeline.engines.device))

    def close(self) -> None:
        self._decoder.shutdown(cancel_futures=True)
        self._files.shutdown(cancel_futures=True)

    def _decode(self, job: Job, latents: Tensor, ready: Mark) -> None:
        if job.is_cancelled:
            return
        try:
            with self._stream.after(ready, latents):
                image = self.pipeline.decode(latents)
            self._files.submit(self._write, job, image)
        except Exception as error:
            job.failed(error)

    def _write(self, job: Job, image: Tensor) -> None:
        try:
            metadata = {**job.params.as_dict(), "model": self.pipeline.model_id}
            order = job.order
            file = images.encode(images.to_pixels(image), order.format, metadata, order.compression)
        except Exception as error:
            job.failed(error)
            return
        self.costs.decode_s = smoothed(self.costs.decode_s, job.stage("decode_s"))
        job.timings["total_s"] = job.stage_s - job.began_s
        shallow = job.params.steps - job.deep_steps
        job.tell(Done(file, job.params, job.timings, job.deep_steps, shallow, job.prompt_tokens))

    def _preview(self, job: Job, step: int, latents: Tensor, ready: Mark) -> None:
        if job.is_cancelled:
            return
        try:
            if ready is not None:
                ready.synchronize()
            small = images.preview(latents, self._preview_map)
            assert job.params.width and job.params.height
            size = (job.params.width, job.params.height)
            large = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
            metadata = {**job.params.as_dict(), "model": self.pipeline.model_id}
            quality = None if job.order.format == "png" else PREVIEW_QUALITY
            file = images.encode(np.asarray(large), job.order.format, metadata, quality)
        except Exception as error:
            job.failed(error)
            return
        job.tell(Preview(file, step))
