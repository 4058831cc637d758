"""Models that an operator loads and unloads while the service runs, on fake engines."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save_file

from engines import room
from engines.room import NoMemory, check_room
from sdxl.checkpoint import MINI, Checkpoint, find
from sdxl.model_names import name_of
from sdxl.params import GenerationParams
from serve import errors, ray_models
from serve.errors import Problem
from serve.front import served_models
from serve.front.api import create_app
from serve.front.served_models import ServedModels
from serve.models import ImageModel
from serve.orders import ImageOrder, Update
from serve.ray_models import failure
from serve.run_time_models import application_name, files_below, find_file, model_in, model_of
from serve.settings import ServeSettings
from serve.worker.replica import RunTimeReplica
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, call, client_of, error_of, file_of_keys
from tests.serve.workers import fake_pipeline, order, picture_of

MODELS = "/v1/models"
PAGE = "/sdapi/v1"
ASKED: dict[str, Any] = {"prompt": "a red circle", "steps": 2}


class FakeReplicas(Worker):
    """Refuses requests while its model is unloaded, like Replicas."""

    is_leaving = False

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        if self.is_leaving:
            raise errors.unloaded()
        async with aclosing(super().generate(order)) as updates:
            async for update in updates:
                yield update


class FakePool:
    """Implements ModelPool by workers in this process."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.tick_s = tick_s
        self.workers: dict[str, tuple[ImageModel, FakeReplicas]] = {}
        self.forgotten: list[str] = []

    async def loaded(self) -> Sequence[ImageModel]:
        return [model for model, _ in self.workers.values()]

    async def load(self, model: ImageModel) -> None:
        checkpoint = Checkpoint(name_of(model.settings.model), MINI)
        worker = FakeReplicas(replace(fake_pipeline(self.tick_s), checkpoint=checkpoint))
        await asyncio.to_thread(worker.start)
        self.workers[model.id] = model, worker

    async def unload(self, model: ImageModel) -> None:
        _, worker = self.workers.pop(model.id)
        worker.is_leaving = True
        while not worker.is_idle:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(worker.close)

    def backend(self, model: ImageModel) -> Worker:
        return self.workers[model.id][1]

    async def forget(self, model: ImageModel) -> None:
        self.forgotten.append(model.id)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "SETTLE_S", 0.01)
    monkeypatch.setattr(served_models, "REFRESH_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models in folders, and files that are not models."""
    for name in ("other", "sub/third"):
        (tmp_path / "models" / name).mkdir(parents=True)
        shutil.copy(MINI / "model_index.json", tmp_path / "models" / name)
    save_file({"lora_unet.alpha": np.zeros(1)}, tmp_path / "models" / "style.safetensors")
    (tmp_path / "models" / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    return tmp_path / "models"


def app_of(worker: Worker, pool: FakePool | None, folder: Path | str, **settings: Any) -> FastAPI:
    return create_app([worker], ServeSettings(models_dir=str(folder), **settings), pool=pool)


async def ids(http: httpx.AsyncClient) -> list[str]:
    listed = (await http.get(MODELS)).json()["data"]
    return [model["id"] for model in listed if model.get("images")]


async def made_by(http: httpx.AsyncClient, model: str) -> Any:
    answer = await http.post(GENERATE, json={**ASKED, "model": model})
    return answer.json()["model"] if answer.status_code == 200 else answer.status_code


async def test_a_model_comes_and_goes_while_the_service_runs(worker: Worker, folder: Path) -> None:
    async with client_of(app_of(worker, FakePool(), folder)) as http:
        assert await made_by(http, "third") == 404
        for asked in ("third", "sub/third", "sub/third.safetensors"):
            loaded = await http.post(MODELS, json={"model": asked})
            assert loaded.status_code == 200 and loaded.json()["id"] == "third"
            assert await ids(http) == ["sdxl-mini", "third"]
            assert await made_by(http, "third") == "third"
            assert (await http.get(f"{MODELS}/third")).json()["id"] == "third"
            gone = await http.delete(f"{MODELS}/third")
            assert gone.json() == {"id": "third", "object": "model", "deleted": True}
            assert await ids(http) == ["sdxl-mini"] and await made_by(http, "third") == 404


async def test_an_id_is_a_further_name_of_a_model(worker: Worker, folder: Path) -> None:
    async with client_of(app_of(worker, FakePool(), folder)) as http:
        for id_ in ("a", "b"):
            loaded = await http.post(MODELS, json={"model": "other", "id": id_})
            assert loaded.json()["id"] == id_ and await made_by(http, id_) == "other"
        assert await ids(http) == ["sdxl-mini", "a", "b"]


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"model": "../models/other"}, 404, "model_not_found"),
        ({"model": "/etc"}, 404, "model_not_found"),
        ({"model": "style"}, 404, "model_not_found"),
        ({"model": "stabilityai/stable-diffusion-xl-base-1.0"}, 404, "model_not_found"),
        ({"model": "other", "id": "sdxl-mini"}, 409, "model_exists"),
        ({"model": "other", "id": "mini"}, 409, "model_exists"),
        ({"model": "other", "id": "mini-llm"}, 409, "model_exists"),
        ({"model": "other", "id": "a,b=c"}, 400, "invalid_value"),
        ({"model": "other", "precision": "int9"}, 400, "invalid_value"),
        ({"model": "other", "url": "http://localhost"}, 400, "unknown_parameter"),
    ],
)
async def test_a_wrong_model_is_refused(
    worker: Worker, folder: Path, asked: dict[str, Any], status: int, code: str
) -> None:
    pool = FakePool()
    async with client_of(app_of(worker, pool, folder)) as http:
        answer = await http.post(MODELS, json=asked)
        assert (answer.status_code, error_of(answer)["code"]) == (status, code), answer.text
    assert not pool.workers


async def test_a_model_of_the_start_stays(worker: Worker, folder: Path) -> None:
    async with client_of(app_of(worker, FakePool(), folder)) as http:
        refused = await http.delete(f"{MODELS}/mini")
        assert (refused.status_code, error_of(refused)["code"]) == (409, "model_of_start")
        assert (await http.delete(f"{MODELS}/other")).status_code == 404


@pytest.mark.parametrize(("method", "path"), [("POST", MODELS), ("DELETE", f"{MODELS}/other")])
def test_without_a_folder_the_setting_is_named(worker: Worker, method: str, path: str) -> None:
    answer = call(worker, method, path, json={"model": "other"})
    assert answer.status_code == 404 and "models_dir" in error_of(answer)["message"]


async def test_the_key_of_a_client_loads_and_unloads_nothing(
    worker: Worker, folder: Path, tmp_path: Path
) -> None:
    keys = file_of_keys(tmp_path, c="client 9 weight=2", o="root weight=2 operator")
    pool = FakePool()
    app = app_of(worker, pool, folder, keys=keys, sdapi=True)
    checkpoint = {"sd_model_checkpoint": "other"}
    async with client_of(app, "c") as client, client_of(app, "o") as operator:
        for path, body in ((MODELS, {"model": "other"}), (f"{PAGE}/options", checkpoint)):
            refused = await client.post(path, json=body)
            assert (refused.status_code, error_of(refused)["code"]) == (403, "operator_needed")
        assert not pool.workers
        assert (await operator.post(MODELS, json={"model": "other"})).status_code == 200
        assert (await client.delete(f"{MODELS}/other")).status_code == 403
        # Every client may choose a loaded model.
        assert (await client.post(f"{PAGE}/options", json=checkpoint)).status_code == 200
        assert (await client.post(f"{PAGE}/unload-checkpoint")).status_code == 403
        assert (await operator.delete(f"{MODELS}/other")).status_code == 200


async def test_an_unloaded_model_finishes_its_pictures(worker: Worker, folder: Path) -> None:
    pool = FakePool(tick_s=0.02)
    async with client_of(app_of(worker, pool, folder)) as http:
        await http.post(MODELS, json={"model": "other"})
        _, other = pool.workers["other"]
        body = {**ASKED, "model": "other", "steps": 40, "cache_interval": 1}
        running = [asyncio.ensure_future(http.post(GENERATE, json=body)) for _ in range(3)]
        while len(other._jobs) < len(running):
            await asyncio.sleep(0.01)
        await http.delete(f"{MODELS}/other")
        assert all(each.done() for each in running), "it is unloaded after its last picture"
        assert [(await each).status_code for each in running] == [200] * 3


async def test_every_front_end_knows_what_is_loaded(worker: Worker, folder: Path) -> None:
    pool = FakePool()
    async with (
        client_of(app_of(worker, pool, folder)) as one,
        client_of(app_of(worker, pool, folder)) as two,
    ):
        await one.post(MODELS, json={"model": "other"})
        assert await made_by(two, "other") == "other"
        await one.delete(f"{MODELS}/other")
        assert await made_by(two, "other") == 404
        assert await ids(two) == ["sdxl-mini"] and pool.forgotten == ["other"]


async def test_an_unload_ends_also_if_its_client_no_longer_waits(
    worker: Worker, folder: Path
) -> None:
    pool = FakePool(tick_s=0.02)
    served = ServedModels(ServeSettings(models_dir=str(folder)), [worker], pool=pool)
    await served.load("other")
    _, other = pool.workers["other"]
    picture = asyncio.create_task(picture_of(other, order(steps=40)))
    while other.is_idle:
        await asyncio.sleep(0.01)
    unload = asyncio.create_task(served.unload("other"))
    while pool.workers:
        await asyncio.sleep(0.01)
    unload.cancel()
    assert (await picture).image
    assert (await served.load("other")).backend is not other, "loaded after the unload"
    assert [model.id for model in served.all] == ["sdxl-mini", "other"]


async def test_two_that_load_a_model_at_once_get_the_same(worker: Worker, folder: Path) -> None:
    pool = FakePool()
    async with client_of(app_of(worker, pool, folder)) as http:
        both = [http.post(MODELS, json={"model": "other"}) for _ in range(2)]
        assert [each.status_code for each in await asyncio.gather(*both)] == [200, 200]
        assert await ids(http) == ["sdxl-mini", "other"]


# -- stable-diffusion-webui's checkpoints -----------------------------------------------------


async def test_a_checkpoint_switch_loads_and_others_stay(worker: Worker, folder: Path) -> None:
    async def made(**fields: Any) -> Any:
        answer = await http.post(f"{PAGE}/txt2img", json={"prompt": "a ring", "steps": 2, **fields})
        return httpx.Response(200, text=answer.json()["info"]).json()["sd_model_name"]

    async def titles() -> list[str]:
        return [model["title"] for model in (await http.get(f"{PAGE}/sd-models")).json()]

    pool = FakePool()
    async with client_of(app_of(worker, pool, folder, sdapi=True)) as http:
        names = ["sdxl-mini.safetensors", "other.safetensors", "sub/third.safetensors"]
        assert await titles() == names
        switch = {"sd_model_checkpoint": "sub/third.safetensors"}
        assert (await http.post(f"{PAGE}/options", json=switch)).status_code == 200
        shown = (await http.get(f"{PAGE}/options")).json()["sd_model_checkpoint"]
        assert shown == "third.safetensors" and shown in await titles()
        assert len(await titles()) == 3, "each file once"
        assert await made() == "third"
        assert await made(override_settings={"sd_model_checkpoint": "other"}) == "other"
        assert await made(override_settings=switch) == "third"
        assert await ids(http) == ["sdxl-mini", "third", "other"]
        assert (await http.post(f"{PAGE}/unload-checkpoint")).status_code == 200
        assert await ids(http) == ["sdxl-mini", "other"]
        assert (await http.get(f"{PAGE}/loras")).status_code == 200
        assert (await http.post(f"{PAGE}/reload-checkpoint")).status_code == 200
        assert "third" in pool.workers
        await http.post(f"{PAGE}/unload-checkpoint")
        assert await made() == "third", "the next request loads it again"
        unknown = await http.post(f"{PAGE}/options", json={"sd_model_checkpoint": "juggernaut"})
        assert unknown.status_code == 404


# -- files, names and memory ------------------------------------------------------------------


def test_models_below_the_folder_are_found_and_other_files_are_not(folder: Path) -> None:
    assert [file.name for file in files_below(str(folder))] == ["other", "sub/third"]
    assert find_file(str(folder), "third").name == "sub/third"
    with pytest.raises(Problem, match="did you mean sub/third") as caught:
        find_file(str(folder), "sub/thirt")
    assert caught.value.status == 404


@pytest.mark.parametrize(("id_", "precision"), [("", ""), ("my-model", "fp16")])
def test_an_application_is_named_by_all_that_its_model_needs(
    folder: Path, id_: str, precision: str
) -> None:
    settings = ServeSettings(models_dir=str(folder), aliases="gpt-image-1=mini", refiner="r")
    model = model_of(settings, find_file(str(folder), "third"), id_, precision)
    assert "/" not in application_name(model)
    assert model_in(settings, application_name(model)) == model
    assert model.settings.precision == precision and not model.settings.refiner


def test_a_model_that_does_not_fit_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mini = find("mini")
    check_room(mini, "")
    monkeypatch.setattr(room, "free_bytes", lambda: 2_100_000)
    with pytest.raises(NoMemory, match=r"sdxl-mini needs \d+\.\d GB, 0\.0 GB free"):
        check_room(mini, "")


def test_free_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "GROUP", tmp_path)
    machine = room.free_bytes()
    for name, text in (("memory.max", "5000\n"), ("memory.current", "3000\n")):
        (tmp_path / name).write_text(text)
    assert room.free_bytes() == 2000 < machine
    (tmp_path / "memory.max").write_text("max\n")
    assert room.free_bytes() > 2000


def test_the_cause_of_a_failed_load_is_the_clients_error() -> None:
    settings = ServeSettings(models_dir="/srv", model="/srv/other")
    text = "ray::ServeReplica\n  File x\n{}\n"
    model = ImageModel("other", settings)
    full = failure(text.format("engines.room.NoMemory: other needs 6.9 GB, 2.1 GB free"), model)
    assert (full.status, full.code) == (507, "no_room")
    assert full.message == "other needs 6.9 GB, 2.1 GB free; unload another model"
    wrong = failure(text.format("sdxl.x.CheckpointError: /srv/other/unet: no weights found"), model)
    assert (wrong.status, wrong.code) == (422, "model_not_loadable")
    assert wrong.message == "The model cannot be loaded: other/unet: no weights found"


@pytest.mark.parametrize(
    ("state", "is_there"),
    [("DEPLOYING", False), ("RUNNING", True), ("UNHEALTHY", True), ("DEPLOY_FAILED", False)],
)
async def test_a_model_is_listed_from_its_first_picture_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_there: bool
) -> None:
    settings = ServeSettings(models_dir=str(folder))
    model = model_of(settings, find_file(str(folder), "other"))
    # While the controller is replaced, Ray Serve lists nothing.
    answers = [{}, {"default": state, application_name(model): state}]

    def status() -> Any:
        applications = answers.pop(0) if len(answers) > 1 else answers[0]
        each = {
            name: SimpleNamespace(status=SimpleNamespace(value=value), message="", deployments={})
            for name, value in applications.items()
        }
        return SimpleNamespace(applications=each)

    monkeypatch.setattr(ray_models, "POLL_S", 0.0)
    monkeypatch.setattr("ray.serve.status", status)
    pool = ray_models.RayModels(settings)
    assert list(await pool.loaded()) == ([model] if is_there else [])
    # After the first use, a new deployment means that a replica or controller was replaced.
    pool._backends[application_name(model)] = Any  # type: ignore[assignment]
    assert (model in await pool.loaded()) == (state != "DEPLOY_FAILED")


async def test_a_model_that_no_request_uses_unloads_itself(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, deleted = RunTimeReplica.__new__(RunTimeReplica), list[str]()
    replica.worker, replica.model, replica._idle_s = worker, "other", 60.0
    context = SimpleNamespace(app_name="model-other")
    serve = SimpleNamespace(
        delete=lambda name, _blocking: deleted.append(name), get_replica_context=lambda: context
    )
    monkeypatch.setattr("serve.worker.replica.ray_serve", serve)

    async def check(used_s: float) -> None:
        replica._used_s = time.monotonic() - used_s
        await replica.check_health()

    await check(59)
    order = ImageOrder(GenerationParams(**ASKED), deadline_s=60)
    async with aclosing(replica.generate(order)) as updates:
        await anext(updates)
        await check(61)
        replica._used_s = time.monotonic() - 61
        async for _ in updates:
            pass
    await replica.check_health()
    assert not deleted
    await check(61)
    assert deleted == ["model-other"]
    replica._idle_s = 0.0
    await check(1e6)
    assert len(deleted) == 1
