"""Files and batches as OpenAI's own package calls them, over workers on fake engines."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from serve.batch_api import runner as batch_runner
from serve.batch_api.batch_job import BatchJobRun
from serve.batch_api.records import Records
from serve.batch_api.routes import MOST_NAME, add_batch_routes, checked_name, life_of
from serve.batch_api.runner import BatchRunner, sweep, sweep_data
from serve.batch_api.webhooks import Outbox
from serve.errors import Problem
from serve.front.api import create_app
from serve.front.keys import sha256
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.fakes import fake_engines
from tests.serve.batch.drawers import order_of, pictures
from tests.serve.servers import listening, listening_to
from tests.serve.services import service
from tests.serve.workers import fake_pipeline
from tests.serve.workers import running as working

URL: Any = "/v1/images/generations"
WAIT_S = 50.0


@dataclass
class Doors:
    client: openai.OpenAI
    runner: BatchRunner
    worker: Worker
    settings: ServeSettings

    def upload(self, *lines: Any, **options: Any) -> Any:
        text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in lines)
        file = ("requests.jsonl", text.encode())
        return self.client.files.create(file=file, purpose="batch", **options)

    def begin(self, *lines: Any, **options: Any) -> Any:
        given: dict[str, Any] = {"endpoint": URL, "completion_window": "24h", **options}
        return self.client.batches.create(input_file_id=self.upload(*lines).id, **given)

    def ended(self, batch: Any) -> Any:
        until = time.monotonic() + WAIT_S
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() < until, batch
            time.sleep(0.05)
            batch = self.client.batches.retrieve(batch.id)
        return batch

    def lines(self, file_id: str | None) -> list[Any]:
        assert file_id is not None
        text = self.client.files.content(file_id).text
        assert len(text) == self.client.files.retrieve(file_id).bytes
        return [json.loads(line) for line in text.splitlines()]


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "a red circle", "steps": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


@contextmanager
def doors(
    folder: Path,
    key: str = "x",
    tick_s: float = 0.0,
    outbox: Outbox | None = None,
    others: Sequence[Worker] = (),
    **given: Any,
) -> Iterator[Doors]:
    """`others` are of the settings' models after the first."""
    settings = ServeSettings(
        batches_dir=str(folder / "batches"), results_dir=str(folder / "results"), **given
    )
    records = Records(settings.batches_dir)
    with working(fake_pipeline(tick_s)) as worker:
        workers = [worker, *others]
        app = create_app(workers, settings, add_batch_routes=add_batch_routes)
        runner = BatchRunner(records, settings, lambda: workers, outbox)
        runner.start()
        try:
            with (
                listening_to(app) as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
            ):
                yield Doors(client, runner, worker, settings)
        finally:
            runner.close()


def test_a_batch_runs_as_the_official_client_asks(tmp_path: Path) -> None:
    with doors(tmp_path) as found:
        client = found.client
        file = found.upload(line("a", seed=5), line("b", n=2), line("c", response_format="url"))
        assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
        assert client.files.wait_for_processing(file.id).id == file.id
        batch = client.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"for": "a test"}
        )
        assert (batch.object, batch.endpoint, batch.input_file_id) == ("batch", URL, file.id)
        batch = found.ended(batch)
        assert batch.status == "completed" and batch.completed_at and batch.errors is None
        counts = batch.request_counts
        assert counts and (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        assert batch.metadata == {"for": "a test"} and batch.model == "sdxl-mini"
        assert batch.usage and batch.usage.input_tokens == 4 * 77
        assert batch.error_file_id is None and batch.model_extra is not None
        assert {"position", "eta_s", "images_per_s", "pictures"} <= set(batch.model_extra)
        told = found.lines(batch.output_file_id)
        assert [each["custom_id"] for each in told] == ["a", "b", "c"]
        assert all(each["error"] is None for each in told)
        assert {each["response"]["status_code"] for each in told} == {200}
        bodies = [each["response"]["body"] for each in told]
        assert [len(body["data"]) for body in bodies] == [1, 2, 1]
        assert bodies[0]["data"][0]["seed"] == 5
        fetched = httpx.get(bodies[2]["data"][0]["url"])
        assert fetched.headers["content-type"] == "image/png" and fetched.content[1:4] == b"PNG"
        assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
        assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id}
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert found.lines(batch.output_file_id), "results outlive the file of requests"


def test_its_pictures_are_those_of_sdxl_batch(tmp_path: Path) -> None:
    from functools import partial

    from serve.batch.renderers import LocalRenderer
    from serve.batch.running import run
    from tests.serve.batch.drawers import in_threads, jsonl

    asked = [line("a", seed=5), line("ä/b", n=2), line("c")]
    assert (
        run(
            order_of(jsonl(tmp_path, asked), tmp_path / "out"),
            partial(in_threads, load=partial(LocalRenderer, fake_pipeline(), Provenance(OFF))),
        )
        == 0
    )
    with doors(tmp_path) as found:
        told = found.lines(found.ended(found.begin(*asked)).output_file_id)
    data = [each for one in told for each in one["response"]["body"]["data"]]
    mine = sorted(base64.b64decode(each["b64_json"]) for each in data)
    assert mine == sorted(pictures(tmp_path / "out").values()) and len(mine) == 4


def test_a_wrong_request_has_the_services_own_error_and_harms_no_other(tmp_path: Path) -> None:
    asked = [line("good"), line("big", size="100x100"), line("sd", model="gpt-image-1")]
    with doors(tmp_path) as found:
        batch = found.ended(found.begin(*asked, line("stream", stream=True)))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 1, 3)
        with pytest.raises(openai.BadRequestError) as caught:
            found.client.images.generate(prompt="a red circle", size="100x100")
        told = found.lines(batch.error_file_id)
    assert [each["custom_id"] for each in told] == ["big", "sd", "stream"]
    assert [each["response"]["status_code"] for each in told] == [400, 404, 400]
    assert told[0]["response"]["body"]["error"] == caught.value.body
    assert told[2]["response"]["body"]["error"]["param"] == "stream"


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


def test_a_file_that_is_none_of_requests_fails_as_a_whole(tmp_path: Path) -> None:
    with doors(tmp_path, max_batch_requests=3) as found:
        for case, (asked, code, number) in WRONG_FILES.items():
            batch = found.ended(found.begin(*asked))
            assert batch.status == "failed" and batch.output_file_id is None, case
            assert batch.errors and batch.errors.data, case
            assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number), case


def test_a_wrong_custom_id_is_that_request_s_error(tmp_path: Path) -> None:
    """A lone surrogate stopped the whole batch until its window ended."""
    wrong = ["\ud800", "", "x" * 600, [1]]
    with doors(tmp_path) as found:
        lines = [line("a") | {"custom_id": id_} for id_ in wrong]
        batch = found.ended(found.begin(*lines, line("b")))
        assert batch.status == "completed"
        assert [each["custom_id"] for each in found.lines(batch.output_file_id)] == ["b"]
        errors = found.lines(batch.error_file_id)
        assert [each["custom_id"] for each in errors] == wrong
        assert {each["response"]["status_code"] for each in errors} == {400}


def test_a_batch_that_the_same_error_stops_three_times_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def broken(self: BatchJobRun) -> bool:
        tries.append(1)
        raise RuntimeError("a worker's bug")

    monkeypatch.setattr(BatchJobRun, "make", broken)
    monkeypatch.setattr(batch_runner, "AGAIN_S", 0.0)
    with doors(tmp_path) as found:
        batch = found.ended(found.begin(line("a")))
    assert batch.status == "failed" and len(tries) == 3
    (error,) = batch.errors.data
    assert (error.code, error.message) == ("batch_failed", "RuntimeError: a worker's bug")


def test_stopping_a_batch_stops_its_driver_if_it_has_one() -> None:
    stopped: list[int] = []
    run = BatchJobRun(*[None] * 5)  # type: ignore[arg-type]
    run.stop()
    run._driver = SimpleNamespace(stop=lambda: stopped.append(1))  # type: ignore[assignment]
    run.stop()
    assert stopped == [1]


def test_a_batch_waits_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, tries = BatchJobRun.make, list[int]()

    def full(self: BatchJobRun) -> bool:
        tries.append(1)
        if len(tries) <= 5:
            raise OutputError(Path("x"), OSError(28, "No space left on device"))
        return make(self)

    monkeypatch.setattr(BatchJobRun, "make", full)
    monkeypatch.setattr(batch_runner, "AGAIN_S", 0.0)
    with doors(tmp_path) as found:
        assert found.ended(found.begin(line("a"))).status == "completed" and len(tries) == 6


def test_a_file_name_with_a_lone_surrogate_is_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    """Its data stayed, and no client could list or delete them."""
    with pytest.raises(Problem, match="valid Unicode"):
        checked_name("\ud800")
    assert checked_name("é" * 400) == "é" * MOST_NAME


def record_of(folder: Path, id_: str) -> Path:
    (record,) = (folder / "batches").rglob(f"{id_}.json")
    return record


def test_data_of_a_torn_record_are_removed_and_those_of_another_version_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with doors(tmp_path) as found:
        found.runner.close()
        torn, other, good = (found.upload(line(name)) for name in "abc")
        record_of(tmp_path, torn.id).write_text('{"torn')
        record_of(tmp_path, other.id).write_text('{"id": "of a later version"}')
        records = Records(found.settings.batches_dir)
        unnamed = sweep_data(records, set())
        assert unnamed == {torn.id}
        assert sweep_data(records, unnamed) == set()
        assert set(records.store.names("data")) == {other.id, good.id}
        read = list[str]()
        monkeypatch.setattr(records.store, "get", read.append)
        assert records.unnamed_data() == set() and not read, "records are read once"


@pytest.mark.parametrize("seconds", ["000003600999999999999", "3599", "9" * 4301, "1_0000", "x"])
def test_a_file_s_lifetime_is_checked_in_full(seconds: str) -> None:
    with pytest.raises(Problem, match="expires_after"):
        life_of("created_at", seconds)
    assert life_of("created_at", "3600") == 3600


def test_a_picture_that_is_missing_from_the_store_is_an_error_in_its_line(tmp_path: Path) -> None:
    with doors(tmp_path) as found:
        batch = found.ended(found.begin(line("a"), line("b"), line("c")))
        images = (tmp_path / "batches" / "jobs" / batch.id / "images").rglob("*.png")
        next(path for path in images if path.stem == "b").unlink()
        answers = found.lines(batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["a", "b", "c"]
    assert answers[1]["error"]["code"] == "picture_missing" and answers[1]["response"] is None
    assert answers[0]["error"] is None is answers[2]["error"]


def test_a_damaged_record_of_a_batch_is_503_and_not_404(tmp_path: Path) -> None:
    with doors(tmp_path) as found:
        client, batch = found.client, found.ended(found.begin(line("a", response_format="url")))
        url = found.lines(batch.output_file_id)[0]["response"]["body"]["data"][0]["url"]
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
    with doors(tmp_path) as found:
        found.runner.close()
        torn, other = found.begin(line("a")), found.begin(line("b"))
        record_of(tmp_path, torn.id).write_text('{"torn')
        runner = BatchRunner(found.runner.records, found.settings, lambda: [found.worker])
        while found.client.batches.retrieve(other.id).status != "completed":
            runner.look()
            time.sleep(0.02)
    (error,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert f"batches/anybody/{torn.id}.json cannot be read" in error.getMessage()
    assert "delete the file" in error.getMessage()


def test_a_file_in_a_read_only_folder_is_507_when_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with doors(tmp_path) as found:
        file = found.upload(line("a"))
        with monkeypatch.context() as patch, pytest.raises(openai.InternalServerError) as error:
            patch.setattr(Path, "unlink", refuse)
            found.client.files.delete(file.id)
        assert error.value.status_code == 507


@pytest.mark.slow
def test_what_was_made_before_a_cancel_stays(tmp_path: Path) -> None:
    with doors(tmp_path, tick_s=0.02) as found:
        first = found.begin(*(line(str(i), steps=20) for i in range(300)))
        second = found.begin(line("waits"))
        until = time.monotonic() + WAIT_S
        while not (told := found.client.batches.retrieve(first.id).request_counts).completed:  # type: ignore[union-attr]
            assert time.monotonic() < until
            time.sleep(0.05)
        assert told and told.total == 300
        waiting = found.client.batches.retrieve(second.id)
        assert waiting.model_extra and waiting.model_extra["position"] == 1
        assert found.client.batches.cancel(first.id).status in ("cancelling", "cancelled")
        batch = found.ended(first)
        made, rest = found.lines(batch.output_file_id), found.lines(batch.error_file_id)
        assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
        assert 0 < len(made) < 300 and len(made) + len(rest) == 300
        assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
        assert found.ended(second).status == "completed", "the next one has its turn"
        with pytest.raises(openai.ConflictError):
            found.client.batches.cancel(second.id)


@pytest.mark.slow
def test_a_restart_goes_on_and_makes_nothing_twice(tmp_path: Path) -> None:
    with doors(tmp_path, tick_s=0.02) as found:
        batch = found.begin(*(line(str(i), steps=20) for i in range(60)))
        until = time.monotonic() + WAIT_S
        while not found.client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
            assert time.monotonic() < until
            time.sleep(0.05)
    work = tmp_path / "batches" / "jobs" / batch.id
    before = {path: path.stat().st_mtime_ns for path in work.glob("images/*/*")}
    assert 0 < len(before) < 60
    with doors(tmp_path) as found:
        told = found.lines(found.ended(found.client.batches.retrieve(batch.id)).output_file_id)
    assert [each["custom_id"] for each in told] == [str(i) for i in range(60)]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_window_that_ends_expires_what_is_left(tmp_path: Path) -> None:
    with doors(tmp_path, tick_s=0.02) as found:
        begun = found.begin(*(line(str(i), steps=20) for i in range(300)), completion_window="1h")
        found.runner.clock = lambda: time.time() + 3700
        batch = found.ended(begun)
        assert batch.status == "expired" and batch.expired_at
        rest = found.lines(batch.error_file_id)
    assert {each["error"]["code"] for each in rest} == {"batch_expired"}


def test_a_file_has_one_model_which_makes_its_pictures(tmp_path: Path) -> None:
    tables = [{"model": "mini"}, {"model": "/models/other"}]
    several: dict[str, Any] = {"models": tables, "aliases": "gpt-image-1=other"}
    other = Pipeline(Checkpoint("other", MINI), fake_engines((1, 2, 4)))
    with working(other) as second, doors(tmp_path, others=[second], **several) as found:
        asked = [line("a", model="gpt-image-1"), line("b", model="other"), line("c", model="x")]
        batch = found.ended(found.begin(*asked))
        assert (batch.status, batch.model) == ("completed", "other")
        for told in found.lines(batch.output_file_id):
            body = told["response"]["body"]
            picture = base64.b64decode(body["data"][0]["b64_json"])
            assert body["model"] == "other" == read_parameters(picture)["model"]
        (wrong,) = found.lines(batch.error_file_id)
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("c", 404)
        assert found.ended(found.begin(line("a"))).model == "sdxl-mini"
        mixed = found.ended(found.begin(line("a"), line("b", model="other")))
        assert mixed.status == "failed" and mixed.errors and mixed.errors.data
        assert (mixed.errors.data[0].code, mixed.errors.data[0].line) == ("mismatched_model", 2)


def test_a_batch_whose_model_is_gone_fails_and_says_so(tmp_path: Path) -> None:
    other = Pipeline(Checkpoint("other", MINI), fake_engines((1, 2, 4)))
    tables = [{"model": "mini"}, {"model": "/models/other"}]
    with working(other) as second, doors(tmp_path, others=[second], models=tables) as found:
        found.runner._has_turn = lambda batch: False  # type: ignore[method-assign]
        batch = found.begin(line("a", model="other"))
        until = time.monotonic() + WAIT_S
        while found.client.batches.retrieve(batch.id).status != "in_progress":
            assert time.monotonic() < until
            time.sleep(0.05)
    with doors(tmp_path) as found:
        batch = found.ended(found.client.batches.retrieve(batch.id))
        assert batch.status == "failed" and batch.errors and batch.errors.data
        (error,) = batch.errors.data
        assert error.code == "other_model"
        assert error.message == "The batch is of 'other'; here is 'sdxl-mini' now."


def test_nobody_finds_what_is_another_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{sha256('ann')} ann\n{sha256('bob')} bob 600\n")
    with doors(tmp_path, "ann", keys=str(tmp_path / "keys")) as found:
        batch = found.ended(found.begin(line("a", response_format="url")))
        bob = found.client.with_options(api_key="bob")
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
            bob.batches.create(
                input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"
            )
        url = found.lines(batch.output_file_id)[0]["response"]["body"]["data"][0]["url"]
    assert "/v1/results/" in url


def test_a_batch_begins_with_a_file_of_requests_that_lives(tmp_path: Path) -> None:
    with doors(tmp_path) as found:
        batch = found.ended(found.begin(line("a")))
        given: dict[str, Any] = {"endpoint": URL, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="'batch_output'.*needed 'batch'"):
            found.client.batches.create(input_file_id=batch.output_file_id, **given)
        records = found.runner.records
        (file,) = (each for each in records.files("anybody") if not each.batch)
        records.add_file("anybody", replace(file, expires_at=file.created_at - 1))
        with pytest.raises(openai.NotFoundError):
            found.client.files.retrieve(file.id)
        with pytest.raises(openai.BadRequestError, match="no file"):
            found.client.batches.create(input_file_id=file.id, **given)


def test_limits_are_told_by_name(tmp_path: Path) -> None:
    with doors(tmp_path, max_file_bytes=1000) as found:
        with pytest.raises(openai.APIStatusError) as caught:
            found.upload(*(line(str(i)) for i in range(100)))
        assert caught.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose"):
            found.client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="completion_window"):
            found.begin(line("a"), completion_window="31d")
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            found.begin(line("a"), endpoint="/v1/chat/completions")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            found.upload(line("a"), expires_after={"anchor": "created_at", "seconds": 5})
        life = {"anchor": "created_at", "seconds": 3600}
        file = found.upload(line("a"), expires_after=life)
        assert file.expires_at == file.created_at + 3600


def test_a_service_without_a_place_says_which_setting_gives_one() -> None:
    with listening() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        for ask in (
            lambda: client.files.create(file=b"x", purpose="batch"),
            lambda: client.batches.retrieve("batch_1"),
        ):
            with pytest.raises(openai.NotFoundError, match="batches_dir"):
                ask()


def test_what_has_expired_is_removed_with_its_pictures(tmp_path: Path) -> None:
    with doors(tmp_path) as found:
        batch = found.ended(found.begin(line("a")))
        sweep(found.runner.records, int(time.time()))
        assert found.lines(batch.output_file_id)
        sweep(found.runner.records, int(time.time() + found.settings.batches_ttl_s + 10))
        assert not list(found.client.batches.list()) and not list(found.client.files.list())
    left = [path for path in (tmp_path / "batches").rglob("*") if path.is_file()]
    assert not left, left


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_batch_runs_in_idle_ticks_of_the_service_itself(tmp_path: Path) -> None:
    flags = ("--llm", "none", "--batches-dir", str(tmp_path / "batches"))
    with (
        service(tmp_path, *flags) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x") as client,
    ):
        text = "".join(json.dumps(line(name, size="64x64")) + "\n" for name in "abc")
        file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        until = time.monotonic() + 4 * WAIT_S
        while batch.status in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < until, f"{batch}\n{running.text[-3000:]}"
            time.sleep(0.2)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.output_file_id, batch
        told = client.files.content(batch.output_file_id).text.splitlines()
    pictures = [json.loads(each)["response"]["body"]["data"][0]["b64_json"] for each in told]
    assert [base64.b64decode(each)[1:4] for each in pictures] == [b"PNG"] * 3
