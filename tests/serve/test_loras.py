"""LoRAs of requests on every interface, over a worker on fakes: which are applied, and where."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdxl.catalogue import DIFFUSERS_FILE
from sdxl.digests import sha256_of
from sdxl.images import read_parameters
from sdxl.infotext import read_text
from sdxl.model_names import folders_of
from sdxl.params import InvalidParams
from sdxl.picture_files import read_texts
from sdxl.places import HOME, LORAS, MINI
from serve.worker.worker import Worker
from tests.serve.servers import call, error_of, post
from tests.serve.test_edits import EDIT, picture_in, png
from tests.serve.workers import running, with_loras

QUICK: dict[str, Any] = {"prompt": "a ring", "steps": 4, "seed": 7}
FEW = {"name": "few_steps", "weight": 0.8, "text_weight": None}
HOLLOW = {"name": "hollow", "weight": 1.0, "text_weight": 0.2}
SDAPI = {"sdapi": True}


@pytest.fixture(scope="module")
def styled() -> Iterator[Worker]:
    """A worker whose model has the LoRAs of the embedded one."""
    with running(with_loras(LORAS)) as found:
        yield found


@pytest.mark.parametrize(
    "fields",
    [
        {"loras": ["few_steps:0.8", "hollow:1:0.2"]},
        {"loras": [FEW, {"name": "hollow", "text_weight": 0.2}]},
        {"loras": ["few_steps:0.5"], "prompt": "a <lora:few_steps:0.3>ring <lora:hollow:0.2:1>"},
        {"prompt": "a ring<lora:few_steps:0.8>", "negative_prompt": "<lyco:hollow:te=0.2:unet=1>"},
    ],
)
def test_a_list_and_tags_mean_the_same(styled: Worker, fields: dict[str, Any]) -> None:
    file = picture_in(post(styled, {**QUICK, **fields}))
    stored = read_parameters(file)
    assert (stored["prompt"], stored["negative_prompt"]) == ("a ring", None)
    assert stored["loras"] == [FEW, HOLLOW]
    digest = sha256_of(LORAS / "few_steps" / DIFFUSERS_FILE)
    assert stored["lora_files"]["few_steps"]["sha256"] == digest
    text = read_texts(file)["parameters"]
    assert text.startswith("a ring <lora:few_steps:0.8> <lora:hollow:0.2:1>\n")
    content = (LORAS / "few_steps" / DIFFUSERS_FILE).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    short = hashlib.sha256(content[header:]).hexdigest()[:12]
    assert stored["lora_files"]["few_steps"]["short"] == short
    assert f'Lora hashes: "few_steps: {short}, hollow: ' in text
    assert read_text(text).params["loras"] == stored["loras"]
    assert file == picture_in(post(styled, {**QUICK, "loras": [FEW, HOLLOW]}))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("loras", ["few_steps:0.8,hollow:1:0.2"]),
        ("loras", ["few_steps:0.8", json.dumps(HOLLOW)]),
        ("loras[]", ["few_steps:0.8", "hollow:1:0.2"]),
        ("loras", [json.dumps([FEW, "hollow:1:0.2"])]),
    ],
)
def test_a_form_s_list_is_texts_or_json(styled: Worker, name: str, given: list[str]) -> None:
    fields = {**QUICK, name: given}
    answer = call(styled, "POST", EDIT, data=fields, files={"image": png()})
    assert read_parameters(picture_in(answer))["loras"] == [FEW, HOLLOW]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"loras": ["holow"]}, "loras", "hollow"),
        ({"loras": ["../hollow"]}, "loras", "hollow"),
        ({"prompt": "a ring <lora:outline>"}, "loras", "outlined"),
        ({"loras": ["hollow:9"]}, "loras", "weight must be a number from -2 to 2, got 9"),
        ({"loras": "hollow"}, "loras", "must be a valid list"),
        ({"prompt": "<lora:hollow:x>"}, "prompt", "must name a LoRA as <lora:NAME:WEIGHT>"),
        ({"negative_prompt": "<hypernet:a:1>"}, "negative_prompt", "not supported"),
    ],
)
def test_a_wrong_lora_is_refused_by_name(
    styled: Worker, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = post(styled, {**QUICK, **fields})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert words in error_of(answer)["message"]


@pytest.mark.parametrize("value", ["[", '{"name":', "few_steps:x"])
def test_a_wrong_entry_of_a_form_is_refused(styled: Worker, value: str) -> None:
    fields = {**QUICK, "loras": value}
    answer = call(styled, "POST", EDIT, data=fields, files={"image": png()})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "loras")


def test_files_are_found_while_the_service_runs(tmp_path: Path) -> None:
    with running(with_loras(tmp_path)) as worker:

        def names() -> list[list[str]]:
            models = call(worker, "GET", "/v1/models").json()["data"][0]["images"]
            listed = call(worker, "GET", "/sdapi/v1/loras", settings=SDAPI).json()
            assert all(each["path"] == f"{each['name']}.safetensors" for each in listed)
            return [models["loras"], [each["name"] for each in listed]]

        assert names() == [[], []]
        assert post(worker, {**QUICK, "loras": ["new"]}).status_code == 400
        (tmp_path / "new.safetensors").write_bytes(
            (LORAS / "few_steps" / DIFFUSERS_FILE).read_bytes()
        )
        assert call(worker, "POST", "/sdapi/v1/refresh-loras", settings=SDAPI).status_code == 200
        assert names() == [["new"], ["new"]]
        assert post(worker, {**QUICK, "loras": ["new"]}).status_code == 200
        (tmp_path / "embeddings").mkdir()
        (tmp_path / "embeddings" / "neon.safetensors").write_bytes(bytes(8))
        embeddings = call(worker, "GET", "/sdapi/v1/embeddings", settings=SDAPI).json()
        assert (list(embeddings["loaded"]), embeddings["skipped"]) == (["neon"], {})
        file = picture_in(post(worker, {**QUICK, "prompt": "a ring, neon"}))
        digest = hashlib.sha256(bytes(8)).hexdigest()
        assert f"TI hashes: neon: {digest[:12]}" in read_texts(file)["parameters"].replace('"', "")
        assert read_parameters(file)["embedding_files"]["neon"]["sha256"] == digest


def test_webui_s_clients_send_and_get_tags(styled: Worker) -> None:
    body = {"prompt": "a ring <lora:hollow:0.5>", "steps": 4, "seed": 1}
    answer = call(styled, "POST", "/sdapi/v1/txt2img", settings=SDAPI, json=body).json()
    info = json.loads(answer["info"])
    assert info["prompt"] == info["all_prompts"][0] == "a ring <lora:hollow:0.5>"
    assert info["infotexts"][0].startswith("a ring <lora:hollow:0.5>\n")


def test_tags_are_no_tokens(styled: Worker) -> None:
    def facts(prompt: str) -> dict[str, Any]:
        answer = call(styled, "POST", "/v1/images/prompts", json={"prompt": prompt})
        return dict(answer.json())

    assert facts("a ring <lora:zebra:0.5>") == facts("a ring")


def test_a_picture_without_loras_says_nothing_of_them(styled: Worker) -> None:
    stored = read_parameters(picture_in(post(styled, {**QUICK, "loras": []})))
    assert not {"loras", "lora_files"} & stored.keys()


def test_the_schema_describes_an_entry(styled: Worker) -> None:
    schema = call(styled, "GET", "/openapi.json").json()
    loras = schema["components"]["schemas"]["ImageRequest"]["properties"]["loras"]
    text, form = loras["anyOf"][0]["items"]["anyOf"]
    assert text["type"] == "string"
    assert form["properties"]["weight"]["maximum"] == 2 and form["required"] == ["name"]


def test_a_model_s_loras_lie_beside_it_and_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    (tmp_path / "sdxl.safetensors").touch()
    beside, home = tmp_path / "loras", tmp_path / "home" / "loras"
    assert folders_of("mini", MINI, "loras") == [LORAS, home]
    with_vae, file = "sdxl-mini,vae=v.safetensors", str(tmp_path / "sdxl.safetensors")
    assert folders_of(with_vae, tmp_path / "converted", "loras") == [LORAS, home]
    assert folders_of(file, tmp_path / "x" / "y", "loras") == [beside, home]
    assert folders_of("org/name", tmp_path / "snapshot", "loras") == [beside, home]
    assert folders_of("mini", MINI, "loras", str(tmp_path)) == [tmp_path, LORAS, home]
    with pytest.raises(InvalidParams, match="loras must be a folder, got 'nowhere'"):
        folders_of("mini", MINI, "loras", "nowhere")
