"""Several image models behind one service: requests choose a model, and answers name it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdxl.checkpoint import MINI, Checkpoint
from sdxl.images import read_parameters
from sdxl.model_names import name_of
from sdxl.params import InvalidParams
from serve.app import fewest_of
from serve.errors import Problem
from serve.front.api import create_app
from serve.front.served_models import PATIENCE_S, START_S, ServedModels
from serve.models import deployment_names, image_models
from serve.orders import Done, ImageBackend, ImageOrder, ModelCard, PromptFacts
from serve.settings import ServeSettings, read
from serve.worker.replica import ImageReplica
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, client_of, error_of
from tests.serve.test_api import PROMPT, events_of
from tests.serve.test_edits import EDIT, QUICK, png
from tests.serve.test_settings import flags
from tests.serve.workers import fake_pipeline, order, running

TABLES: list[dict[str, Any]] = [{"model": "mini"}, {"model": "/models/other"}]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    other = replace(fake_pipeline(), checkpoint=Checkpoint("other", MINI))
    with running() as first, running(other) as second:
        yield [first, second]


@asynccontextmanager
async def served(
    backends: list[Worker], tables: list[dict[str, Any]] = TABLES, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backends, ServeSettings(models=tables, **settings))
    async with client_of(app) as http:
        yield http


def asked(workers: list[Worker], path: str, json: Any = None, **settings: Any) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with served(workers, **settings) as http:
            return await (http.get(path) if json is None else http.post(path, json=json))

    return asyncio.run(scenario())


def painter(data: str) -> Any:
    """Return the model that a picture's own metadata names."""
    return read_parameters(base64.b64decode(data))["model"]


ALIASES = "gpt-image-1=other, dall-e-3=mini"
NAMES = [
    (None, "sdxl-mini"),
    ("mini", "sdxl-mini"),
    ("sdxl-mini", "sdxl-mini"),
    ("dall-e-3", "sdxl-mini"),
    ("other", "other"),
    ("gpt-image-1", "other"),
]


@pytest.mark.parametrize(("name", "made_by"), NAMES)
def test_the_answer_names_its_model(workers: list[Worker], name: str | None, made_by: str) -> None:
    body = {"prompt": PROMPT, "steps": 2, "model": name}
    answer = asked(workers, GENERATE, body, aliases=ALIASES).json()
    assert answer["model"] == made_by == painter(answer["data"][0]["b64_json"])


def test_a_stream_names_the_model_too(workers: list[Worker]) -> None:
    body = {"prompt": PROMPT, "steps": 2, "model": "gpt-image-1", "stream": True}
    (last,) = events_of(asked(workers, GENERATE, body, aliases=ALIASES).text)
    assert last["model"] == "other" == painter(last["b64_json"])


async def test_an_edit_goes_to_the_model_that_it_names(workers: list[Worker]) -> None:
    cases: list[tuple[dict[str, str], str]] = [({"model": "other"}, "other"), ({}, "sdxl-mini")]
    async with served(workers) as http:
        for fields, model in cases:
            answer = await http.post(EDIT, data=QUICK | fields, files={"image": png()})
            assert answer.json()["model"] == model
            assert painter(answer.json()["data"][0]["b64_json"]) == model


@pytest.mark.parametrize("path", [GENERATE, "/v1/models/dall-e-9"])
def test_an_unknown_model_is_a_404_that_names_the_models(workers: list[Worker], path: str) -> None:
    body = {"prompt": PROMPT, "model": "dall-e-9"} if path == GENERATE else None
    answer = asked(workers, path, body)
    assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"
    message = "The model 'dall-e-9' does not exist; here are 'sdxl-mini', 'other'."
    assert error_of(answer)["message"] == message


async def test_every_list_of_models_has_them_all(workers: list[Worker]) -> None:
    async with served(workers) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["sdxl-mini", "other"]
        assert all(model["images"]["presets"] for model in listed)
        assert (await http.get("/v1/models/mini")).json()["id"] == "sdxl-mini"
        ready = (await http.get("/readyz")).json()
        assert ready["models"] == {"sdxl-mini": "ready", "other": "ready"}
        assert ready["model"] == "sdxl-mini"
        infos = (await http.get("/v1/metadata")).json()["modelInfo"]
        assert [info["shortName"] for info in infos] == ["sdxl-mini", "other"]


def test_metrics_are_counted_by_model(workers: list[Worker]) -> None:
    name = 'sdxl_images_total{model="%s",outcome="done"}'

    def made() -> dict[str, float]:
        page = dict(line.rsplit(" ", 1) for line in asked(workers, "/metrics").text.splitlines())
        return {id_: float(page.get(name % id_, 0)) for id_ in ("sdxl-mini", "other")}

    before = made()
    body = {"prompt": PROMPT, "steps": 2, "model": "other"}
    assert asked(workers, GENERATE, body).status_code == 200
    assert made() == {"sdxl-mini": before["sdxl-mini"], "other": before["other"] + 1}


def test_a_model_has_limits_of_its_own(workers: list[Worker]) -> None:
    tables = [{"model": "mini", "max_steps": 5}, {"model": "/models/other", "max_side": 128}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "mini", "steps": 6}, "steps"),
        ({"model": "other", "size": "256x256"}, "size"),
        ({"model": "other", "steps": 6}, ""),
        ({"model": "mini", "size": "256x256", "steps": 2}, ""),
    ]
    for fields, refused in cases:
        answer = asked(workers, GENERATE, {"prompt": PROMPT, **fields}, tables=tables)
        assert answer.status_code == (400 if refused else 200), answer.text
        assert not refused or error_of(answer)["param"] == refused


async def test_a_client_of_webui_chooses_by_its_checkpoint(workers: list[Worker]) -> None:
    txt2img, options = "/sdapi/v1/txt2img", "/sdapi/v1/options"
    body = {"prompt": PROMPT, "steps": 2}
    async with served(workers, sdapi=True, aliases=ALIASES) as http:

        async def made(**more: Any) -> Any:
            answer = (await http.post(txt2img, json=body | more)).json()
            named = json.loads(answer["info"])["sd_model_name"]
            assert named == painter(answer["images"][0])
            return named

        titles = [m["title"] for m in (await http.get("/sdapi/v1/sd-models")).json()]
        assert titles == ["sdxl-mini.safetensors", "other.safetensors"]
        assert await made() == "sdxl-mini"
        chosen = {"sd_model_checkpoint": "other.safetensors"}
        assert await made(override_settings=chosen) == "other"
        assert await made() == "sdxl-mini", "that held for one request"
        assert (await http.post(options, json=chosen)).status_code == 200
        answer = (await http.get(options)).json()
        assert answer["sd_model_checkpoint"] == "other.safetensors"
        assert await made() == "other"
        assert await made(override_settings={"sd_model_checkpoint": "dall-e-3"}) == "sdxl-mini"
        refused = await http.post(options, json={"sd_model_checkpoint": "juggernaut"})
        assert error_of(refused)["message"].endswith("here are 'sdxl-mini', 'other'.")


# -- one of them away -----------------------------------------------------------------------


class Away(ImageBackend):
    """Replicas that never answer, or refuse at once."""

    def __init__(self, is_silent: bool) -> None:
        self.is_silent = is_silent

    async def card(self) -> ModelCard:
        if self.is_silent:
            await asyncio.Event().wait()
        raise Problem(503, "loading", None, "starting")

    ready = card

    async def examine(self, prompt: str) -> PromptFacts:
        raise Problem(503, "loading", None, "starting")

    def generate(self, order: ImageOrder) -> AsyncGenerator[Any]:
        raise Problem(503, "loading", None, "starting")

    async def metrics(self) -> list[Any]:
        return []


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_lost_model_stops_no_other_model(workers: list[Worker], is_silent: bool) -> None:
    app = create_app([Away(is_silent), workers[1]], ServeSettings(models=TABLES))
    async with client_of(app) as http, asyncio.timeout(10 * PATIENCE_S):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["other"]
        body = {"prompt": PROMPT, "steps": 2}
        made = await http.post(GENERATE, json=body | {"model": "other"})
        assert made.status_code == 200
        if not is_silent:
            assert (await http.post(GENERATE, json=body)).status_code == 503
        assert (await http.get("/metrics")).status_code == 200


async def test_ready_waits_for_every_model_once_and_then_for_any(workers: list[Worker]) -> None:
    now_s, away = 0.0, Away(False)
    gone: ImageBackend = away

    class Second:
        async def ready(self) -> ModelCard:
            return await gone.ready()

    models = ServedModels(ServeSettings(models=TABLES), [workers[0], Second()], lambda: now_s)  # type: ignore[list-item]

    async def states() -> list[str]:
        return [type(state).__name__ for _, state in await models.ready()]

    with pytest.raises(Problem, match="loading"):
        await states()
    gone = workers[1]
    assert await states() == ["ModelCard", "ModelCard"]
    gone = away
    assert await states() == ["ModelCard", "Problem"], "it was there"

    fresh = ServedModels(ServeSettings(models=TABLES), [workers[0], away], lambda: now_s)
    now_s += START_S
    assert [type(state).__name__ for _, state in await fresh.ready()] == ["ModelCard", "Problem"]
    with pytest.raises(Problem):
        await ServedModels(ServeSettings(models=TABLES), [away, away], lambda: now_s).ready()


async def test_a_replica_makes_no_picture_for_another_model(workers: list[Worker]) -> None:
    """While one model replaces another, one deployment has replicas of both."""
    replica = ImageReplica.__new__(ImageReplica)
    replica.worker, replica.model = workers[0], "mini"

    async def last(model: str) -> Any:
        return [update async for update in replica.generate(order(steps=2, model=model))][-1]

    problem = await last("/models/other")
    assert isinstance(problem, Problem) and problem.code == "other_model"
    for model in ("", "mini"):
        done = await last(model)
        assert isinstance(done, Done) and done.model == "sdxl-mini"
    del replica.worker


# -- settings -------------------------------------------------------------------------------


def settings_of(*tables: dict[str, Any], **rest: Any) -> ServeSettings:
    return ServeSettings(models=list(tables), **rest)


def test_a_table_inherits_the_settings_for_all_models() -> None:
    settings = settings_of(
        {"model": "a", "replicas": 3}, {"model": "b", "precision": "int8"}, replicas=2, queue=7
    )
    first, second = image_models(settings)
    assert (first.settings.replicas, second.settings.replicas) == (3, 2)
    assert (first.settings.precision, second.settings.precision) == ("", "int8")
    assert first.settings.queue == second.settings.queue == 7
    assert first.settings.models == (), "another model's changes are none of its own"


def test_names_that_ray_does_not_take_stay_different() -> None:
    models = image_models(settings_of({"model": "/x/写实"}, {"model": "/x/动漫"}, {"model": "a b"}))
    assert len({model.deployment for model in models}) == 3
    assert all(model.deployment.isascii() for model in models)


UNIQUE = "model must be unique: rename one folder"


@pytest.mark.parametrize(
    ("tables", "rest", "named"),
    [
        ([{"replicas": 1}], {}, "models must each have model"),
        ([{"model": "a", "port": 1}], {}, "models must be one of model, vae.*, got 'port'"),
        ([{"model": "a", "replicas": -1}], {}, "replicas must be at least 0, got -1"),
        (["a", "b"], {}, "models must hold a table of settings for each model"),
        ([{"model": "/x/sdxl"}, {"model": "/y/sdxl"}], {}, UNIQUE),
        ([{"model": "mini"}, {"model": "sdxl-mini"}], {}, UNIQUE),
        ([{"model": "/x/mini-llm"}], {}, UNIQUE),
        (
            TABLES,
            {"aliases": "x=nowhere"},
            "aliases must name one of sdxl-mini, other, mini-llm for 'x', got 'nowhere'",
        ),
        (TABLES, {"aliases": "mini=other"}, "aliases must not be the name of a model"),
    ],
)
def test_a_wrong_setting_of_models_is_named(tables: Any, rest: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParams, match=named):
        image_models(ServeSettings(models=tables, **rest))


def test_the_first_deployment_keeps_its_name_and_the_others_go_by_their_models() -> None:
    settings = settings_of({"model": "mini"}, {"model": "/m/my model"}, {"model": "/m/b"})
    names = deployment_names(image_models(settings))
    assert names == ["ImageReplica", "ImageReplica-my-model-76eeb051", "ImageReplica-b"]


@pytest.mark.parametrize(
    ("replicas", "gpus", "expected"),
    [
        ([0], 8, [8]),
        ([0], 0, [1]),
        ([0, 0], 8, [4, 4]),
        ([0, 0, 0], 8, [3, 3, 2]),
        ([6, 0], 8, [6, 2]),
        ([0, 0], 1, [1, 1]),
        ([2, 5], 8, [2, 5]),
    ],
)
def test_gpus_are_shared_among_models(replicas: list[int], gpus: int, expected: list[int]) -> None:
    each = [ServeSettings(replicas=count) for count in replicas]
    assert fewest_of(each, is_gpu=gpus > 0, gpus=gpus) == expected
    assert fewest_of(each, is_gpu=False, gpus=0) == [count or 1 for count in replicas]


def test_a_models_name_is_known_where_its_folder_is_not() -> None:
    names = {
        "mini": "sdxl-mini",
        "/nowhere/juggernaut": "juggernaut",
        "/nowhere/juggernautXL.safetensors": "juggernautXL",
        "org/sdxl@main": "sdxl",
        "/nowhere/sdxl,vae=/v/fixed.safetensors": "sdxl+fixed",
        str(MINI): MINI.name,
    }
    assert {model: name_of(model) for model in names} == names


def test_models_come_from_flags_a_table_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[[models]]\nmodel = "a"\nreplicas = 6\n[[models]]\nmodel = "b"\n')
    assert [(s.model, s.replicas) for s in read(file, {}).of_models] == [("a", 6), ("b", 0)]
    several = read(file, {}, flags("--model", "c", "--model", "d", "--replicas", "2"))
    assert [(s.model, s.replicas) for s in several.of_models] == [("c", 2), ("d", 2)]
    for one in (read(file, {"SDXL_MODEL": "e"}), read(file, {}, flags("--model", "e"))):
        assert [s.model for s in one.of_models] == ["e"]
    file.write_text('model = "a"\n[[models]]\nmodel = "b"\n')
    with pytest.raises(InvalidParams, match="models cannot be used with model"):
        read(file, {})
    with pytest.raises(InvalidParams, match="models must be .*--model for each"):
        read(None, {"SDXL_MODELS": "a,b"})
