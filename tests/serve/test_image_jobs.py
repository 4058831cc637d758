"""Jobs: requests for pictures that are accepted now and made later, over a worker on fakes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdxl.images import read_parameters
from serve.batch_api import image_jobs
from serve.batch_api.records import ENDED, ImageJobRecord
from serve.batch_api.runner import sweep, sweep_data
from serve.front import answering
from tests.serve.servers import GENERATE, error_of, file_of_keys
from tests.serve.test_api import picture
from tests.serve.test_batch_api import BatchService, batch_api, line
from tests.serve.test_edits import EDIT, data_url, hole, png
from tests.serve.test_webhooks import outbox_to, receiver
from tests.waiting import wait_until

JOBS = "/v1/images/jobs"
ASKED = {"prompt": "a red circle", "steps": 4, "seed": 7}
LONG = {"prompt": "a red circle", "steps": 100, "cache_interval": 1, "seed": 7}
TICK_S = 0.05


@dataclass
class JobClient:
    http: httpx.Client
    service: BatchService

    def begin(self, headers: Any = None, **body: Any) -> str:
        answer = self.http.post(JOBS, json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        assert answer.json()["status"] == "queued"
        return str(answer.json()["id"])

    def read(self, id_: str) -> dict[str, Any]:
        answer = self.http.get(f"{JOBS}/{id_}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ended(self, id_: str) -> dict[str, Any]:
        wait_until(lambda: self.read(id_)["status"] in ENDED, details=lambda: self.read(id_))
        return self.read(id_)

    def started(self, id_: str) -> dict[str, Any]:
        wait_until(lambda: self.read(id_)["progress"] > 0)
        return self.read(id_)


@contextmanager
def jobs(folder: Path, key: str = "x", **options: Any) -> Iterator[JobClient]:
    with batch_api(folder, key=key, **options) as service:
        url = str(service.client.base_url).removesuffix("/v1/")
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
            yield JobClient(http, service)


def pictures(body: dict[str, Any]) -> list[bytes]:
    return [picture(data) for data in body["data"]]


def test_a_job_makes_the_pictures_of_the_same_request(tmp_path: Path) -> None:
    edit = {**ASKED, "images": [{"image_url": data_url(png())}], "strength": 0.5}
    masked = {"images": [{"image_url": data_url(png(160, 96))}], "mask_padding": 8}
    masked["mask"] = {"image_url": data_url(hole(160, 96))}
    several = {**ASKED, "n": 2, "output_format": "webp"}
    with jobs(tmp_path) as api:
        for path, body in ((GENERATE, several), (EDIT, edit), (EDIT, ASKED | masked)):
            job = api.ended(api.begin(**body))
            assert (job["status"], job["progress"], job["error"]) == ("completed", 1.0, None)
            assert job["expires_at"] == job["ended_at"] + 3600 and job["model"] == "sdxl-mini"
            assert job["created_at"] <= job["in_progress_at"] <= job["ended_at"]
            direct = api.http.post(path, json=body).json()
            assert pictures(job["result"]) == pictures(direct)
            assert job["result"].keys() == direct.keys()
            assert job["result"]["size"] == direct["size"]


def test_a_job_without_a_seed_has_one(tmp_path: Path) -> None:
    with jobs(tmp_path) as api:
        job = api.ended(api.begin(prompt="a red circle", steps=2))
        (data,), (file,) = job["result"]["data"], pictures(job["result"])
        assert read_parameters(file)["seed"] == data["seed"]


def test_the_urls_of_a_job_give_its_pictures(tmp_path: Path) -> None:
    with jobs(tmp_path) as api:
        job = api.ended(api.begin(**ASKED, response_format="url", output_format="jpeg"))
        (data,) = job["result"]["data"]
        got = httpx.get(data["url"])
        assert got.headers["content-type"] == "image/jpeg" and "b64_json" not in data
        assert read_parameters(got.content)["seed"] == 7
        for other in (".png", ".webp"):
            assert httpx.get(data["url"].replace(".jpeg", other)).status_code == 404
        listed = api.http.get(JOBS).json()
        assert listed["data"] == [{**job, "result": None}] and not listed["has_more"]


WRONG: list[tuple[Any, int, str | None]] = [
    ({**ASKED, "stream": True}, 400, "stream"),
    ({**ASKED, "expand_prompt": True}, 400, "expand_prompt"),
    ({**ASKED, "n": 11}, 400, "n"),
    ({**ASKED, "strength": 0.5}, 400, "strength"),
    ({**ASKED, "steps": 101}, 400, "steps"),
    ({**ASKED, "webhook": "http://127.0.0.1/"}, 400, "webhook"),
    ({**ASKED, "model": "other"}, 404, "model"),
    ({"steps": 2}, 400, "prompt"),
    ([], 400, None),
    ({**ASKED, "images": []}, 400, "images"),
]


def test_a_wrong_request_is_refused_and_makes_no_job(tmp_path: Path) -> None:
    with jobs(tmp_path) as api:
        for body, status, param in WRONG:
            answer = api.http.post(JOBS, json=body)
            assert (answer.status_code, error_of(answer)["param"]) == (status, param), answer.text
        headers = {"content-type": "multipart/form-data"}
        for content in (b"[" * 100_000, json.dumps(ASKED).encode("utf-16")):
            answer = api.http.post(JOBS, content=content, headers=headers)
            assert answer.status_code == 415, answer.text
        assert api.http.get(JOBS).json()["data"] == []
        assert api.service.jobs.records.store.names("data") == []


def test_a_cancelled_job_frees_the_device_and_stays_cancelled(tmp_path: Path) -> None:
    with jobs(tmp_path, tick_s=TICK_S) as api:
        id_ = api.begin(**LONG)
        api.started(id_)
        assert api.http.delete(f"{JOBS}/{id_}").json()["status"] == "cancelling"
        job = api.ended(id_)
        assert (job["status"], job["result"], job["eta_s"]) == ("cancelled", None, None)
        assert api.service.worker.is_idle
        assert api.http.delete(f"{JOBS}/{id_}").json()["status"] == "cancelled"
        done = api.ended(api.begin(**ASKED))
        refused = api.http.delete(f"{JOBS}/{done['id']}")
        assert (refused.status_code, error_of(refused)["code"]) == (409, "job_ended")
        missing = api.http.delete(f"{JOBS}/image_job_{0:032}")
        assert missing.status_code == 404


def test_a_job_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_jobs, "AT_ONCE", 1)
    with jobs(tmp_path, tick_s=TICK_S) as api:
        first, second = api.begin(**LONG), api.begin(**LONG)
        job = api.started(first)
        assert job["status"] == "in_progress" and 0 < job["progress"] < 1
        assert job["eta_s"] > 0 and job["position"] == 0
        wait_until(lambda: api.read(second)["position"] == 1)
        assert api.read(second)["status"] == "queued"
        for id_ in (first, second):
            api.http.delete(f"{JOBS}/{id_}")


def test_a_restart_runs_open_jobs_again_and_keeps_results(tmp_path: Path) -> None:
    with jobs(tmp_path, tick_s=TICK_S) as api:
        done, running = api.ended(api.begin(**ASKED)), api.begin(**LONG)
        api.started(running)
        waiting = api.begin(**ASKED)
    with jobs(tmp_path) as api:
        assert api.read(done["id"]) == done
        assert pictures(api.ended(waiting)["result"]) == pictures(done["result"])
        direct = api.http.post(GENERATE, json=LONG).json()
        assert pictures(api.ended(running)["result"]) == pictures(direct)


def test_the_end_of_a_job_is_sent_to_the_operators_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "GRACE_S", 0.2)
    with receiver() as (url, heard):
        outbox = outbox_to(tmp_path, url)
        with jobs(tmp_path, outbox=outbox) as api:
            outbox.start()
            done = api.ended(api.begin(**ASKED))
            late = api.ended(api.begin(**LONG, deadline_s=0.001))
            assert (late["status"], late["result"]) == ("failed", None)
            assert late["error"]["param"] == "deadline_s"
            wait_until(lambda: len(heard.heard) == 2)
            outbox.close()
    events = [json.loads(body) for _, body in heard.heard]
    ids = {event["type"]: event["data"]["id"] for event in events}
    assert ids == {"image.job.completed": done["id"], "image.job.failed": late["id"]}


def test_a_job_is_seen_by_its_key_alone(tmp_path: Path) -> None:
    with jobs(tmp_path, "one", keys=file_of_keys(tmp_path, one="one", two="two")) as api:
        id_ = api.begin(**ASKED)
        api.ended(id_)
        other = {"authorization": "Bearer two"}
        for method in ("GET", "DELETE"):
            hidden = api.http.request(method, f"{JOBS}/{id_}", headers=other)
            assert hidden.status_code == 404
        assert api.http.get(JOBS, headers=other).json()["data"] == []


def test_an_expired_job_is_gone_with_its_files(tmp_path: Path) -> None:
    with jobs(tmp_path, results_ttl_s=60) as api:
        kept = api.service.upload(line("a"))
        job = api.ended(api.begin(**ASKED, n=2))
        records = api.service.jobs.records
        # A sweep of data without a record keeps the job's data.
        sweep_data(records, sweep_data(records, set()))
        assert len(records.store.names("data")) == 4
        sweep(records, job["ended_at"] + 60)
        assert len(records.store.names("data")) == 4
        sweep(records, job["ended_at"] + 61)
        assert records.store.names("data") == [kept.id]
        assert api.http.get(f"{JOBS}/{job['id']}").status_code == 404
        for folder in ("image_jobs/anybody", "shared", "cancels"):
            assert records.store.names(folder) == []


def test_a_job_past_its_time_is_not_shown_before_the_sweep(tmp_path: Path) -> None:
    with jobs(tmp_path, results_ttl_s=60) as api:
        id_ = api.ended(api.begin(**ASKED, response_format="url"))["id"]
        records = api.service.jobs.records
        job = records.read(ImageJobRecord, "anybody", id_)
        assert job is not None and job.result is not None
        url = job.result["data"][0]["url"]
        assert httpx.get(url).status_code == 200
        records.put(replace(job, ended_at=int(time.time()) - 62))
        for path in (f"{JOBS}/{id_}", url):
            assert api.http.get(path).status_code == 404
        assert api.http.get(JOBS).json()["data"] == []


def test_a_repeated_request_is_the_same_job_until_that_has_expired(tmp_path: Path) -> None:
    again: dict[str, Any] = {"headers": {"x-request-id": "req_again"}, **ASKED}
    with jobs(tmp_path, results_ttl_s=60) as api:
        first, records = api.begin(**again), api.service.jobs.records
        done = api.ended(first)
        assert api.http.post(JOBS, json=ASKED, headers=again["headers"]).json()["id"] == first
        job = records.read(ImageJobRecord, "anybody", first)
        assert job is not None
        records.put(replace(job, ended_at=int(time.time()) - 62))
        second = api.begin(**again)
        assert second != first and pictures(api.ended(second)["result"]) == pictures(done["result"])
        sweep(records, int(time.time()))
        # Once the runner has seen that it is gone.
        wait_until(lambda: first not in api.service.jobs._open._ended)
        assert api.begin(**again) == first and api.ended(first)["status"] == "completed"
