"""ControlNets of requests over REST: the applied maps, and refusals before queueing."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from sdxl.controls import Control
from sdxl.images import read_parameters
from sdxl.params import GenerationParams
from sdxl.pipeline import WithPictures
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.sdxl.test_source import saved
from tests.serve.servers import GENERATE, call, error_of, post
from tests.serve.test_api import events_of, picture
from tests.serve.test_batch_api import batch_api, line
from tests.serve.test_edits import EDIT, data_url, hole, picture_in, pixels, png, send

QUICK: dict[str, Any] = {"prompt": "a red circle", "steps": 3, "seed": 7, "size": "128x128"}


def map_of(seed: int, width: int = 128, height: int = 128) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return saved(Image.fromarray(noise))


MAP, OTHER = map_of(1), map_of(2)
EDGES: dict[str, Any] = {"name": "edges", "image": data_url(MAP)}
UNION: dict[str, Any] = {"name": "more/union", "image": data_url(MAP)}


def digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def made(worker: Worker, controls: Any, **fields: Any) -> bytes:
    return picture_in(post(worker, {**QUICK, **fields, "controls": controls}))


def assert_same(found: bytes, expected: bytes) -> None:
    """Compare with a tolerance, because calls of other sizes round differently."""
    assert read_parameters(found) == read_parameters(expected)
    assert np.abs(pixels(found).astype(int) - pixels(expected)).max() < 3


def plain(worker: Worker) -> bytes:
    return picture_in(post(worker, QUICK))


def test_a_map_guides_the_picture_as_the_pipeline_draws_it(controlled: Worker) -> None:
    file = made(controlled, [{**EDGES, "strength": 0.7, "end": 0.8, "mode": "prompt"}])
    control = Control("edges", "a", 0.7, end=0.8, mode="prompt")
    params = GenerationParams(
        "a red circle", width=128, height=128, steps=3, seed=7, controls=(control,)
    )
    (result,) = controlled.pipeline.generate([WithPictures(params, maps={"a": MAP})])
    assert result.image is not None
    drawn = ((result.image + 1) / 2).permute(1, 2, 0).numpy() * 255
    assert np.abs(drawn - pixels(file)).max() < 2
    assert np.abs(pixels(plain(controlled)).astype(int) - pixels(file)).max() > 20


def test_metadata_says_the_maps_and_nets_by_their_digests(controlled: Worker) -> None:
    stored = read_parameters(made(controlled, [{**EDGES, "strength": 0.5}, {**EDGES, "end": 0.5}]))
    assert [each["image"] for each in stored["controls"]] == [digest(MAP)] * 2
    assert [each["strength"] for each in stored["controls"]] == [0.5, 1.0]
    net = controlled.pipeline.catalogue.find("control", "edges")
    assert stored["control_files"] == {"edges": net.digests}
    assert str(net.path.parent.parent) not in json.dumps(stored)
    assert not {"controls", "control_files"} & read_parameters(plain(controlled)).keys()


def test_models_are_listed_with_their_controlnets(controlled: Worker) -> None:
    images = call(controlled, "GET", "/v1/models").json()["data"][0]["images"]
    assert images["controlnets"] == ["edges", "more/union"]


def edit(worker: Worker, files: Any, **fields: Any) -> httpx.Response:
    return send(worker, files, {"prompt": "a red circle", "steps": 4, "seed": 7, **fields})


def assert_as_form(
    worker: Worker, image: bytes, field: str, file_field: str, entries: Any
) -> bytes:
    """Assert that an edit gives the same picture as JSON and as a form, where OTHER of the second
    entry is a file. Return the picture."""
    first, second = entries
    body = {"prompt": "a red circle", "steps": 4, "seed": 7}
    body |= {"images": [{"image_url": data_url(image)}]}
    whole = [first, {**second, "image": data_url(OTHER)}]
    expected = picture_in(post(worker, {**body, field: whole}, EDIT))
    for name in (file_field, f"{file_field}[]"):
        files = [("image", image), (name, OTHER)]
        assert_same(picture_in(edit(worker, files, **{field: json.dumps(entries)})), expected)
    return expected


def test_forms_and_json_mean_the_same(controlled: Worker) -> None:
    image, entries = png(), [{**EDGES, "strength": 0.5}, {"name": "edges", "end": 0.5}]
    expected = assert_as_form(controlled, image, "controls", "control_image", entries)
    bare = json.dumps([{"name": "edges", "strength": 0.5}, {"name": "edges", "end": 0.5}])
    files = [("image", image), ("control_image", MAP), ("control_image", OTHER)]
    assert_same(picture_in(edit(controlled, files, controls=bare)), expected)
    stored = read_parameters(expected)
    assert [each["image"] for each in stored["controls"]] == [digest(MAP), digest(OTHER)]


def test_an_entry_without_a_map_uses_the_edited_image(controlled: Worker) -> None:
    image = png()
    canny = {"name": "edges", "preprocess": "canny"}
    whole = {**canny, "image": data_url(image)}
    expected = edit(controlled, {"image": image}, controls=json.dumps(whole))
    found = edit(controlled, {"image": image}, controls=json.dumps(canny))
    assert read_parameters(picture_in(found))["controls"][0]["image"] == ""
    assert np.array_equal(pixels(picture_in(found)), pixels(picture_in(expected)))


def test_a_map_lies_over_the_whole_image_if_only_a_part_is_redrawn(controlled: Worker) -> None:
    image, mask = png(400, 300), hole(400, 300, (200, 100, 240, 140))
    files = {"image": image, "mask": mask, "control_image": map_of(1, 400, 300)}
    assert edit(controlled, files, controls="edges", mask_padding="16").status_code == 200
    answer = edit(controlled, {**files, "control_image": MAP}, controls="edges", mask_padding="16")
    assert "its map is 128x128, the picture 400x300" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("controls", "words"),
    [
        ([{**EDGES, "name": "egdes"}], "must name ControlNets of the model, such as edges"),
        ([{"name": "edges"}], "with 'edges': needs the picture of its map"),
        (["edges=map.png"], "with 'edges': image must be a data URL"),
        ([{**EDGES, "image": "https://example.com/a.png"}], "other URLs are not fetched, got"),
        ([{**EDGES, "image": digest(MAP)}], "image must be a data URL"),
        ([{**EDGES, "image": "data:image/png;base64,%%%"}], "must be valid base64"),
        ([{**EDGES, "image": data_url(b"text")}], "with 'edges': its map must be a"),
        ([{**EDGES, "image": data_url(map_of(1, 128, 96))}], "its map is 128x96"),
        ([{**EDGES, "image": 5}], "image must be text, got 5"),
        ([{**EDGES, "strength": 3}], "strength must be a number from 0 to 2, got 3"),
        ([{**EDGES, "start": 0.5, "end": 0.5}], "start must be below end"),
        ([{**EDGES, "preprocess": "depth"}], "preprocess must be one of none, canny"),
        ([{**EDGES, "colour": 1}], "objects with name, image, strength"),
        ([5], "must be a list of"),
        ("edges", "must be a valid list"),
        ([UNION], "with 'more/union': type must be one of openpose, depth"),
        ([EDGES] * 20, "must have at most 16 entries, got 20"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_reason(
    controlled: Worker, controls: Any, words: str
) -> None:
    answer = post(controlled, {**QUICK, "controls": controls, "stream": True})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "controls")
    assert words in error_of(answer)["message"]
    assert len(error_of(answer)["message"]) < 700
    assert controlled.is_idle


@pytest.mark.parametrize("path", [GENERATE, EDIT, "/sdapi/v1/txt2img", "/sdapi/v1/img2img"])
def test_a_wrong_map_never_reaches_the_worker(
    controlled: Worker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "generate", None)
    wide = map_of(1, 128, 96)
    control = {"name": "edges", "image": data_url(b"text")}
    unit = {"model": "edges", "image": base64.b64encode(b"text").decode()}
    scripts = {"ControlNet": {"args": [unit]}}
    body: dict[str, Any] = {"prompt": "a red circle", "controls": [control]}
    if path == EDIT:
        body["images"] = [{"image_url": data_url(wide)}]
    elif path != GENERATE:
        images = {"init_images": [data_url(wide)]} if "img2img" in path else {}
        body = {**images, "alwayson_scripts": scripts}
    answer = post(controlled, body, path, sdapi=True)
    assert answer.status_code == 400, answer.text
    assert "with 'edges': its map must be a" in error_of(answer)["message"]


WIDE = {"name": "edges", "image": data_url(map_of(1, 128, 96))}


@pytest.mark.parametrize(
    ("entry", "more"),
    [
        (UNION, {"type": "depth"}),
        (UNION, {"preprocess": "canny"}),
        *((WIDE, {"resize": resize}) for resize in ("crop", "fill", "stretch")),
    ],
)
def test_a_union_needs_a_type_and_a_map_of_other_proportions_a_resize(
    controlled: Worker, entry: dict[str, Any], more: dict[str, str]
) -> None:
    (stored,) = read_parameters(made(controlled, [{**entry, **more}]))["controls"]
    assert stored.items() >= {"name": entry["name"], **more}.items()


@pytest.mark.parametrize(
    ("maps", "fields", "param", "words"),
    [
        (1, {}, "control_image", "must be 0 files"),
        (2, {"controls": "edges"}, "control_image", "must be 1 files"),
        (17, {"controls": "edges"}, "control_image", "must be 1 files"),
        (0, {"controls": "["}, "controls", "or JSON"),
        (0, {"controls": "edges,egdes"}, "controls", "such as edges"),
        (0, {"controls": "edges", "control_image": "text"}, "control_image", "not text"),
    ],
)
def test_a_form_with_wrong_files_is_refused(
    controlled: Worker, maps: int, fields: dict[str, str], param: str, words: str
) -> None:
    answer = edit(controlled, [("image", png()), *[("control_image", MAP)] * maps], **fields)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert words in error_of(answer)["message"]


def test_a_large_map_passes_as_json_and_as_text_of_a_form(controlled: Worker) -> None:
    large = map_of(3, 800, 800)
    assert len(large) > ServeSettings().max_body_bytes
    entry = {**EDGES, "image": data_url(large)}
    assert made(controlled, [entry])
    assert edit(controlled, {"image": png()}, controls=json.dumps(entry)).status_code == 200


def test_engines_without_controlnets_refuse_them(worker: Worker) -> None:
    answer = post(worker, {**QUICK, "controls": [EDGES]})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "controls")
    assert "these engines have no networks with ControlNets" in error_of(answer)["message"]
    assert call(worker, "GET", "/v1/models").json()["data"][0]["images"]["controlnets"] == []


def test_a_batch_makes_the_same_picture(controlled: Worker, tmp_path: Path) -> None:
    body = {**QUICK, "controls": [{**EDGES, "strength": 0.5}]}
    lines = [
        line("a", **body, n=2),
        line("b", **{**body, "controls": [{"name": "edges"}]}),
        line("c", **{**body, "controls": [{"name": "edges", "image": "map.png"}]}),
    ]
    with batch_api(tmp_path, first=controlled) as api:
        ended = api.ended(api.begin(*lines))
        (done,) = api.lines(ended.output_file_id)
        wrong = api.lines(ended.error_file_id)
    first = base64.b64decode(done["response"]["body"]["data"][0]["b64_json"])
    assert_same(first, made(controlled, body["controls"]))
    errors = {each["custom_id"]: each["response"]["body"]["error"] for each in wrong}
    assert {error["param"] for error in errors.values()} == {"controls"}
    assert "needs the picture of its map" in errors["b"]["message"]
    assert "image must be a data URL" in errors["c"]["message"]


def test_several_pictures_of_a_stream_have_the_map(controlled: Worker) -> None:
    answer = post(controlled, {**QUICK, "controls": [EDGES], "n": 2, "stream": True})
    stored = [read_parameters(picture(event)) for event in events_of(answer.text)]
    assert [each["controls"][0]["image"] for each in stored] == [digest(MAP)] * 2
