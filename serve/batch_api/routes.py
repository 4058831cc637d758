"""OpenAI's `/v1/files` and `/v1/batches`: records in a store, which the runner polls.

An owner is an API key; without keys all clients are one owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParameter
from starlette.datastructures import UploadFile
from starlette.responses import Response, StreamingResponse

from serve.batch.intake import BATCH_URL
from serve.batch_api import answers
from serve.batch_api.batch_job import input_file
from serve.batch_api.job_routes import ImageJobApi, add_job_routes
from serve.batch_api.records import BatchRecord, FileRecord, ImageJobRecord, Records, id_of
from serve.batch_api.wire import (
    MAX_LIFE_S,
    MIN_LIFE_S,
    After,
    BatchAsked,
    BatchList,
    BatchObject,
    FileDeleted,
    FileList,
    FileObject,
    cancel,
    facts_of,
    owner_in,
    page_of,
    window_s,
    with_room,
)
from serve.errors import Problem, invalid
from serve.front.api import BATCHES_PATH, FILES_PATH
from serve.front.edits import form_in
from serve.front.openai_images import MEDIA
from serve.front.request_reader import RequestReader
from serve.render.destination import SUFFIXES
from serve.settings import ServeSettings

PURPOSE = "batch"
MOST_FILES, MOST_OPEN = 1000, 100
"""The most files, and the most open batches, of one owner."""
MOST_NAME = 255
CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}, "description": "lines"}
}
PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"content": {kind: {} for kind in MEDIA.values()}, "description": "the picture"}
}
LIFE = {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S}
FORM = {
    "file": {"type": "string", "format": "binary"},
    "purpose": {"type": "string", "enum": [PURPOSE]},
    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
    "expires_after[seconds]": LIFE,
}
SCHEMA = {"type": "object", "required": ["file", "purpose"], "properties": FORM}
BODY = {"required": True, "content": {"multipart/form-data": {"schema": SCHEMA}}}
UPLOAD: dict[str, Any] = {"requestBody": BODY}
Ordinal = Annotated[int, PathParameter(ge=0, lt=10**9)]


@dataclass
class BatchApi:
    records: Records
    settings: ServeSettings

    # -- files ------------------------------------------------------------------------------

    async def upload(self, request: Request) -> FileRecord:
        async with form_in(request, max_files=1, max_fields=8) as form:
            sent, purpose = form.get("file"), form.get("purpose")
            if not isinstance(sent, UploadFile):
                raise invalid("file", "file must be a file", "missing_required_parameter")
            if purpose != PURPOSE:
                raise invalid("purpose", f"purpose must be {PURPOSE!r}, got {str(purpose)[:40]!r}")
            name = checked_name(sent.filename or "requests.jsonl")
            data = await sent.read()
            life_s = life_of(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        life_s = life_s or int(self.settings.batches_ttl_s)
        owner = owner_in(request)
        # If a front end dies, Ray's proxy repeats the request, which must make the same file.
        digest = hashlib.sha256(data).hexdigest()
        id_ = id_of("file-", owner, request.state.request_id, name, digest)
        file = FileRecord.new(id_, name, PURPOSE, len(data), life_s)
        return await asyncio.to_thread(self._keep, owner, file, data)

    def _keep(self, owner: str, file: FileRecord, data: bytes) -> FileRecord:
        if len(self.records.read_all(FileRecord, owner)) >= MOST_FILES:
            message = f"There are {MOST_FILES} files; delete some."
            raise Problem(429, message, None, "too_many_files")
        with_room(lambda: self.records.add_file(owner, file, data))
        return file

    def _file(self, owner: str, id_: str) -> FileRecord | None:
        """Return the file; None if it does not exist or has expired."""
        file = self.records.read(FileRecord, owner, id_)
        return None if file is None or file.expires_at < time.time() else file

    def need_file(self, owner: str, id_: str) -> FileRecord:
        file = self._file(owner, id_)
        if file is None:
            raise Problem(404, f"There is no file {id_[:80]!r}.", "id", "not_found")
        return file

    def content(self, owner: str, id_: str) -> tuple[FileRecord, Iterator[bytes]]:
        file = self.need_file(owner, id_)
        if not file.batch:
            return file, iter([self.records.data(file.id)])
        batch = self.records.read(BatchRecord, owner, file.batch)
        if batch is None:
            raise Problem(404, "The batch of this file is gone.", "id", "not_found")
        return file, self._lines(batch, file)

    def _lines(self, batch: BatchRecord, file: FileRecord) -> Iterator[bytes]:
        store = self.records.job_store(batch.id)
        with input_file(store) as path:
            yield from answers.lines(batch, path, store, file.part)

    # -- batches ----------------------------------------------------------------------------

    def make(self, asked: BatchAsked, request: Request) -> BatchRecord:
        if asked.endpoint != BATCH_URL:
            message = f"endpoint must be {BATCH_URL}, got {asked.endpoint[:100]!r}"
            raise invalid("endpoint", message)
        owner = owner_in(request)
        expires_at = int(time.time()) + window_s(asked.completion_window)
        file = self._file(owner, asked.input_file_id)
        if file is None:
            message = f"input_file_id: there is no file {asked.input_file_id[:80]!r}"
            raise invalid("input_file_id", message, "file_not_found")
        if file.purpose != PURPOSE:
            message = f"input_file_id: its purpose must be {PURPOSE!r}, got {file.purpose!r}"
            raise invalid("input_file_id", message)
        id_ = id_of("batch_", owner, request.state.request_id, asked.input_file_id)
        known = self.records.read(BatchRecord, owner, id_)
        if known is not None:
            return known
        batches = self.records.read_all(BatchRecord, owner)
        if sum(not each.is_ended for each in batches) >= MOST_OPEN:
            raise Problem(429, f"{MOST_OPEN} batches wait already.", None, "too_many_batches", 60.0)
        after = asked.output_expires_after
        batch = BatchRecord(
            id=id_,
            **facts_of(request, self.settings),
            input_file_id=asked.input_file_id,
            endpoint=asked.endpoint,
            completion_window=asked.completion_window,
            expires_at=expires_at,
            files_live_s=after.seconds if after else int(self.settings.batches_ttl_s),
            metadata=asked.metadata,
        )
        with_room(lambda: self.records.put(batch))
        return batch

    def need_batch(self, owner: str, id_: str) -> BatchRecord:
        batch = self.records.read(BatchRecord, owner, id_)
        if batch is None:
            raise Problem(404, f"There is no batch {id_[:80]!r}.", "id", "not_found")
        return batch

    def shown(self, batch: BatchRecord) -> BatchObject:
        asked_at = None if batch.is_ended else self.records.asked_to_cancel(batch.id)
        return BatchObject.of(batch, asked_at)

    def cancel(self, owner: str, id_: str) -> BatchObject:
        cancel(self.records, self.need_batch(owner, id_))
        return self.shown(self.need_batch(owner, id_))

    def picture(self, secret: str, ordinal: int, format: str) -> bytes:
        work = self.records.shared(secret)
        if isinstance(work, BatchRecord):
            picture = answers.picture(self.records.job_store(work.id), ordinal)
            if picture is not None and picture[0].endswith(SUFFIXES[format]):
                return picture[1]
        if isinstance(work, ImageJobRecord) and not work.has_expired(time.time()):
            name = f"{work.id}.{ordinal}.{format}"
            if name in work.pictures:
                return self.records.data(name)
        raise Problem(404, "There is no such result, or no longer.", None, "not_found")


def add_batch_routes(app: FastAPI, reader: RequestReader, settings: ServeSettings) -> None:
    api = BatchApi(Records(settings.batches_dir), settings)
    api.records.prepare()
    add_file_routes(app, api)
    add_routes_of_batches(app, api)
    add_job_routes(app, ImageJobApi(api.records, reader, settings))


def add_file_routes(app: FastAPI, api: BatchApi) -> None:
    @app.post(FILES_PATH, openapi_extra=UPLOAD)
    async def upload_file(request: Request) -> FileObject:
        """Upload a JSONL file of requests. Compatible with OpenAI's Files API."""
        return FileObject.of(await api.upload(request))

    @app.get(FILES_PATH)
    async def list_files(
        request: Request,
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> FileList:
        files = await asyncio.to_thread(api.records.read_all, FileRecord, owner_in(request))
        wanted = [each for each in files if purpose in (None, each.purpose)]
        page, ends = page_of(wanted if order == "asc" else wanted[::-1], after, limit)
        return FileList(data=[FileObject.of(each) for each in page], **ends)

    @app.get(FILES_PATH + "/{file_id}")
    async def retrieve_file(file_id: str, request: Request) -> FileObject:
        file = await asyncio.to_thread(api.need_file, owner_in(request), file_id)
        return FileObject.of(file)

    @app.delete(FILES_PATH + "/{file_id}")
    async def delete_file(file_id: str, request: Request) -> FileDeleted:
        file = await asyncio.to_thread(api.need_file, owner_in(request), file_id)
        drop = partial(api.records.drop_file, owner_in(request), file)
        await asyncio.to_thread(with_room, drop)
        return FileDeleted(id=file.id)

    @app.get(FILES_PATH + "/{file_id}/content", response_class=Response, responses=CONTENT)
    async def read_file(file_id: str, request: Request) -> Response:
        file, parts = await asyncio.to_thread(api.content, owner_in(request), file_id)
        headers = {"content-length": str(file.bytes), "x-content-type-options": "nosniff"}
        return StreamingResponse(parts, media_type="application/jsonl", headers=headers)


def add_routes_of_batches(app: FastAPI, api: BatchApi) -> None:
    @app.post(BATCHES_PATH)
    async def create_batch(body: BatchAsked, request: Request) -> BatchObject:
        """Make pictures of a file's requests. Compatible with OpenAI's Batch API."""
        return await asyncio.to_thread(lambda: api.shown(api.make(body, request)))

    @app.get(BATCHES_PATH)
    async def list_batches(
        request: Request, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> BatchList:
        batches = await asyncio.to_thread(api.records.read_all, BatchRecord, owner_in(request))
        page, ends = page_of(batches[::-1], after, limit)
        shown = await asyncio.to_thread(lambda: [api.shown(each) for each in page])
        return BatchList(data=shown, **ends)

    @app.get(BATCHES_PATH + "/{batch_id}")
    async def retrieve_batch(batch_id: str, request: Request) -> BatchObject:
        owner = owner_in(request)
        return await asyncio.to_thread(lambda: api.shown(api.need_batch(owner, batch_id)))

    @app.post(BATCHES_PATH + "/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> BatchObject:
        """Cancel a batch. Pictures that are already made stay in the output file."""
        return await asyncio.to_thread(api.cancel, owner_in(request), batch_id)

    @app.get("/v1/results/{secret}/{ordinal}.{format}", response_class=Response, responses=PICTURE)
    async def fetch_batch_picture(
        secret: str, ordinal: Ordinal, format: Literal["png", "jpeg", "webp"]
    ) -> Response:
        """A picture of a batch or a job that was asked for as a `url`."""
        data = await asyncio.to_thread(api.picture, secret, ordinal, format)
        headers = {"cache-control": "private, immutable", "x-content-type-options": "nosniff"}
        return Response(data, media_type=f"image/{format}", headers=headers)


def checked_name(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        message = "file: its name must be valid Unicode, without lone surrogates"
        raise invalid("file", message) from None
    return name[:MOST_NAME]


def life_of(anchor: object, seconds: object) -> int | None:
    if anchor is None and seconds is None:
        return None
    text = str(seconds)
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    is_fine = is_number and MIN_LIFE_S <= int(text) <= MAX_LIFE_S
    if anchor != "created_at" or not is_fine:
        needed = f"anchor=created_at and seconds={MIN_LIFE_S} to {MAX_LIFE_S}"
        raise invalid("expires_after", f"expires_after must be {needed}")
    return int(text)
