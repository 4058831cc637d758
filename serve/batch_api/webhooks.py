"""Notifies the operator's addresses when batches and jobs end, signed as standardwebhooks.com says.

Events stay in the store until they are delivered or given up, so a restart loses none; a repeated
event has the same id. Addresses come only from the operator's file, and no redirect is followed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from pydantic import ValidationError

from sdxl.files import read_entries
from sdxl.params import InvalidParams
from serve.batch_api.records import OUTBOX, Records, WorkRecord, adapter_of, id_of, kind_of
from serve.errors import Problem

log = logging.getLogger(__name__)

PREFIX = "whsec_"
MIN_SECRET = 24
"""Bytes; the standard's minimum."""
PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0)
"""Pauses after failed attempts; then the event is given up."""
TIMEOUT_S = 10.0
POLL_S = 1.0
RETRY_S = 60.0
"""Pause after an event whose state could not be stored, as on a full disk."""


@dataclass(frozen=True)
class Endpoint:
    url: str
    secret: str = field(repr=False)

    @property
    def key(self) -> bytes:
        return base64.b64decode(self.secret.removeprefix(PREFIX), validate=True)


@dataclass(frozen=True)
class Pending:
    """An event for one address."""

    id: str
    url: str
    owner: str
    batch: str
    """id of the batch or job"""
    body: str
    tries: int = 0
    due_s: float = 0.0


def read_endpoints(path: str) -> list[Endpoint]:
    """Read the operator's file: a line is `<URL> <whsec_…>`."""
    lines = read_entries("webhooks", path, "addresses") if path else []
    return [endpoint_of(text.split(), place) for place, text in lines]


def endpoint_of(words: Sequence[str], place: str) -> Endpoint:
    # The message must not show the line, which contains a secret.
    needed = "must hold `<http URL> whsec_<base64 of 24 bytes or more>`"
    if len(words) != 2 or not words[0].startswith(("http://", "https://")):
        raise InvalidParams("webhooks", place, needed)
    endpoint = Endpoint(*words)
    try:
        is_long = len(endpoint.key) >= MIN_SECRET
    except (binascii.Error, ValueError):
        is_long = False
    if not (is_long and endpoint.secret.startswith(PREFIX)):
        raise InvalidParams("webhooks", place, needed)
    return endpoint


def signed(endpoint: Endpoint, id_: str, at: int, body: str) -> dict[str, str]:
    text = f"{id_}.{at}.{body}".encode()
    digest = hmac.new(endpoint.key, text, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "webhook-id": id_,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


@dataclass
class Outbox:
    records: Records
    endpoints: Sequence[Endpoint]
    pauses_s: Sequence[float] = PAUSES_S

    def __post_init__(self) -> None:
        self._leave = threading.Event()
        self._retry_s: dict[str, float] = {}
        self._thread = threading.Thread(target=self._deliver_forever, name="webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._leave.set()
        self._thread.join(TIMEOUT_S + POLL_S)

    def add(self, work: WorkRecord) -> None:
        """Store the event of an ended batch or job, before its record is written; `deliver` waits
        for the record."""
        event = event_of(work)
        id_, body = str(event["id"]), json.dumps(event)
        for endpoint in self.endpoints:
            pending = Pending(id_, endpoint.url, work.owner, work.id, body)
            self._keep(id_of("evt_", id_, endpoint.url), pending)

    def deliver(self) -> None:
        """Send what is due; to an address that fails, the rest in later calls, so that it delays no
        other for long."""
        failing = set[str]()
        for name in self.records.store.names(OUTBOX):
            place = name.removesuffix(".json")
            if time.monotonic() >= self._retry_s.get(place, 0.0):
                try:
                    event = self._read(place)
                    if event is None or event.url in failing or event.due_s > time.time():
                        continue
                    if self._has_ended(event):
                        self._try(place, event, failing)
                except Exception:
                    # The event's state could not be stored; retrying at once would repeat it.
                    log.exception("webhooks: %s: retry in %g s", place, RETRY_S)
                    self._retry_s[place] = time.monotonic() + RETRY_S

    def _deliver_forever(self) -> None:
        while not self._leave.wait(POLL_S):
            try:
                self.deliver()
            except Exception:
                log.exception("webhooks: cannot read the outbox")

    def _try(self, place: str, event: Pending, failing: set[str]) -> None:
        endpoint = next((each for each in self.endpoints if each.url == event.url), None)
        if endpoint is None:
            log.warning("webhook %s: %s is no longer configured", event.id, event.url)
        elif error := send(endpoint, event, int(time.time())):
            failing.add(event.url)
            if event.tries < len(self.pauses_s):
                pause_s = self.pauses_s[event.tries]
                message = "webhook %s: %s: %s; retry in %g s"
                log.warning(message, event.id, event.url, error, pause_s)
                due_s = time.time() + pause_s
                self._keep(place, replace(event, tries=event.tries + 1, due_s=due_s))
                return
            log.error("webhook %s: %s: %s; given up", event.id, event.url, error)
        self.records.store.remove(f"{OUTBOX}/{place}.json")

    def _has_ended(self, event: Pending) -> bool:
        with suppress(Problem):
            work = self.records.read(kind_of(event.batch), event.owner, event.batch)
            return work is None or work.is_ended
        # The record is unreadable, so the event decides.
        return True

    def _keep(self, place: str, event: Pending) -> None:
        self.records.store.put(f"{OUTBOX}/{place}.json", json.dumps(asdict(event)).encode())

    def _read(self, place: str) -> Pending | None:
        try:
            data = self.records.store.get(f"{OUTBOX}/{place}.json")
            event: Pending = adapter_of(Pending).validate_json(data)
            return event
        except (FileNotFoundError, ValidationError):
            return None


def event_of(work: WorkRecord) -> dict[str, object]:
    kind = f"{work.event}.{work.status}"
    return {
        "id": id_of("evt_", work.id, kind),
        "object": "event",
        "created_at": work.ended_at,
        "type": kind,
        "data": {"id": work.id},
    }


def send(endpoint: Endpoint, event: Pending, at: int) -> str:
    """Send an event; return the error, or "" if it was accepted."""
    import httpx

    headers = signed(endpoint, event.id, at, event.body)
    try:
        answer = httpx.post(endpoint.url, content=event.body, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return type(error).__name__
    return "" if answer.is_success else f"it answered {answer.status_code}"
