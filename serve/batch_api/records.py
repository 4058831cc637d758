"""The records of files, batches and jobs, as JSON in a store: a folder, or a bucket.

Each owner has a folder, so that no owner finds another's records. A front end creates the record of
a batch or job; afterwards only the runner writes it. To cancel, a front end writes another file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from sdxl.files import OutputError
from serve.batch.store import Store, open_store, token
from serve.errors import Problem
from serve.front.keys import ApiKey

log = logging.getLogger(__name__)

POLL_S, POLL_BUCKET_S = 0.5, 5.0
FOLDERS = ("files", "batches", "image_jobs", "data", "cancels", "shared", "outbox", "jobs")
FILES, BATCHES, IMAGE_JOBS, DATA, CANCELS, SHARED, OUTBOX, JOBS = FOLDERS
ID = re.compile(r"(file-|batch_|image_job_)[0-9a-f]{32}")
SECRET = re.compile(r"[0-9a-f]{48}")
ANYBODY = "anybody"
"""The only owner of a service without keys."""
Part = Literal["output", "errors"]
Status = Literal[
    "queued",
    "validating",
    "in_progress",
    "finalizing",
    "failed",
    "completed",
    "expired",
    "cancelled",
]
ENDED = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True)
class FileRecord:
    folder: ClassVar[str] = FILES

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int
    arrived_s: float
    """orders files of the same second"""
    batch: str = ""
    """the batch of a result file, which is made while it is read"""
    part: Part = "output"

    @classmethod
    def new(
        cls, id_: str, filename: str, purpose: str, size: int, lives_s: int, **facts: Any
    ) -> FileRecord:
        now_s = time.time()
        times = int(now_s), int(now_s) + lives_s, now_s
        return cls(id_, filename, purpose, size, *times, **facts)


@dataclass(frozen=True, kw_only=True)
class WorkRecord:
    """The common fields of batches and jobs."""

    folder: ClassVar[str]
    event: ClassVar[str]
    """the start of its webhook's name"""
    noun: ClassVar[str]

    id: str
    owner: str
    client: str
    """the client whose share of the replicas it uses"""
    secret: str
    """part of the pictures' URLs"""
    origin: str
    """the start of the pictures' URLs"""
    created_at: int
    arrived_s: float
    """orders records of the same second"""
    model: str = ""
    status: Status
    in_progress_at: int | None = None
    ended_at: int | None = None
    position: int | None = None
    """number of records before it in the queue; 0: running"""
    eta_s: float | None = None

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, kw_only=True)
class BatchRecord(WorkRecord):
    folder: ClassVar[str] = BATCHES
    event: ClassVar[str] = "batch"
    noun: ClassVar[str] = "batch"

    input_file_id: str
    endpoint: str
    completion_window: str
    expires_at: int
    files_live_s: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    """requests"""
    completed: int = 0
    failed: int = 0
    pictures: int = 0
    pictures_done: int = 0
    prompt_tokens: int = 0
    images_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ImageJobRecord(WorkRecord):
    """A job. Its request and pictures are stored as data."""

    folder: ClassVar[str] = IMAGE_JOBS
    event: ClassVar[str] = "image.job"
    noun: ClassVar[str] = "job"

    seed: int
    """for a request without a seed: a job that runs again makes the same pictures"""
    lives_s: int
    """how long the job is kept after its end"""
    status: Status = "queued"
    progress: float = 0.0
    """share of the steps that are taken"""
    result: dict[str, Any] | None = None
    """the answer of `/v1/images/generations`, without the pictures"""
    error: dict[str, Any] | None = None

    def has_expired(self, now_s: float) -> bool:
        return self.ended_at is not None and self.ended_at + self.lives_s < now_s

    @property
    def pictures(self) -> list[str]:
        if not self.result:
            return []
        suffix = self.result["output_format"]
        return [f"{self.id}.{ordinal}.{suffix}" for ordinal in range(len(self.result["data"]))]


adapter_of: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""Making one takes a millisecond."""
W = TypeVar("W", bound=WorkRecord)
R = TypeVar("R", bound=FileRecord | WorkRecord)


def owner_of(key: ApiKey | None) -> str:
    return ANYBODY if key is None else key.digest[:32]


Prefix = Literal["file-", "batch_", "batch_req_", "image_job_", "evt_"]


def id_of(kind: Prefix, *facts: object) -> str:
    """Derive an id from facts, so that a repeated action has the same id."""
    text = json.dumps([kind, *facts], default=str)
    return kind + hashlib.sha256(text.encode()).hexdigest()[:32]


class Records:
    """Reads and writes records. An unreadable record raises Problem, and is not listed."""

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self.store: Store = open_store(self.place, token())

    def prepare(self) -> None:
        self.store.join(*FOLDERS)

    def job_store(self, batch: str) -> Store:
        """Open the place of a batch's ledger and pictures."""
        return open_store(self.job_place(batch), token())

    def job_place(self, batch: str) -> str:
        return f"{self.place}/{JOBS}/{batch}"

    def owners(self, folder: str = BATCHES) -> list[str]:
        return self.store.names(folder)

    # -- files ------------------------------------------------------------------------------

    def add_file(self, owner: str, file: FileRecord, data: bytes | None = None) -> None:
        if data is not None:
            self.store.put(f"{DATA}/{file.id}", data)
        try:
            self._put(owner, file)
        except OutputError:
            # Without a record no client can delete the data, and the disk would stay full.
            if data is not None:
                self.drop_data(file.id)
            raise

    def data(self, id_: str) -> bytes:
        return self.store.get(f"{DATA}/{id_}")

    def drop_file(self, owner: str, file: FileRecord) -> None:
        self.store.remove(path_of(FILES, owner, file.id))
        if not file.batch:
            self.drop_data(file.id)

    def drop_data(self, id_: str) -> None:
        self.store.remove(f"{DATA}/{id_}")

    def orphaned_data(self) -> set[str]:
        """Return the names of data whose record is not yet written, or lost."""
        ids = {
            id_
            for folder in (FILES, IMAGE_JOBS)
            for owner in self.owners(folder)
            for id_ in self.ids(folder, owner)
        }
        return {name for name in self.store.names(DATA) if name.partition(".")[0] not in ids}

    # -- batches and jobs -------------------------------------------------------------------

    def put(self, work: WorkRecord) -> None:
        self._put(work.owner, work)

    def drop(self, work: WorkRecord) -> None:
        self.store.remove(path_of(work.folder, work.owner, work.id))
        self.store.remove(f"{CANCELS}/{work.id}")
        self.store.remove(f"{SHARED}/{work.secret}")

    def ask_to_cancel(self, work: WorkRecord) -> None:
        self.store.put(f"{CANCELS}/{work.id}", str(int(time.time())).encode())

    def cancelled(self) -> set[str]:
        """Return the ids of batches and jobs that clients have cancelled."""
        return set(self.store.names(CANCELS))

    def asked_to_cancel(self, id_: str) -> int | None:
        """Return when a client cancelled it, or None."""
        try:
            return int(self.store.get(f"{CANCELS}/{id_}"))
        except FileNotFoundError:
            return None

    def share(self, work: WorkRecord) -> None:
        """Let anyone with the secret fetch the pictures."""
        self.store.put(f"{SHARED}/{work.secret}", f"{work.owner}/{work.id}".encode())

    def shared(self, secret: str) -> WorkRecord | None:
        if not SECRET.fullmatch(secret):
            return None
        try:
            owner, _, id_ = self.store.get(f"{SHARED}/{secret}").decode().partition("/")
        except FileNotFoundError:
            return None
        return self.read(kind_of(id_), owner, id_)

    # -- JSON -------------------------------------------------------------------------------

    def ids(self, folder: str, owner: str) -> list[str]:
        """Return the ids of all of an owner's records, also unreadable ones."""
        return [name.removesuffix(".json") for name in self.store.names(f"{folder}/{owner}")]

    def read(self, kind: type[R], owner: str, id_: str) -> R | None:
        if not ID.fullmatch(id_):
            return None
        try:
            data = self.store.get(path_of(kind.folder, owner, id_))
            record: R = adapter_of(kind).validate_json(data)
            return record
        except FileNotFoundError:
            return None
        except ValidationError as error:
            message = f"The record of {id_} cannot be read; the service's administrator can help."
            raise Problem(503, message, "id", "record_unreadable") from error

    def read_all(self, kind: type[R], owner: str) -> list[R]:
        """Return the readable records, the oldest first."""
        records = list[R]()
        for id_ in self.ids(kind.folder, owner):
            with suppress(Problem):
                if (record := self.read(kind, owner, id_)) is not None:
                    records.append(record)
        return sorted(records, key=lambda record: record.arrived_s)

    def _put(self, owner: str, record: FileRecord | WorkRecord) -> None:
        data = json.dumps(asdict(record)).encode()
        self.store.put(path_of(record.folder, owner, record.id), data)


def kind_of(id_: str) -> type[BatchRecord] | type[ImageJobRecord]:
    return BatchRecord if id_.startswith("batch_") else ImageJobRecord


def path_of(folder: str, owner: str, id_: str) -> str:
    return f"{folder}/{owner}/{id_}.json"


class OpenRecords(Generic[W]):
    """Finds the batches or jobs that have not ended, for their runner."""

    def __init__(self, records: Records, kind: type[W]) -> None:
        self.records, self.kind = records, kind
        self._ended, self._unreadable = set[str](), set[str]()

    @property
    def pause_s(self) -> float:
        return POLL_BUCKET_S if "://" in self.records.place else POLL_S

    def read(self) -> list[W]:
        """Return the open records, the oldest first."""
        open_records, found = list[W](), set[str]()
        for owner in self.records.owners(self.kind.folder):
            for id_ in self.records.ids(self.kind.folder, owner):
                found.add(id_)
                if id_ in self._ended:
                    continue
                try:
                    record = self.records.read(self.kind, owner, id_)
                except Problem as error:
                    self._report(owner, id_, error)
                    continue
                if record is not None and record.is_ended:
                    self._ended.add(id_)
                elif record is not None:
                    open_records.append(record)
        # A removed one may be made again.
        self._ended &= found
        return sorted(open_records, key=lambda record: record.arrived_s)

    def _report(self, owner: str, id_: str, error: Problem) -> None:
        if id_ in self._unreadable:
            return
        self._unreadable.add(id_)
        file = path_of(self.kind.folder, owner, id_)
        cause = " ".join(str(error.__cause__).split())[:150]
        message = "%s/%s cannot be read, so it never ends; delete the file (%s)"
        log.error(message, self.records.place, file, cause)
