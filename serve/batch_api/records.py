"""What is known of files and batches, as JSON in a store: a folder, or a bucket.

An owner's records lie in a folder of their own, so that nobody finds another's. A batch's record is
written by the front once, when it is made, and from then on by the runner alone; that it shall be
cancelled is a mark beside it. It knows no HTTP.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from sdxl.files import OutputError
from sdxl.parameter import USUAL_INTERVAL
from serve.batch.store import Store, open_store, token
from serve.front.keys import ApiKey

FILES, BATCHES, DATA, CANCELS, SHARED, OUTBOX, JOBS = (
    *("files", "batches", "data", "cancels", "shared"),
    *("outbox", "jobs"),
)
FOLDERS = (FILES, BATCHES, DATA, CANCELS, SHARED, OUTBOX, JOBS)
ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
SECRET = re.compile(r"[0-9a-f]{48}")
ANYBODY = "anybody"
"""whose everything is where there are no keys"""
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
    """which of one second came first"""
    batch: str = ""
    """whose results it is; they are put together when it is read"""
    part: Part = "output"


@dataclass(frozen=True)
class BatchRecord:
    id: str
    owner: str
    client: str
    """whose share of the replicas it takes"""
    secret: str
    """in the addresses of its pictures, if it has any"""
    origin: str
    """what those addresses begin with"""
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    arrived_s: float
    """which of one second came first"""
    expires_at: int
    files_live_s: int
    metadata: dict[str, str] | None = None
    usual_interval: int | None = USUAL_INTERVAL
    """of deep steps, where a line says nothing of caches; None: by its steps. A batch that began
    before that was so does not say."""
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
    """how many of the owner's batches come first; 0 is being made"""
    eta_s: float | None = None
    images_per_s: float = 0.0

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED


R = TypeVar("R", FileRecord, BatchRecord)


def owner_of(key: ApiKey | None) -> str:
    return ANYBODY if key is None else key.digest[:32]


def id_of(kind: Literal["file-", "batch_", "batch_req_", "evt_"], *facts: object) -> str:
    """The same of the same facts: what is done twice has one name."""
    text = json.dumps([kind, *facts], default=str)
    return kind + hashlib.sha256(text.encode()).hexdigest()[:32]


class Records:
    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self.store: Store = open_store(self.place, token())

    def prepare(self) -> None:
        """Beside all others that have the same place open."""
        self.store.join(*FOLDERS)

    def job_store(self, batch: str) -> Store:
        """Where one batch's job keeps its ledger and its pictures."""
        return open_store(self.job_place(batch), token())

    def job_place(self, batch: str) -> str:
        return f"{self.place}/{JOBS}/{batch}"

    # -- files ------------------------------------------------------------------------------

    def add_file(self, owner: str, file: FileRecord, data: bytes | None = None) -> None:
        if data is not None:
            self.store.put(f"{DATA}/{file.id}", data)
        try:
            self._put(FILES, owner, file)
        except OutputError:
            # A disk that is full now would be so for ever: what no record names nobody can delete.
            if data is not None:
                self.store.remove(f"{DATA}/{file.id}")
            raise

    def file(self, owner: str, id_: str) -> FileRecord | None:
        return self._get(FILES, owner, id_, FileRecord)

    def files(self, owner: str) -> list[FileRecord]:
        return self._all(FILES, owner, FileRecord)

    def data(self, id_: str) -> bytes:
        return self.store.get(f"{DATA}/{id_}")

    def drop_file(self, owner: str, file: FileRecord) -> None:
        self.store.remove(f"{FILES}/{owner}/{file.id}.json")
        if not file.batch:
            self.drop_data(file.id)

    def drop_data(self, id_: str) -> None:
        self.store.remove(f"{DATA}/{id_}")

    def unnamed_data(self) -> set[str]:
        """Data without a record that can be read: it is not written yet, or a crash came between
        the two, or a disk damaged it."""
        data = set(self.store.names(DATA))
        named = {file.id for owner in self.owners(FILES) for file in self.files(owner)}
        return data - named

    # -- batches ----------------------------------------------------------------------------

    def put_batch(self, batch: BatchRecord) -> None:
        self._put(BATCHES, batch.owner, batch)

    def batch(self, owner: str, id_: str) -> BatchRecord | None:
        return self._get(BATCHES, owner, id_, BatchRecord)

    def has_batch(self, owner: str, id_: str) -> bool:
        """True if there is a record, readable or not."""
        return bool(ID.fullmatch(id_)) and self._has(f"{BATCHES}/{owner}/{id_}.json")

    def batches(self, owner: str) -> list[BatchRecord]:
        return self._all(BATCHES, owner, BatchRecord)

    def drop_batch(self, batch: BatchRecord) -> None:
        self.store.remove(f"{BATCHES}/{batch.owner}/{batch.id}.json")
        for name in (f"{CANCELS}/{batch.id}", f"{SHARED}/{batch.secret}"):
            if self._has(name):
                self.store.remove(name)

    def owners(self, folder: str = BATCHES) -> list[str]:
        return self.store.names(folder)

    def batch_ids(self, owner: str) -> list[str]:
        names = self.store.names(f"{BATCHES}/{owner}")
        return [name.removesuffix(".json") for name in names]

    def ask_to_cancel(self, batch: BatchRecord, at: int) -> None:
        self.store.put(f"{CANCELS}/{batch.id}", str(at).encode())

    def asked_to_cancel(self, id_: str) -> int | None:
        try:
            return int(self.store.get(f"{CANCELS}/{id_}"))
        except FileNotFoundError:
            return None

    def share(self, batch: BatchRecord) -> None:
        """Its pictures are found by its secret alone, from now on."""
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

    def _put(self, folder: str, owner: str, record: FileRecord | BatchRecord) -> None:
        text = json.dumps(asdict(record), ensure_ascii=True)
        self.store.put(f"{folder}/{owner}/{record.id}.json", text.encode())

    def _get(self, folder: str, owner: str, id_: str, kind: type[R]) -> R | None:
        if not ID.fullmatch(id_):
            return None
        try:
            return TypeAdapter(kind).validate_json(self.store.get(f"{folder}/{owner}/{id_}.json"))
        except (FileNotFoundError, ValidationError):
            return None

    def _all(self, folder: str, owner: str, kind: type[R]) -> list[R]:
        """The oldest first."""
        names = self.store.names(f"{folder}/{owner}")
        found = (self._get(folder, owner, name.removesuffix(".json"), kind) for name in names)
        return sorted(filter(None, found), key=lambda each: each.arrived_s)

    def _has(self, name: str) -> bool:
        try:
            self.store.get(name)
        except FileNotFoundError:
            return False
        return True
