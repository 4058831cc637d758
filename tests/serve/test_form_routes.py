"""Further routes for forms: a prompt's length in tokens, and example pictures."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sdxl.images import read_parameters
from sdxl.infotext import read_metadata
from sdxl.prompt import BODY
from sdxl.sizes import Sizes
from serve.errors import Problem
from serve.front import form_routes
from serve.front.api import create_app
from serve.orders import ImageOrder
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.sdxl.test_infotext import A1111, COMFY
from tests.serve.servers import GENERATE, call, client, client_of, error_of, post
from tests.serve.workers import running

PROMPTS, EXAMPLES = "/v1/images/prompts", "/v1/images/examples"
SETTINGS = "/v1/images/settings"
MOST = 2 * BODY
OFFICIAL = "1152x896 896x1152 1216x832 832x1216 1344x768 768x1344 1536x640 640x1536 2048x2048"


@pytest.fixture(scope="module")
def short() -> Iterator[Worker]:
    """A worker whose prompts may have two passes of 75 tokens."""
    with running(max_prompt_tokens=MOST) as found:
        yield found


def ask(worker: Worker, body: Any, **settings: Any) -> httpx.Response:
    return post(worker, body, PROMPTS, **settings)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", 0),
        ("a red circle", 3),
        # Weights and the chunk's begin and end are not counted.
        ("a (red:1.3) [circle]", 3),
        ("a red circle " * 100, 300),
    ],
)
def test_a_prompt_s_tokens_are_counted(short: Worker, prompt: str, expected: int) -> None:
    result = ask(short, {"prompt": prompt}).json()
    assert result == {"tokens": expected, "max_tokens": MOST, "unknown_words": []}


def test_words_that_the_embedded_model_never_saw_are_named(short: Worker) -> None:
    result = ask(short, {"prompt": "a Red lighthouse, 3 (crosses:1.2) of düsk, lighthouse"}).json()
    assert result["unknown_words"] == ["lighthouse", "düsk"]


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_prompt_is_refused_from_one_token_above_the_limit(short: Worker, field: str) -> None:
    for count, status in ((MOST, 200), (MOST + 1, 400)):
        text = "red " * count
        assert ask(short, {"prompt": text}).json()["tokens"] == count
        answer = post(short, {"prompt": "a ring", field: text, "steps": 1})
        assert answer.status_code == status, answer.text
    error = error_of(answer)
    assert error["param"] == field
    assert error["message"] == f"{field} must have at most {MOST} tokens, got {MOST + 1}"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "(a:1.2.3)"}, 400, "prompt"),
        ({"prompt": "a" * 2001}, 400, "prompt"),
        ({"prompt": "a", "model": "none"}, 404, "model"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    short: Worker, body: Any, status: int, param: str
) -> None:
    answer = ask(short, body, max_prompt_chars=2000)
    assert (answer.status_code, error_of(answer)["param"]) == (status, param)


async def test_examples_are_the_pictures_that_their_prompts_and_seeds_give(short: Worker) -> None:
    async with client(short) as http:
        result = (await http.get(EXAMPLES)).json()["data"]
        pictures, others = result[: len(form_routes.EMBEDDED)], result[len(form_routes.EMBEDDED) :]
        assert [each["prompt"] for each in pictures] == list(form_routes.EMBEDDED)
        for each in pictures[:2]:
            asked = {"prompt": each["prompt"], "seed": each["seed"]}
            (data,) = (await http.post(GENERATE, json=asked)).json()["data"]
            assert data["b64_json"] == each["b64_json"]
            assert read_parameters(base64.b64decode(each["b64_json"]))["seed"] == each["seed"]
        assert len(others) == form_routes.MORE and all(list(each) == ["prompt"] for each in others)
        for each in result:
            facts = (await http.post(PROMPTS, json={"prompt": each["prompt"]})).json()
            assert facts["unknown_words"] == []


async def test_examples_are_made_once_however_many_ask(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, orders = worker.generate, list[ImageOrder]()

    def counted(order: ImageOrder) -> Any:
        orders.append(order)
        return generate(order)

    monkeypatch.setattr(worker, "generate", counted)
    async with client(worker) as http:
        answers = await asyncio.gather(*(http.get(EXAMPLES) for _ in range(5)))
        answers.append(await http.get(EXAMPLES, params={"model": "sdxl-mini"}))
        assert len({answer.content for answer in answers}) == 1
        assert len(orders) == len(form_routes.EMBEDDED)


async def test_examples_that_failed_are_made_when_asked_for_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(order: ImageOrder) -> Any:
        raise Problem(503, "later", None, "overloaded")

    async with client(worker) as http:
        with monkeypatch.context() as patched:
            patched.setattr(worker, "generate", refuse)
            assert (await http.get(EXAMPLES)).status_code == 503
        assert (await http.get(EXAMPLES)).status_code == 200


async def test_other_models_have_example_prompts_without_pictures(short: Worker) -> None:
    settings = ServeSettings(models=({"model": "elsewhere/sdxl-base"},))
    async with client_of(create_app([short], settings)) as http:
        data = (await http.get(EXAMPLES)).json()["data"]
        assert data == [{"prompt": prompt} for prompt in form_routes.ANY]


@pytest.mark.parametrize("body", [{"parameters": A1111}, {"prompt": json.dumps(COMFY)}])
def test_other_programs_settings_are_read(worker: Worker, body: dict[str, str]) -> None:
    found = post(worker, body, SETTINGS).json()
    (text,) = body.values()
    expected = read_metadata(body)
    assert found == {"params": expected.params, "unread": expected.unread}, text
    assert found["params"]["prompt"] and found["unread"]


def test_a_controlnet_without_its_map_is_left_out(worker: Worker) -> None:
    unit = 'ControlNet 0: "Model: edges [0123abcd], Weight: 0.5"'
    text = f"a\nSteps: 4, Sampler: Euler, Seed: 1, {unit}"
    found = post(worker, {"parameters": text}, SETTINGS).json()
    assert "controls" not in found["params"] and found["params"]["steps"] == 4
    assert any("edges" in each and "map" in each for each in found["unread"])


def comfys(node: str, **inputs: Any) -> dict[str, str]:
    graph = copy.deepcopy(COMFY)
    graph["20"] = {"class_type": "ControlNetApply", "inputs": {"conditioning": ["6", 0]}}
    graph["21"] = {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "a"}}
    graph["20"]["inputs"] |= {"control_net": ["21", 0], "strength": 1}
    graph["3"]["inputs"]["positive"] = ["20", 0]
    graph[node]["inputs"] |= inputs
    return {"prompt": json.dumps(graph)}


SURROGATE = r'"\ud800"'
FACTS = "a\nSteps: 4, Sampler: Euler, Seed: 1, "


@pytest.mark.parametrize(
    "body",
    [
        *(comfys("3", cfg=number) for number in (10**400, float("inf"), float("nan"))),
        *(comfys("11", strength_model=number) for number in (10**400, float("inf"))),
        comfys("20", strength=10**400),
        comfys("6", text="a \ud800"),
        *({"parameters": f"{FACTS}{name}: {SURROGATE}"} for name in ("Refiner", "Other")),
        {"parameters": FACTS + 'ControlNet 0: "Module: none, Model: \\ud800, Weight: 1"'},
    ],
)
def test_odd_settings_are_left_out(worker: Worker, body: dict[str, str]) -> None:
    answer = post(worker, body, SETTINGS)
    assert answer.status_code == 200 and answer.json()["params"]["prompt"], answer.text
    assert "null" not in answer.text.replace('"text_weight":null', "")


@pytest.mark.parametrize("body", [{}, {"parameters": ""}, {"prompt": "{"}, {"prompt": "[" * 5000}])
def test_texts_without_a_prompt_are_refused(worker: Worker, body: dict[str, str]) -> None:
    answer = post(worker, body, SETTINGS)
    assert answer.status_code == 400 and "must name a prompt" in error_of(answer)["message"]


def test_a_form_has_defaults_groups_labels_and_usual_sizes(worker: Worker) -> None:
    images = call(worker, "GET", "/v1/models").json()["data"][0]["images"]
    controls = {each["name"]: each for each in images["parameters"]}
    assert controls["steps"]["default"] == 20
    assert "default" not in controls["cache_interval"], "it goes by the steps"
    assert controls["cache_interval"]["placeholder"] == "2, with fewer than 8 steps 1"
    assert "group" not in controls["steps"] and controls["upscale"]["group"] == "Upscale"
    scheduler = controls["scheduler"]
    labels = dict(zip(scheduler["choices"], scheduler["labels"], strict=True))
    assert labels["dpmpp_2m_karras"] == "DPM++ 2M Karras"
    for size in images["sizes"]:
        answer = post(worker, {"prompt": "a ring", "steps": 1, "size": size})
        assert answer.status_code == 200, size


def test_sdxl_s_official_sizes_are_the_usual_ones() -> None:
    wide, longest = Sizes(1024, 512, 2048).usual(2048), Sizes(1024, 512, 2048).usual(1344)
    assert wide == tuple(OFFICIAL.split()) and longest == wide[:6]
