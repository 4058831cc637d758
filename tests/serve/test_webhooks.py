"""Signed events about ended batches, read by two independent packages."""

from __future__ import annotations

import base64
import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from standardwebhooks import Webhook

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve.batch_api.records import Records
from serve.batch_api.webhooks import Endpoint, Outbox, read_endpoints
from tests.http_servers import Quiet, serving
from tests.serve.test_batch_api import batch_api, line
from tests.waiting import wait_until

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


class Receiver(Quiet):
    heard: list[tuple[dict[str, str], str]]
    refusals: int

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        type(self).heard.append(({k.lower(): v for k, v in self.headers.items()}, body))
        type(self).refusals -= 1
        self.send_response(503 if type(self).refusals >= 0 else 204)
        self.end_headers()


@contextmanager
def receiver(refusals: int = 0) -> Iterator[tuple[str, Any]]:
    handler: Any = type("Heard", (Receiver,), {"heard": [], "refusals": refusals})
    with serving(handler, kind=HTTPServer) as url:
        yield f"{url}/hook", handler


def outbox_to(folder: Path, url: str, *pauses_s: float) -> Outbox:
    (folder / "webhooks").write_text(f"# ours\n{url} {SECRET}\n")
    records = Records(str(folder / "batches"))
    records.prepare()
    return Outbox(records, read_endpoints(str(folder / "webhooks")), pauses_s)


@pytest.mark.slow
def test_the_end_of_a_batch_is_sent_signed_until_it_is_accepted(tmp_path: Path) -> None:
    with receiver(refusals=2) as (url, heard):
        outbox = outbox_to(tmp_path, url, 0.0, 0.0, 0.0)
        with batch_api(tmp_path, outbox=outbox) as api:
            done, failed = api.begin(line("a")), api.begin("{broken")
            outbox.start()
            api.ended(done), api.ended(failed)
            wait_until(lambda: not outbox.records.store.names("outbox"))
            outbox.close()
    events, client = {}, openai.OpenAI(api_key="x")
    for headers, body in heard.heard:
        event: Any = client.webhooks.unwrap(body, headers, secret=SECRET)
        assert Webhook(SECRET).verify(body, headers) == json.loads(body)
        assert event.id == headers["webhook-id"] and event.object == "event"
        events[event.type] = event.data.id
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body.replace("batch.", "botch."), headers, secret=SECRET)
    assert events == {"batch.completed": done.id, "batch.failed": failed.id}
    assert len(heard.heard) == 4, "two events and two refusals"


def test_an_event_that_is_always_refused_is_given_up(tmp_path: Path) -> None:
    with receiver(refusals=100) as (url, heard):
        outbox = outbox_to(tmp_path, url, 0.0, 0.0)
        with batch_api(tmp_path, outbox=outbox) as api:
            api.ended(api.begin("{broken"))
            for _ in range(6):
                outbox.deliver()
    assert len(heard.heard) == 3 and not outbox.records.store.names("outbox")


def test_an_address_that_fails_is_tried_once_a_round_and_delays_no_other(tmp_path: Path) -> None:
    with receiver(refusals=10**6) as (url, refuses), receiver() as (other, takes):
        outbox = outbox_to(tmp_path, url, 60.0)
        outbox.endpoints = [Endpoint(url, SECRET), Endpoint(other, SECRET)]
        for number in range(3):
            work: Any = SimpleNamespace(
                owner="anybody",
                id=f"batch_{number:032}",
                event="batch",
                status="failed",
                ended_at=1,
            )
            outbox.add(work)
        outbox.deliver()
        names = outbox.records.store.names("outbox")
        left = [json.loads(outbox.records.store.get(f"outbox/{name}")) for name in names]
        assert (len(takes.heard), len(refuses.heard)) == (3, 1)
        assert sorted(each["tries"] for each in left) == [0, 0, 1]
        outbox.deliver()
        assert len(refuses.heard) == 2


def test_a_full_disk_delays_no_other_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, data: bytes) -> None:
        raise OutputError(name, OSError(errno.ENOSPC, "No space left on device"))

    with receiver(refusals=10**6) as (url, refuses), receiver() as (other, takes):
        outbox = outbox_to(tmp_path, url, 0.0, 0.0)
        outbox.endpoints = [Endpoint(url, SECRET), Endpoint(other, SECRET)]
        places = iter("ab")
        monkeypatch.setattr("serve.batch_api.webhooks.id_of", lambda kind, *_: next(places, "id"))
        event: Any = {"id": "evt_1", "created_at": 1}
        monkeypatch.setattr("serve.batch_api.webhooks.event_of", lambda batch: event)
        outbox.add(SimpleNamespace(owner="anybody", id="batch_" + "0" * 32))  # type: ignore[arg-type]
        assert outbox.records.store.names("outbox") == ["a.json", "b.json"]
        monkeypatch.setattr(outbox.records.store, "put", full)
        for _ in range(3):
            outbox.deliver()
    assert len(takes.heard) == 1, "it comes after the event that cannot be stored"
    assert len(refuses.heard) == 1, "a retry comes after a pause"
    assert outbox.records.store.names("outbox") == ["a.json"]


@pytest.mark.parametrize(
    "row", ["http://a", f"ftp://a {SECRET}", "http://a whsec_c2hvcnQ=", "http://a secret"]
)
def test_a_wrong_file_of_addresses_keeps_its_secret(tmp_path: Path, row: str) -> None:
    (tmp_path / "webhooks").write_text(row)
    with pytest.raises(InvalidParams, match="webhooks, line 1") as caught:
        read_endpoints(str(tmp_path / "webhooks"))
    assert row.partition(" ")[2] not in str(caught.value) or " " not in row
