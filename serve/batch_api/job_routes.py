"""`/v1/images/jobs`: the request is answered at once, and its pictures are made later.

A job is a record in the store, which the runner polls.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from sdxl.params import DRAWN_SEEDS
from serve.batch.intake import NOT_IN_BATCHES
from serve.batch_api.records import DATA, ImageJobRecord, Records, id_of
from serve.batch_api.wire import (
    After,
    Page,
    cancel,
    facts_of,
    owner_in,
    page_of,
    same_fields,
    with_room,
)
from serve.errors import Problem, invalid
from serve.front.api import JOBS_PATH
from serve.front.body_limit import is_form
from serve.front.edits import EditBody
from serve.front.openai_images import ErrorDetail, ImageRequest, ImagesResponse, Reply
from serve.front.pictures import PicturesResponse
from serve.front.request_reader import RequestReader, fields_of
from serve.settings import ServeSettings

MOST_OPEN = 1000
"""The most open jobs of one owner."""
BODIES = [each.model_json_schema() for each in (ImageRequest, EditBody)]
CONTENT = {"application/json": {"schema": {"anyOf": BODIES}}}
BODY: dict[str, Any] = {"requestBody": {"required": True, "content": CONTENT}}


class ImageJobObject(Reply):
    id: str
    object: Literal["image.job"] = "image.job"
    status: str
    """queued, in_progress, cancelling, completed, failed or cancelled"""
    model: str
    created_at: int
    in_progress_at: int | None
    ended_at: int | None
    expires_at: int | None
    """when an ended job and its pictures are removed"""
    position: int | None
    """number of jobs before it in the queue; 0: being made"""
    progress: float
    """share of the steps that are taken"""
    eta_s: float | None
    error: ErrorDetail | None
    result: ImagesResponse | None = None
    """the answer of /v1/images/generations; not in lists"""

    @classmethod
    def of(cls, job: ImageJobRecord, *, is_cancelled: bool = False) -> ImageJobObject:
        error = Problem(**job.error).body()["error"] if job.error else None
        expires_at = None if job.ended_at is None else job.ended_at + job.lives_s
        facts = same_fields(cls, job) | {"error": error, "expires_at": expires_at, "result": None}
        if is_cancelled and not job.is_ended:
            facts["status"] = "cancelling"
        return cls(**facts)


class ImageJobList(Page):
    data: list[ImageJobObject]


@dataclass
class ImageJobApi:
    records: Records
    reader: RequestReader
    settings: ServeSettings

    async def make(self, body: bytes, request: Request) -> ImageJobObject:
        """Make a job. Raises Problem as `/v1/images/generations` or `/v1/images/edits` would."""
        asked = await self.reader.read_json(body)
        for field in NOT_IN_BATCHES:
            if getattr(asked.request, field):
                raise invalid(field, f"{field} must be left out of a job")
        owner = owner_in(request)
        # If a front end dies, Ray's proxy repeats the request, which must make the same job.
        id_ = id_of("image_job_", owner, request.state.request_id, hashlib.sha256(body).hexdigest())
        seed = int(id_[-16:], 16) % DRAWN_SEEDS
        asked.orders(seed, float("inf"), {})
        job = ImageJobRecord(
            id=id_,
            **facts_of(request, self.settings),
            model=asked.model.id,
            seed=seed,
            lives_s=int(self.settings.results_ttl_s),
        )
        return await asyncio.to_thread(self._keep, job, body)

    def _keep(self, job: ImageJobRecord, body: bytes) -> ImageJobObject:
        if (known := self.records.read(ImageJobRecord, job.owner, job.id)) is not None:
            if not known.has_expired(time.time()):
                return ImageJobObject.of(known)
            return self._keep(replace(job, id=id_of("image_job_", job.id, known.ended_at)), body)
        jobs = self.records.read_all(ImageJobRecord, job.owner)
        if sum(not each.is_ended for each in jobs) >= MOST_OPEN:
            raise Problem(429, f"{MOST_OPEN} jobs wait already.", None, "too_many_jobs", 60.0)

        # After a restart another model may be the default.
        text = json.dumps(fields_of(body) | {"model": job.model}).encode()

        def write() -> None:
            self.records.store.put(f"{DATA}/{job.id}", text)
            self.records.share(job)
            self.records.put(job)

        with_room(write)
        return ImageJobObject.of(job)

    def need(self, owner: str, id_: str) -> ImageJobRecord:
        job = self.records.read(ImageJobRecord, owner, id_)
        if job is None or job.has_expired(time.time()):
            raise Problem(404, f"There is no job {id_[:80]!r}.", "id", "not_found")
        return job

    def shown(self, job: ImageJobRecord) -> ImageJobObject:
        is_cancelled = not job.is_ended and self.records.asked_to_cancel(job.id) is not None
        return ImageJobObject.of(job, is_cancelled=is_cancelled)

    def answer(self, owner: str, id_: str) -> Response:
        """Answer with the job, and its pictures unless they are URLs."""
        job = self.need(owner, id_)
        is_url = job.result is not None and "url" in job.result["data"][0]
        files = [] if is_url else [self.records.data(name) for name in job.pictures]
        facts = self.shown(job).model_dump() | {"result": job.result}
        return PicturesResponse(json.dumps(facts).encode(), files)

    def listed(self, owner: str) -> list[ImageJobRecord]:
        """Return an owner's jobs, the newest first."""
        jobs = self.records.read_all(ImageJobRecord, owner)
        return [job for job in reversed(jobs) if not job.has_expired(time.time())]

    def cancel(self, owner: str, id_: str) -> ImageJobObject:
        job = self.need(owner, id_)
        cancel(self.records, job)
        return self.shown(job)


def add_job_routes(app: FastAPI, api: ImageJobApi) -> None:
    @app.post(JOBS_PATH, status_code=202, openapi_extra=BODY)
    async def create_job(request: Request) -> ImageJobObject:
        """Make pictures later; the answer names the job. The body is as for
        `/v1/images/generations`, or with `images` as the JSON for `/v1/images/edits`."""
        if is_form(request.headers):
            raise Problem(415, "The body must be JSON.", None, "unsupported_media_type")
        return await api.make(await request.body(), request)

    @app.get(JOBS_PATH)
    async def list_jobs(
        request: Request, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> ImageJobList:
        """The newest first, without results."""
        jobs = await asyncio.to_thread(api.listed, owner_in(request))
        page, ends = page_of(jobs, after, limit)
        shown = await asyncio.to_thread(lambda: [api.shown(each) for each in page])
        return ImageJobList(data=shown, **ends)

    @app.get(JOBS_PATH + "/{job_id}", response_model=ImageJobObject)
    async def retrieve_job(job_id: str, request: Request) -> Response:
        """A job's state, and when it is completed its pictures."""
        return await asyncio.to_thread(api.answer, owner_in(request), job_id)

    @app.delete(JOBS_PATH + "/{job_id}")
    async def cancel_job(job_id: str, request: Request) -> ImageJobObject:
        """Cancel a job that has not ended."""
        return await asyncio.to_thread(api.cancel, owner_in(request), job_id)
