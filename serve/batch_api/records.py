"""The records of files and batches, as JSON in a store: a folder, or a bucket.

Each owner has a folder, so that no owner finds another's records. The front writes a batch's record
once, when it is made; from then on only the runner does. A cancel is a mark beside it.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from sdxl.files import OutputError
from sdxl.parameter import USUAL_INTERVAL
from serve.batch.store import Store, open_store, token
from serve.errors import Problem
from serve.front.keys import ApiKey

FOLDERS = ("files", "batches", "data", "cancels", "shared", "outbox", "jobs")
FILES, BATCHES, DATA, CANCELS, SHARED, OUTBOX, JOBS = FOLDERS
ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
SECRET = re.compile(r"[0-9a-f]{48}")
ANYBODY = "anybody"
"""the one owner of a service without keys"""
Part = Literal["output", "errors"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelled"
]
ENDED = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True)
class FileRecord:
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None
    arrived_s: float
    """orders the files of one second"""
    batch: str = ""
    """of a result file: its batch. The file is put together when it is read"""
    part: Part = "output"


@dataclass(frozen=True)
class BatchRecord:
    id: str
    owner: str
    client: str
    """whose share of the replicas it takes"""
    secret: str
    """part of its pictures' URLs"""
    origin: str
    """the start of those URLs"""
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    arrived_s: float
    """orders the batches of one second"""
    expires_at: int
    files_live_s: int
    metadata: dict[str, str] | None = None
    usual_interval: int | None = USUAL_INTERVAL
    """of deep steps, if a line sets no caching; None: it follows from the line's steps. Older
    batches have the default."""
    model: str = ""
    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None
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
    position: int | None = None
    """the number of the owner's batches before it; 0 is running"""
    eta_s: float | None = None
    images_per_s: float = 0.0

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED


R = TypeVar("R", FileRecord, BatchRecord)


def owner_of(key: ApiKey | None) -> str:
    return ANYBODY if key is None else key.digest[:32]


def id_of(kind: Literal["file-", "batch_", "batch_req_", "evt_"], *facts: object) -> str:
    """Derive an id from facts, so that a repeated action has the same id."""
    text = json.dumps([kind, *facts], default=str)
    return kind + hashlib.sha256(text.encode()).hexdigest()[:32]


class Records:
    """A record that cannot be read is a Problem when one asks for it, and is not listed."""

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self.store: Store = open_store(self.place, token())
        self._readable = set[str]()
        """files whose record was JSON once: records of files never change"""

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
            self._put(FILES, owner, file)
        except OutputError:
            # Without a record no client can delete the data, and the disk would stay full.
            if data is not None:
                self.drop_data(file.id)
            raise

    def file(self, owner: str, id_: str) -> FileRecord | None:
        return self._get(FILES, owner, id_, FileRecord)

    def files(self, owner: str) -> list[FileRecord]:
        return self._all(FILES, owner, FileRecord)

    def data(self, id_: str) -> bytes:
        return self.store.get(f"{DATA}/{id_}")

    def drop_file(self, owner: str, file: FileRecord) -> None:
        self.store.remove(path_of(FILES, owner, file.id))
        if not file.batch:
            self.drop_data(file.id)

    def drop_data(self, id_: str) -> None:
        self.store.remove(f"{DATA}/{id_}")

    def unnamed_data(self) -> set[str]:
        """Return the ids of data whose record is missing or is not JSON: it is not yet written, or
        was lost. A record of another version keeps its data."""
        data = set(self.store.names(DATA))
        owners = {id_: owner for owner in self.owners(FILES) for id_ in self.ids(FILES, owner)}
        self._readable &= data
        for id_ in data & owners.keys() - self._readable:
            with suppress(FileNotFoundError, ValueError):
                json.loads(self.store.get(path_of(FILES, owners[id_], id_)))
                self._readable.add(id_)
        return data - (self._readable & owners.keys())

    # -- batches ----------------------------------------------------------------------------

    def put_batch(self, batch: BatchRecord) -> None:
        self._put(BATCHES, batch.owner, batch)

    def batch(self, owner: str, id_: str) -> BatchRecord | None:
        return self._get(BATCHES, owner, id_, BatchRecord)

    def batches(self, owner: str) -> list[BatchRecord]:
        return self._all(BATCHES, owner, BatchRecord)

    def drop_batch(self, batch: BatchRecord) -> None:
        self.store.remove(path_of(BATCHES, batch.owner, batch.id))
        self.store.remove(f"{CANCELS}/{batch.id}")
        self.store.remove(f"{SHARED}/{batch.secret}")

    def ask_to_cancel(self, batch: BatchRecord, at: int) -> None:
        self.store.put(f"{CANCELS}/{batch.id}", str(at).encode())

    def asked_to_cancel(self, id_: str) -> int | None:
        try:
            return int(self.store.get(f"{CANCELS}/{id_}"))
        except FileNotFoundError:
            return None

    def share(self, batch: BatchRecord) -> None:
        """Let anyone who has the batch's secret fetch its pictures."""
        self.store.put(f"{SHARED}/{batch.secret}", f"{batch.owner}/{batch.id}".encode())

    def shared(self, secret: str) -> BatchRecord | None:
        if not SECRET.fullmatch(secret):
            return None
        try:
            owner, _, id_ = self.store.get(f"{SHARED}/{secret}").decode().partition("/")
        except FileNotFoundError:
            return None
        return self.batch(owner, id_)

    # -- JSON -------------------------------------------------------------------------------

    def ids(self, folder: str, owner: str) -> list[str]:
        """List an owner's records, readable or not."""
        return [name.removesuffix(".json") for name in self.store.names(f"{folder}/{owner}")]

    def _put(self, folder: str, owner: str, record: FileRecord | BatchRecord) -> None:
        self.store.put(path_of(folder, owner, record.id), json.dumps(asdict(record)).encode())

    def _get(self, folder: str, owner: str, id_: str, kind: type[R]) -> R | None:
        if not ID.fullmatch(id_):
            return None
        try:
            data = self.store.get(path_of(folder, owner, id_))
            return TypeAdapter(kind).validate_json(data)
        except FileNotFoundError:
            return None
        except ValidationError as error:
            message = f"The record of {id_} cannot be read; the service's administrator can help."
            raise Problem(503, message, "id", "record_unreadable") from error

    def _all(self, folder: str, owner: str, kind: type[R]) -> list[R]:
        """Return the readable records, the oldest first."""
        records = list[R]()
        for id_ in self.ids(folder, owner):
            with suppress(Problem):
                if (record := self._get(folder, owner, id_, kind)) is not None:
                    records.append(record)
        return sorted(records, key=lambda record: record.arrived_s)


def path_of(folder: str, owner: str, id_: str) -> str:
    return f"{folder}/{owner}/{id_}.json"
