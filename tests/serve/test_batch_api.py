"""Files and batches with OpenAI's client, over workers on fake engines."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from sdxl.checkpoint import MINI, Checkpoint
from sdxl.files import OutputError
from sdxl.images import read_parameters
from sdxl.pipeline import Pipeline
from sdxl.provenance import OFF, Provenance
from serve.batch.renderers import LocalRenderer
from serve.batch_api import runner as batch_runner
from serve.batch_api.batch_job import BatchJobRun
from serve.batch_api.image_jobs import ImageJobRunner
from serve.batch_api.records import ENDED, FileRecord, Records
from serve.batch_api.routes import MOST_NAME, add_batch_routes, checked_name, life_of
from serve.batch_api.runner import BatchRunner, sweep
from serve.batch_api.webhooks import Outbox
from serve.errors import Problem
from serve.front.api import create_app
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.fakes import fake_engines
from tests.serve.batch.drawers import jsonl, make, pictures
from tests.serve.servers import file_of_keys, listening, listening_to
from tests.serve.services import service
from tests.serve.workers import fake_pipeline
from tests.serve.workers import running as working
from tests.waiting import wait_until

URL: Any = "/v1/images/generations"
GIVEN: Any = {"endpoint": URL, "completion_window": "24h"}
TWO_MODELS = [{"model": "mini"}, {"model": "/models/other"}]


@dataclass
class BatchService:
    client: openai.OpenAI
    runner: BatchRunner
    jobs: ImageJobRunner
    worker: Worker
    settings: ServeSettings

    def upload(self, *lines: Any, **options: Any) -> Any:
        text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in lines)
        file = ("requests.jsonl", text.encode())
        return self.client.files.create(file=file, purpose="batch", **options)

    def begin(self, *lines: Any, **options: Any) -> Any:
        file = self.upload(*lines)
        return self.client.batches.create(input_file_id=file.id, **GIVEN | options)

    def retrieve(self, batch: Any) -> Any:
        return self.client.batches.retrieve(batch.id)

    def ended(self, batch: Any) -> Any:
        wait_until(lambda: self.retrieve(batch).status in ENDED)
        return self.retrieve(batch)

    def made_some(self, batch: Any) -> Any:
        wait_until(lambda: self.retrieve(batch).request_counts.completed)
        return self.retrieve(batch)

    def lines(self, file_id: str | None) -> list[Any]:
        assert file_id is not None
        text = self.client.files.content(file_id).text
        assert len(text) == self.client.files.retrieve(file_id).bytes
        return [json.loads(line) for line in text.splitlines()]


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "a red circle", "steps": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


@contextmanager
def batch_api(
    folder: Path,
    key: str = "x",
    tick_s: float = 0.0,
    outbox: Outbox | None = None,
    others: Sequence[Worker] = (),
    first: Worker | None = None,
    **given: Any,
) -> Iterator[BatchService]:
    """Run a front end and a runner. `first` serves the settings' first model instead of a fake,
    `others` the models after it."""
    settings = ServeSettings(
        batches_dir=str(folder / "batches"), results_dir=str(folder / "results"), **given
    )
    records = Records(settings.batches_dir)
    with (
        nullcontext(first) if first else working(fake_pipeline(tick_s)) as worker,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("serve.batch_api.records.POLL_S", 0.05)
        patch.setattr("serve.batch_api.webhooks.POLL_S", 0.05)
        patch.setattr("serve.batch_api.image_jobs.UPDATE_S", 0.05)
        workers = [worker, *others]
        app = create_app(workers, settings, add_batch_routes=add_batch_routes)
        runner = BatchRunner(records, settings, lambda: workers, outbox)
        jobs = runner.image_jobs()
        runner.start()
        jobs.start()
        try:
            with (
                listening_to(app) as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
            ):
                yield BatchService(client, runner, jobs, worker, settings)
        finally:
            runner.close()
            jobs.close()


def test_a_batch_runs_through_the_official_client(tmp_path: Path) -> None:
    with batch_api(tmp_path) as api:
        client = api.client
        file = api.upload(line("a", seed=5), line("b", n=2), line("c", response_format="url"))
        assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
        assert client.files.wait_for_processing(file.id).id == file.id
        batch = client.batches.create(input_file_id=file.id, **GIVEN, metadata={"for": "a test"})
        assert (batch.object, batch.endpoint, batch.input_file_id) == ("batch", URL, file.id)
        batch = api.ended(batch)
        assert batch.status == "completed" and batch.completed_at and batch.errors is None
        counts = batch.request_counts
        assert counts and (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        assert batch.metadata == {"for": "a test"} and batch.model == "sdxl-mini"
        assert batch.usage and batch.usage.input_tokens == 4 * 77
        assert batch.error_file_id is None and batch.model_extra is not None
        assert {"position", "eta_s", "images_per_s", "pictures"} <= set(batch.model_extra)
        answers = api.lines(batch.output_file_id)
        assert [each["custom_id"] for each in answers] == ["a", "b", "c"]
        assert all(each["error"] is None for each in answers)
        assert {each["response"]["status_code"] for each in answers} == {200}
        bodies = [each["response"]["body"] for each in answers]
        assert [len(body["data"]) for body in bodies] == [1, 2, 1]
        assert bodies[0]["data"][0]["seed"] == 5
        fetched = httpx.get(bodies[2]["data"][0]["url"])
        assert fetched.headers["content-type"] == "image/png" and fetched.content[1:4] == b"PNG"
        assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
        assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id}
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert api.lines(batch.output_file_id), "results outlive the file of requests"


def test_a_batch_makes_the_pictures_of_sdxl_batch(tmp_path: Path) -> None:
    """In few steps all are deep, unless the request has an interval."""
    asked = [line("a", seed=5), line("ä/b", n=2, cache_interval=2), line("c", steps=8)]
    load = partial(LocalRenderer, fake_pipeline(), Provenance(OFF))
    assert make(jsonl(tmp_path, asked), tmp_path / "out", load=load) == 0
    with batch_api(tmp_path) as api:
        answers = api.lines(api.ended(api.begin(*asked)).output_file_id)
    data = [each for answer in answers for each in answer["response"]["body"]["data"]]
    counts = [(each["deep_steps"], each["shallow_steps"]) for each in data]
    assert counts == [(2, 0), (1, 1), (1, 1), (4, 4)]
    images = sorted(base64.b64decode(each["b64_json"]) for each in data)
    assert images == sorted(pictures(tmp_path / "out").values()) and len(images) == 4


def test_a_wrong_request_has_the_services_error_and_fails_alone(tmp_path: Path) -> None:
    asked = [line("big", size="100x100"), line("sd", model="gpt-image-1")]
    asked.append(line("stream", stream=True))
    asked += [line("id") | {"custom_id": id_} for id_ in ("\ud800", "", "x" * 600, [1])]
    with batch_api(tmp_path) as api:
        batch = api.ended(api.begin(*asked, line("good")))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (8, 1, 7)
        assert [each["custom_id"] for each in api.lines(batch.output_file_id)] == ["good"]
        with pytest.raises(openai.BadRequestError) as caught:
            api.client.images.generate(prompt="a red circle", size="100x100")
        errors = api.lines(batch.error_file_id)
    assert [each["custom_id"] for each in errors] == [each["custom_id"] for each in asked]
    assert [each["response"]["status_code"] for each in errors] == [400, 404, *[400] * 5]
    assert errors[0]["response"]["body"]["error"] == caught.value.body
    assert errors[2]["response"]["body"]["error"]["param"] == "stream"


WRONG_FILES: dict[str, tuple[tuple[Any, ...], str, int | None]] = {
    "no JSON": (("{broken",), "invalid_json_line", 1),
    "twice": ((line("a"), line("a")), "duplicate_custom_id", 2),
    "another place": ((line("a") | {"url": "/v1/chat/completions"},), "mismatched_endpoint", 1),
    "get": ((line("a") | {"method": "GET"},), "invalid_method", 1),
    "a null id": ((line("a") | {"custom_id": None},), "missing_required_parameter", 1),
    "no id": (({"method": "POST", "url": URL, "body": {}},), "missing_required_parameter", 1),
    "a picture on disk": ((line("a") | {"image": "/etc/passwd"},), "unknown_parameter", 1),
    "a name that is no Unicode": ((line("a") | {"\ud800": 1},), "unknown_parameter", 1),
    "nothing": (("",), "empty_file", None),
    "too many": (tuple(line(str(i)) for i in range(4)), "too_many_requests", None),
}


def test_a_wrong_line_fails_the_whole_file(tmp_path: Path) -> None:
    with batch_api(tmp_path, max_batch_requests=3) as api:
        begun = {case: api.begin(*asked) for case, (asked, _, _) in WRONG_FILES.items()}
        for case, (_, code, number) in WRONG_FILES.items():
            batch = api.ended(begun[case])
            assert batch.status == "failed" and batch.output_file_id is None, case
            assert batch.errors and batch.errors.data, case
            assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number), case


@pytest.mark.parametrize(
    ("error", "ends_as"),
    [
        (RuntimeError("a worker's bug"), "failed"),
        (OutputError("x", OSError(28, "No space left on device")), "completed"),
    ],
)
def test_the_same_error_three_times_fails_a_batch_but_a_full_disk_is_waited_out(
    error: Exception, ends_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, tries = BatchJobRun.make, list[int]()

    def fail_three_times(self: BatchJobRun) -> bool:
        tries.append(1)
        if len(tries) <= 3:
            raise error
        return make(self)

    monkeypatch.setattr(BatchJobRun, "make", fail_three_times)
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.0)
    with batch_api(tmp_path) as api:
        batch = api.ended(api.begin(line("a")))
    assert batch.status == ends_as
    if ends_as == "failed":
        (reason,) = batch.errors.data
        assert (reason.code, reason.message) == ("batch_failed", "RuntimeError: a worker's bug")


def test_stopping_a_batch_stops_its_driver_if_it_has_one() -> None:
    stopped: list[int] = []
    run = BatchJobRun(*[None] * 5)  # type: ignore[arg-type]
    run.stop()
    run._driver = SimpleNamespace(stop=lambda: stopped.append(1))  # type: ignore[assignment]
    run.stop()
    assert stopped == [1]


def test_a_file_name_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(Problem, match="valid Unicode"):
        checked_name("\ud800")
    assert checked_name("é" * 400) == "é" * MOST_NAME


def record_of(folder: Path, id_: str) -> Path:
    (record,) = (folder / "batches").rglob(f"{id_}.json")
    return record


@pytest.mark.parametrize("seconds", ["000003600999999999999", "3599", "9" * 4301, "1_0000", "x"])
def test_every_digit_of_a_files_lifetime_is_checked(seconds: str) -> None:
    with pytest.raises(Problem, match="expires_after"):
        life_of("created_at", seconds)
    assert life_of("created_at", "3600") == 3600


def test_a_missing_picture_is_an_error_in_its_line(tmp_path: Path) -> None:
    with batch_api(tmp_path) as api:
        batch = api.ended(api.begin(line("a"), line("b"), line("c")))
        images = (tmp_path / "batches" / "jobs" / batch.id / "images").rglob("*.png")
        next(path for path in images if path.stem == "b").unlink()
        answers = api.lines(batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["a", "b", "c"]
    assert answers[1]["error"]["code"] == "picture_missing" and answers[1]["response"] is None
    assert answers[0]["error"] is None is answers[2]["error"]


def test_a_damaged_record_of_a_batch_is_503_and_not_404(tmp_path: Path) -> None:
    with batch_api(tmp_path) as api:
        client, batch = api.client, api.ended(api.begin(line("a", response_format="url")))
        url = api.lines(batch.output_file_id)[0]["response"]["body"]["data"][0]["url"]
        record = record_of(tmp_path, batch.id)
        record.write_text(record.read_text()[:40])
        for ask in (
            lambda: client.batches.retrieve(batch.id),
            lambda: client.batches.cancel(batch.id),
            lambda: client.files.content(batch.output_file_id),
        ):
            with pytest.raises(openai.InternalServerError) as error:
                ask()
            assert error.value.status_code == 503 and error.value.code == "record_unreadable"
        picture = httpx.get(url)
        assert picture.status_code == 503 and "record_unreadable" in picture.text
        assert client.batches.list().data == []


def test_a_damaged_record_of_an_unfinished_batch_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with batch_api(tmp_path) as api:
        api.runner.close()
        torn, other = api.begin(line("a")), api.begin(line("b"))
        record_of(tmp_path, torn.id).write_text('{"torn')
        runner = BatchRunner(api.runner.records, api.settings, lambda: [api.worker])
        while api.retrieve(other).status != "completed":
            runner.poll()
    (error,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert f"batches/anybody/{torn.id}.json cannot be read" in error.getMessage()
    assert "delete the file" in error.getMessage()


def test_deleting_a_file_in_a_read_only_folder_is_507(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with batch_api(tmp_path) as api:
        file = api.upload(line("a"))
        with monkeypatch.context() as patch, pytest.raises(openai.InternalServerError) as error:
            patch.setattr(Path, "unlink", refuse)
            api.client.files.delete(file.id)
        assert error.value.status_code == 507


@pytest.mark.slow
def test_a_cancelled_batch_keeps_the_pictures_made_before(tmp_path: Path) -> None:
    with batch_api(tmp_path, tick_s=0.02) as api:
        first = api.begin(*(line(str(i), steps=20) for i in range(300)))
        second = api.begin(line("waits"))
        assert api.made_some(first).request_counts.total == 300
        waiting = api.retrieve(second)
        assert waiting.model_extra and waiting.model_extra["position"] == 1
        assert api.client.batches.cancel(first.id).status in ("cancelling", "cancelled")
        batch = api.ended(first)
        made, rest = api.lines(batch.output_file_id), api.lines(batch.error_file_id)
        assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
        assert 0 < len(made) < 300 and len(made) + len(rest) == 300
        assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
        assert api.ended(second).status == "completed"
        with pytest.raises(openai.ConflictError):
            api.client.batches.cancel(second.id)


@pytest.mark.slow
def test_a_restart_resumes_and_makes_nothing_twice(tmp_path: Path) -> None:
    with batch_api(tmp_path, tick_s=0.02) as api:
        batch = api.made_some(api.begin(*(line(str(i), steps=20) for i in range(60))))
    work = tmp_path / "batches" / "jobs" / batch.id
    before = {path: path.stat().st_mtime_ns for path in work.glob("images/*/*")}
    assert 0 < len(before) < 60
    with batch_api(tmp_path) as api:
        answers = api.lines(api.ended(batch).output_file_id)
    assert [each["custom_id"] for each in answers] == [str(i) for i in range(60)]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_requests_that_the_window_leaves_over_expire(tmp_path: Path) -> None:
    with batch_api(tmp_path, tick_s=0.02) as api:
        begun = api.begin(*(line(str(i), steps=20) for i in range(300)), completion_window="1h")
        api.runner.clock = lambda: time.time() + 3700
        batch = api.ended(begun)
        assert batch.status == "expired" and batch.expired_at
        rest = api.lines(batch.error_file_id)
    assert {each["error"]["code"] for each in rest} == {"batch_expired"}


def test_a_file_has_one_model_which_makes_its_pictures(tmp_path: Path) -> None:
    several: dict[str, Any] = {"models": TWO_MODELS, "aliases": "gpt-image-1=other"}
    other = Pipeline(Checkpoint("other", MINI), fake_engines((1, 2, 4)))
    with working(other) as second, batch_api(tmp_path, others=[second], **several) as api:
        asked = [line("a", model="gpt-image-1"), line("b", model="other"), line("c", model="x")]
        batch = api.ended(api.begin(*asked))
        assert (batch.status, batch.model) == ("completed", "other")
        for answer in api.lines(batch.output_file_id):
            body = answer["response"]["body"]
            picture = base64.b64decode(body["data"][0]["b64_json"])
            assert body["model"] == "other" == read_parameters(picture)["model"]
        (wrong,) = api.lines(batch.error_file_id)
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("c", 404)
        assert api.ended(api.begin(line("a"))).model == "sdxl-mini"
        mixed = api.ended(api.begin(line("a"), line("b", model="other")))
        assert mixed.status == "failed" and mixed.errors and mixed.errors.data
        assert (mixed.errors.data[0].code, mixed.errors.data[0].line) == ("mismatched_model", 2)


def test_a_batch_whose_model_is_gone_fails(tmp_path: Path) -> None:
    other = Pipeline(Checkpoint("other", MINI), fake_engines((1, 2, 4)))
    with working(other) as second, batch_api(tmp_path, others=[second], models=TWO_MODELS) as api:
        api.runner._has_turn = lambda batch: False  # type: ignore[method-assign]
        batch = api.begin(line("a", model="other"))
        wait_until(lambda: api.retrieve(batch).status == "in_progress")
    with batch_api(tmp_path) as api:
        batch = api.ended(batch)
        assert batch.status == "failed" and batch.errors and batch.errors.data
        (error,) = batch.errors.data
        assert error.code == "other_model"
        assert error.message == "The batch is of 'other'; here is 'sdxl-mini' now."


def test_a_key_finds_no_other_keys_files_and_batches(tmp_path: Path) -> None:
    with batch_api(tmp_path, "ann", keys=file_of_keys(tmp_path, ann="ann", bob="bob")) as api:
        batch = api.ended(api.begin(line("a")))
        bob = api.client.with_options(api_key="bob")
        for ask in (
            lambda: bob.files.retrieve(batch.input_file_id),
            lambda: bob.files.content(batch.output_file_id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert not list(bob.files.list()) and not list(bob.batches.list())
        with pytest.raises(openai.BadRequestError, match="no file"):
            bob.batches.create(input_file_id=batch.input_file_id, **GIVEN)


def test_a_batch_needs_an_unexpired_file_of_requests(tmp_path: Path) -> None:
    with batch_api(tmp_path) as api:
        batch = api.ended(api.begin(line("a")))
        with pytest.raises(openai.BadRequestError, match="must be 'batch', got 'batch_output'"):
            api.client.batches.create(input_file_id=batch.output_file_id, **GIVEN)
        records = api.runner.records
        (file,) = (each for each in records.read_all(FileRecord, "anybody") if not each.batch)
        records.add_file("anybody", replace(file, expires_at=file.created_at - 1))
        with pytest.raises(openai.NotFoundError):
            api.client.files.retrieve(file.id)
        with pytest.raises(openai.BadRequestError, match="no file"):
            api.client.batches.create(input_file_id=file.id, **GIVEN)


def test_limits_are_refused_by_name(tmp_path: Path) -> None:
    with batch_api(tmp_path, max_file_bytes=1000) as api:
        with pytest.raises(openai.APIStatusError) as caught:
            api.upload(*(line(str(i)) for i in range(100)))
        assert caught.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="limit must be .*, got '0'") as refused:
            api.client.files.list(limit=0)
        assert refused.value.param == "limit"
        with pytest.raises(openai.BadRequestError, match="purpose"):
            api.client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="completion_window"):
            api.begin(line("a"), completion_window="31d")
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            api.begin(line("a"), endpoint="/v1/chat/completions")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            api.upload(line("a"), expires_after={"anchor": "created_at", "seconds": 5})
        life = {"anchor": "created_at", "seconds": 3600}
        file = api.upload(line("a"), expires_after=life)
        assert file.expires_at == file.created_at + 3600


def test_a_service_without_batches_dir_names_the_setting() -> None:
    with listening() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        for ask in (
            lambda: client.files.create(file=b"x", purpose="batch"),
            lambda: client.batches.retrieve("batch_1"),
            lambda: client.post("/images/jobs", cast_to=object, body={"prompt": "a"}),
        ):
            with pytest.raises(openai.NotFoundError, match="batches_dir"):
                ask()


def test_expired_batches_are_removed_with_their_pictures(tmp_path: Path) -> None:
    with batch_api(tmp_path) as api:
        batch = api.ended(api.begin(line("a")))
        sweep(api.runner.records, int(time.time()))
        assert api.lines(batch.output_file_id)
        sweep(api.runner.records, int(time.time() + api.settings.batches_ttl_s + 10))
        assert not list(api.client.batches.list()) and not list(api.client.files.list())
    left = [path for path in (tmp_path / "batches").rglob("*") if path.is_file()]
    assert not left, left


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_batch_runs_in_a_real_service(tmp_path: Path) -> None:
    flags = ("--llm", "none", "--batches-dir", str(tmp_path / "batches"))
    with (
        service(tmp_path, *flags) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x") as client,
    ):
        text = "".join(json.dumps(line(name, size="64x64")) + "\n" for name in "abc")
        file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, **GIVEN)
        wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, 200.0)
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.output_file_id, running.text[-3000:]
        answers = client.files.content(batch.output_file_id).text.splitlines()
    images = [json.loads(each)["response"]["body"]["data"][0]["b64_json"] for each in answers]
    assert [base64.b64decode(each)[1:4] for each in images] == [b"PNG"] * 3
