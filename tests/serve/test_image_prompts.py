"""Image prompts of requests over REST, of `sdxl render` and of jobs' rows."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import engines
from sdxl import cli
from sdxl.catalogue import Catalogue
from sdxl.image_prompts import ImagePrompt
from sdxl.images import read_parameters, to_pixels
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.provenance import Provenance
from serve.batch.batch_spec import HAS_DEAD
from serve.batch.renderers import LocalRenderer, body_of
from serve.orders import ImageOrder
from serve.worker.worker import Worker
from tests.sdxl.image_adapters import PLAIN, PLUS, write_adapters
from tests.sdxl.test_source import saved
from tests.serve import workers
from tests.serve.batch.drawers import dead_letters, jsonl, make, pictures
from tests.serve.servers import call, error_of, post
from tests.serve.test_batch_api import batch_api, line
from tests.serve.test_controls import MAP, QUICK, assert_as_form, assert_same, digest, plain
from tests.serve.test_edits import data_url, picture_in, pixels, png

OTHER = saved(Image.linear_gradient("L").convert("RGB"))
ONE: dict[str, Any] = {"name": PLAIN, "image": data_url(MAP)}
TWO = [{**ONE, "strength": 0.7, "end": 0.8}, {"name": PLUS, "image": data_url(OTHER)}]


@pytest.fixture(scope="module")
def model(mini: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = write_adapters(tmp_path_factory.mktemp("ip_adapters"))
    return replace(mini, catalogue=Catalogue(image_folders=[folder]))


@pytest.fixture(scope="module")
def prompted(model: Pipeline) -> Iterator[Worker]:
    with workers.running(model) as found:
        yield found


def made(worker: Worker, prompts: Any, **fields: Any) -> bytes:
    return picture_in(post(worker, {**QUICK, **fields, "image_prompts": prompts}))


def drawn(model: Pipeline, *prompts: ImagePrompt) -> Any:
    params = GenerationParams(
        "a red circle", width=128, height=128, steps=3, seed=7, image_prompts=prompts
    )
    (result,) = model.generate([WithPictures(params, maps={"a": MAP, "b": OTHER})])
    assert result.image is not None, result.error
    return to_pixels(result.image)


def test_a_picture_prompts_as_in_the_pipeline(prompted: Worker) -> None:
    file = made(prompted, TWO)
    expected = drawn(
        prompted.pipeline, ImagePrompt(PLAIN, "a", 0.7, end=0.8), ImagePrompt(PLUS, "b")
    )
    assert np.abs(expected.astype(int) - pixels(file)).max() < 2
    assert np.abs(pixels(plain(prompted)).astype(int) - pixels(file)).max() > 20
    stored = read_parameters(file)
    assert [each["image"] for each in stored["image_prompts"]] == [digest(MAP), digest(OTHER)]
    files = (prompted.pipeline.catalogue.find("image", name) for name in (PLAIN, PLUS))
    assert stored["image_prompt_files"] == {each.name: each.digests for each in files}
    assert not {"image_prompts", "image_prompt_files"} & read_parameters(plain(prompted)).keys()


def test_models_are_listed_with_their_ip_adapters(prompted: Worker) -> None:
    images = call(prompted, "GET", "/v1/models").json()["data"][0]["images"]
    assert images["ip_adapters"] == [PLUS, PLAIN]


def test_forms_and_json_mean_the_same(prompted: Worker) -> None:
    entries = [{**ONE, "strength": 0.5}, {"name": PLUS, "mode": "style"}]
    assert_as_form(prompted, png(), "image_prompts", "prompt_image", entries)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([{**ONE, "name": "ip-adapter"}], f"must name IP-Adapters of the model, such as {PLAIN}"),
        ([{"name": PLAIN}], f"with '{PLAIN}': needs its picture"),
        ([{**ONE, "image": data_url(b"text")}], f"with '{PLAIN}': its picture must be a"),
        ([{**ONE, "mode": "loud"}], "mode must be one of usual, style, composition"),
        ([{**ONE, "resize": "crop"}], "objects with name, image, strength"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_reason(
    prompted: Worker, prompts: Any, words: str
) -> None:
    answer = post(prompted, {**QUICK, "image_prompts": prompts})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "image_prompts")
    assert words in error_of(answer)["message"]
    assert prompted.is_idle


def test_engines_without_image_prompts_refuse_them(worker: Worker) -> None:
    answer = post(worker, {**QUICK, "image_prompts": [ONE]})
    assert "these engines have no networks with image prompts" in error_of(answer)["message"]
    assert call(worker, "GET", "/v1/models").json()["data"][0]["images"]["ip_adapters"] == []


def test_pictures_of_one_request_have_the_image_prompt(prompted: Worker) -> None:
    answer = post(prompted, {**QUICK, "image_prompts": [ONE], "n": 2})
    first, second = (base64.b64decode(each["b64_json"]) for each in answer.json()["data"])
    assert_same(first, made(prompted, [ONE]))
    assert_same(second, made(prompted, [ONE], seed=QUICK["seed"] + 1))


def test_a_batch_makes_the_same_picture(prompted: Worker, tmp_path: Path) -> None:
    body = {**QUICK, "image_prompts": [ONE]}
    lines = [line("a", **body), line("b", **{**body, "image_prompts": [{"name": PLAIN}]})]
    with batch_api(tmp_path, first=prompted) as api:
        ended = api.ended(api.begin(*lines))
        (done,) = api.lines(ended.output_file_id)
        (wrong,) = api.lines(ended.error_file_id)
    first = base64.b64decode(done["response"]["body"]["data"][0]["b64_json"])
    assert_same(first, made(prompted, [ONE]))
    assert "needs its picture" in wrong["response"]["body"]["error"]["message"]


def test_a_job_makes_the_library_s_pictures(model: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(MAP)
    fields = {"prompt": "a red circle", "steps": 3, "seed": 7, "width": 128, "height": 128}
    rows = [
        {**fields, "image_prompts": [f"{PLAIN}=a.png:0.7"]},
        {**fields, "image_prompts": [{"name": PLAIN}]},
        {**fields, "image_prompts": ["ip-adapter=a.png"]},
    ]
    source, out = jsonl(tmp_path, rows), tmp_path / "out"
    assert make(source, out, load=lambda: LocalRenderer(model, Provenance())) == HAS_DEAD
    (file,) = pictures(out).values()
    with Image.open(io.BytesIO(file)) as picture:
        distance = np.asarray(picture).astype(int) - drawn(model, ImagePrompt(PLAIN, "a", 0.7))
    assert np.abs(distance).max() <= 2
    assert read_parameters(file)["image_prompts"][0]["image"] == digest(MAP)
    errors = sorted(letter["error"] for letter in dead_letters(out))
    assert "image_prompts must name IP-Adapters" in errors[0] and "needs its picture" in errors[1]


def test_a_request_to_a_service_has_its_pictures() -> None:
    params = GenerationParams("a", seed=1, image_prompts=(ImagePrompt(PLAIN, digest(MAP)),))
    (entry,) = body_of(ImageOrder(params, maps={digest(MAP): MAP}), "m")["image_prompts"]
    assert entry["image"] == data_url(MAP)


def test_render_makes_a_picture_again_with_its_image_prompts(
    model: Pipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines, "load", lambda **_: model)
    Path("a.png").write_bytes(MAP)
    quick = ["render", "a ring", "--width", "128", "--height", "96", "--steps", "3", "--seed", "7"]
    flag = f"{PLAIN}=a.png:0.8:0-0.9:style"

    def error_in(*argv: str) -> str:
        assert cli.main([*argv, "--json"]) == 2
        return capsys.readouterr().err

    assert cli.main([*quick, "--image-prompt", flag, "--out", "b.png"]) == 0
    (stored,) = read_parameters(Path("b.png"))["image_prompts"]
    assert (stored["image"], stored["strength"], stored["mode"]) == (digest(MAP), 0.8, "style")
    again = ["render", "--from", "b.png", "--out", "c.png"]
    needed = f"from needs the pictures again: --image-prompt {PLAIN}=FILE (sha256 "
    assert needed in error_in(*again)
    assert cli.main([*again, "--image-prompt", f"{PLAIN}=a.png"]) == 0
    assert Path("b.png").read_bytes() == Path("c.png").read_bytes()
    message = f"image_prompts with '{PLAIN}': needs the file of its picture, {PLAIN}=FILE\n"
    assert message in error_in(*quick, "--image-prompt", PLAIN)
    assert "must name IP-Adapters" in error_in(*quick, "--image-prompt", "ip=a.png")


SDAPI = {"sdapi": True}
UNIT = {"model": PLAIN, "module": "ip-adapter-auto", "weight": 0.7, "guidance_end": 0.8}


def made_by_webui(worker: Worker, *units: dict[str, Any], **fields: Any) -> Any:
    own = {"prompt": "a red circle", "steps": 3, "seed": 7, "width": 128, "height": 128}
    scripts = {"ControlNet": {"args": [*units]}}
    body = {**own, "cfg_scale": 5, "sampler_name": "Euler", **fields, "alwayson_scripts": scripts}
    path = "/sdapi/v1/img2img" if "init_images" in fields else "/sdapi/v1/txt2img"
    return post(worker, body, path, sdapi=True)


def test_webui_s_units_of_ip_adapters_are_image_prompts(prompted: Worker) -> None:
    """This holds also with the list's hash in the name, and beside another unit."""
    models = call(prompted, "GET", "/controlnet/model_list", SDAPI).json()["model_list"]
    listed = next(each for each in models if each.startswith(PLUS))
    first = {**UNIT, "image": base64.b64encode(MAP).decode()}
    second = {"model": listed, "image": data_url(OTHER), "module": "ip-adapter_clip_h"}
    answer = made_by_webui(prompted, first, second)
    assert answer.status_code == 200, answer.text[:300]
    found = base64.b64decode(answer.json()["images"][0])
    assert_same(found, made(prompted, TWO))
    kinds = call(prompted, "GET", "/controlnet/control_types", SDAPI).json()["control_types"]
    assert kinds["IP-Adapter"]["model_list"] == ["None", *models]
    image = data_url(png())
    assert made_by_webui(prompted, first, init_images=[image]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "ip-adapter"}, "must name ControlNets of the model, such as ip-adapter"),
        ({"module": "canny"}, "unit 0: module must be none or one of ip-adapter-auto"),
        ({"module": "ip-adapter_face_id"}, "unit 0: module must be none or canny"),
        ({"control_mode": 1}, "control_mode must be 'Balanced', without guessmode"),
        ({"image": None}, f"with '{PLAIN}': needs its picture"),
        ({"image": "AAAA"}, f"with '{PLAIN}': its picture must be a"),
    ],
)
def test_what_webui_s_units_cannot_have_is_refused(
    prompted: Worker, fields: dict[str, Any], words: str
) -> None:
    answer = made_by_webui(prompted, {**UNIT, "image": data_url(MAP), **fields})
    assert answer.status_code == 400 and words in error_of(answer)["message"], answer.text
