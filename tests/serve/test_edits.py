"""Edits over REST, in process on fake engines: forms, JSON, and refusals without side effects. The
official client is in test_openai_client.py.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from sdxl.images import read_parameters
from serve.batch_api.records import Records
from serve.batch_api.routes import add_batch_routes
from serve.front.api import create_app
from serve.front.sent_pictures import DecodingThread
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.sdxl.test_source import bomb, saved
from tests.serve.servers import call, client_of, error_of, file_of_keys, post
from tests.serve.test_api import events_of
from tests.serve.workers import fake_pipeline, running

EDIT = "/v1/images/edits"
PROMPT = "a red circle on a blue background"
QUICK = {"prompt": PROMPT, "steps": "4", "seed": "7"}


def hole(
    width: int = 128, height: int = 128, box: tuple[int, int, int, int] | None = None
) -> bytes:
    """Return a picture with a transparent middle, which OpenAI's clients use as the mask."""
    mask = Image.new("RGBA", (width, height), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), box or (32, 32, 96, 96))
    return saved(mask)


def png(width: int = 128, height: int = 128) -> bytes:
    return saved(Image.effect_noise((width, height), 60).convert("RGB"))


def send(
    worker: Worker, files: Any, fields: Mapping[str, Any] = QUICK, **settings: Any
) -> httpx.Response:
    return call(worker, "POST", EDIT, data=fields, files=files, settings=settings)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


IMG2IMG = "/sdapi/v1/img2img"
FORMS = [
    (EDIT, "images", lambda url: [{"image_url": url}]),
    (IMG2IMG, "init_images", lambda url: [url]),
]


@pytest.mark.parametrize(("path", "field", "images"), FORMS)
def test_a_key_above_its_rate_is_refused_before_its_image_is_decoded(
    worker: Worker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    field: str,
    images: Any,
) -> None:
    run, decoded = DecodingThread.run, list[Any]()

    async def counted(self: DecodingThread, *args: Any) -> Any:
        decoded.append(args)
        return await run(self, *args)

    monkeypatch.setattr(DecodingThread, "run", counted)
    settings = ServeSettings(sdapi=True, keys=file_of_keys(tmp_path, me="ann 1"))
    body = {"prompt": PROMPT, "steps": 2, field: images(data_url(png()))}

    async def send_twice() -> list[int]:
        async with client_of(create_app([worker], settings), "me") as http:
            return [(await http.post(path, json=body)).status_code for _ in range(2)]

    assert asyncio.run(send_twice()) == [200, 429] and len(decoded) == 1


@pytest.mark.parametrize(("path", "field", "images"), FORMS)
def test_a_deadline_bounds_the_wait_for_others_images(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, path: str, field: str, images: Any
) -> None:
    is_left = threading.Event()
    for name in ("edits", "a1111.routes"):
        monkeypatch.setattr(f"serve.front.{name}.prepare_edit", lambda *_: is_left.wait(50))
    headers = {"x-deadline-s": "0.05"}
    body = {"prompt": PROMPT, "steps": 2, field: images(data_url(png()))}
    try:
        answer = call(worker, "POST", path, {"sdapi": True}, json=body, headers=headers)
    finally:
        is_left.set()
    assert (answer.status_code, error_of(answer)["code"]) == (408, "deadline_exceeded")


def picture_in(answer: httpx.Response, index: int = 0) -> bytes:
    assert answer.status_code == 200, answer.text
    return base64.b64decode(answer.json()["data"][index]["b64_json"])


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_an_image_and_a_prompt_are_enough(worker: Worker) -> None:
    answer = send(worker, {"image": png(96, 160)}, {"prompt": PROMPT})
    stored = read_parameters(picture_in(answer))
    assert (stored["steps"], stored["strength"], stored["cache_interval"]) == (20, 0.8, 2)
    assert answer.json()["size"] == "96x160"
    (data,) = answer.json()["data"]
    assert (data["deep_steps"], data["shallow_steps"]) == (8, 8)


def test_unmasked_pixels_are_the_same_to_the_byte(worker: Worker) -> None:
    image = png()
    answer = send(worker, {"image": image, "mask": hole()})
    made, before = pixels(picture_in(answer)), pixels(image)
    changed = np.zeros((128, 128), bool)
    changed[32:96, 32:96] = True
    assert np.array_equal(made[~changed], before[~changed])
    assert not np.array_equal(made[changed], before[changed])
    assert read_parameters(picture_in(answer))["strength"] == 1.0


def test_a_picture_says_what_it_was_made_from(worker: Worker) -> None:
    image, mask = png(), hole()
    stored = read_parameters(picture_in(send(worker, {"image": image, "mask": mask})))
    assert stored["image_sha256"] == hashlib.sha256(image).hexdigest()
    assert stored["mask_sha256"] == hashlib.sha256(mask).hexdigest()


def test_every_field_of_a_form_reaches_the_picture(worker: Worker) -> None:
    fields = {
        **QUICK, "n": "2", "size": "96x160", "quality": "high", "strength": "0.5",
        "guidance_scale": "3.5", "scheduler": "ddim", "deep_steps": "0,1", "mask_blur": "3",
        "encoding": "sample", "negative_prompt": "blue", "output_format": "webp",
        "input_fidelity": "high", "user": "me",
    }  # fmt: skip
    answer = send(worker, {"image[]": png(), "mask": hole()}, fields)
    stored = read_parameters(picture_in(answer, 1))
    found = {name: stored[name] for name in ("seed", "steps", "strength", "guidance", "scheduler")}
    wanted = {"seed": 8, "steps": 4, "strength": 0.5, "guidance": 3.5, "scheduler": "ddim"}
    assert found == wanted
    assert (stored["deep_steps"], stored["mask_blur"], stored["encoding"]) == ([0, 1], 3, "sample")
    assert Image.open(io.BytesIO(picture_in(answer))).size == (96, 160)


@pytest.mark.parametrize(
    ("name", "given"),
    [("deep_steps[]", ["0", "2"]), ("deep_steps", ["0", "2"]), ("deep_steps[]", ["0,2"])],
)
def test_a_list_is_one_field_or_many(worker: Worker, name: str, given: list[str]) -> None:
    stored = read_parameters(picture_in(send(worker, {"image": png()}, {**QUICK, name: given})))
    assert stored["deep_steps"] == [0, 2]


def test_only_the_masked_part_is_painted_and_the_whole_picture_is_returned(worker: Worker) -> None:
    image = png(400, 300)
    mask = hole(400, 300, (200, 100, 240, 140))
    answer = send(worker, {"image": image, "mask": mask}, {**QUICK, "mask_padding": "16"})
    made, before = pixels(picture_in(answer)), pixels(image)
    assert made.shape == before.shape == (300, 400, 3)
    differs = (made != before).any(axis=2)
    assert differs[100:140, 200:240].any() and not differs[:100].any()
    assert answer.json()["size"] == "400x300"
    fields = {**QUICK, "mask_padding": "16", "stream": "true", "partial_images": "1"}
    events = events_of(send(worker, {"image": image, "mask": mask}, fields).text)
    assert [event["size"] for event in events] == ["400x300"] * 2


@pytest.mark.parametrize("prompt", [PROMPT, "", " "])
def test_json_means_the_same_as_a_form(worker: Worker, prompt: str) -> None:
    image, mask = png(), hole()
    form = send(worker, {"image": image, "mask": mask}, QUICK | {"prompt": prompt})
    body = {"prompt": prompt, "steps": 4, "seed": 7, "images": [{"image_url": data_url(image)}]}
    body["mask"] = {"image_url": data_url(mask)}
    assert picture_in(post(worker, body, EDIT)) == picture_in(form)


def test_an_edits_stream_has_events_of_its_own_name(worker: Worker) -> None:
    fields = {**QUICK, "steps": "12", "stream": "true", "partial_images": "2", "progress": "true"}
    answer = send(worker, {"image": png()}, fields)
    events = events_of(answer.text)
    kinds = [event["type"] for event in events]
    assert kinds.count("image_edit.partial_image") == 2 and kinds[-1] == "image_edit.completed"
    steps = [event["steps"] for event in events if event["type"] == "image_edit.progress"]
    assert set(steps) == {9}, "12 steps at a strength of 0.8 are 9"


REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "no image": ({"other": b""}, {}, "image", "image must be a file"),
    "text for an image": ({"other": b""}, {"image": "text"}, "image", "must be a file, not text"),
    "two images": ([("image[]", png()), ("image[]", png())], {}, "image", "2 images"),
    "17 images": ([("image[]", png(8, 8))] * 17, {}, "image", "must be at most 16 files, got 17"),
    "a bomb": ({"image": bomb(60_000, 60_000)}, {}, "image", "must have at most 33554432 pixels"),
    "a mask of another size": ({"image": png(), "mask": hole(96, 96)}, {}, "mask", "128x128"),
    "no number": ({"image": png()}, {"steps": "many"}, "steps", "steps"),
    "a number in Python's spelling": ({"image": png()}, {"steps": "1_0"}, "steps", "got '1_0'"),
    "such a number in a list": ({"image": png()}, {"deep_steps": "0,1_0"}, "deep_steps", "numbers"),
    "strength 2": ({"image": png()}, {"strength": "2"}, "strength", "strength"),
    "no step": ({"image": png()}, {"strength": "0.01"}, "strength", "to take one"),
    "padding without mask": ({"image": png()}, {"mask_padding": "8"}, "mask_padding", "mask"),
    "two seeds": ({"image": png()}, {"seed": ["1", "2"]}, "seed", "is given twice"),
    "a list of seeds": ({"image": png()}, {"seed[]": "1"}, "seed[]", "not a field here"),
    "another file": ({"image": png(), "markup": png()}, {}, "markup", "not a field here"),
    "a file for a list": ({"image": png(), "deep_steps": png()}, {}, "deep_steps", "numbers"),
    "too many steps": ({"image": png()}, {"steps": "500"}, "steps", "at most 100"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_edited_is_refused_in_the_envelope(worker: Worker, case: str) -> None:
    files, fields, param, message = REFUSED[case]
    answer = send(worker, files, {**QUICK, **fields})
    error = error_of(answer)
    assert answer.status_code == 400, error
    assert error["param"] == param and message in error["message"], error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"image_url": "http://example.com/a.png"}, "must be a data URL"),
        ({"image_url": "file:///etc/passwd"}, "must be a data URL"),
        ({"file_id": "file-1"}, "takes image_url only"),
        ({"image_url": "data:image/png;base64,####"}, "must be valid base64"),
        ({}, "takes image_url only"),
    ],
)
def test_no_client_s_url_is_fetched(worker: Worker, reference: Any, message: str) -> None:
    answer = post(worker, {"prompt": PROMPT, "images": [reference]}, EDIT)
    assert answer.status_code == 400 and message in error_of(answer)["message"]


def test_json_keeps_its_types(worker: Worker) -> None:
    images = [{"image_url": data_url(png())}]
    answer = post(worker, {"prompt": PROMPT, "images": images, "steps": "4"}, EDIT)
    assert answer.status_code == 400 and error_of(answer)["param"] == "steps"
    answer = post(worker, {"prompt": PROMPT, "images": images * 17}, EDIT)
    assert answer.status_code == 400 and error_of(answer)["param"] == "images"


def test_another_kind_of_body_is_refused(worker: Worker) -> None:
    answer = call(worker, "POST", EDIT, content=b"x", headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and "multipart/form-data" in error_of(answer)["message"]


@pytest.mark.parametrize("charset", ["undefined", "punycode", "unicode_escape"])
@pytest.mark.parametrize(
    ("path", "file", "field"), [(EDIT, "image", "prompt"), ("/v1/files", "file", "purpose")]
)
async def test_a_form_of_an_odd_charset_is_refused_and_stores_nothing(
    worker: Worker, tmp_path: Path, charset: str, path: str, file: str, field: str
) -> None:
    head = '--B\r\ncontent-disposition: form-data; name="%s"'
    name = f'{head % file}; filename="\\ud800"\r\n\r\n'.encode()
    text = f"{head % field}\r\n\r\n".encode() + b"batch\r\n"
    body = name + png() + b"\r\n" + text + b"--B--\r\n"
    kind = f"multipart/form-data; boundary=B; charset={charset}"
    settings = ServeSettings(batches_dir=str(tmp_path))
    Records(settings.batches_dir).prepare()
    app = create_app([worker], settings, add_batch_routes=add_batch_routes)
    before = [each for each in tmp_path.rglob("*") if each.is_file()]
    async with client_of(app) as http:
        answer = await http.post(path, content=body, headers={"content-type": kind})
    assert answer.status_code == 400 and error_of(answer), answer.text
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == before


def test_a_body_is_bounded_by_a_limit_of_its_own(worker: Worker) -> None:
    """The limit is far above that of other requests."""
    large = saved(Image.effect_noise((900, 900), 90).convert("RGB"))
    assert len(large) > ServeSettings().max_body_bytes
    assert send(worker, {"image": large}).status_code == 200
    answer = send(worker, {"image": large}, max_edit_bytes=len(large) // 2)
    assert answer.status_code == 413 and error_of(answer)["code"] == "body_too_large"


def test_engines_made_before_edits_existed_refuse_them() -> None:
    pipeline = fake_pipeline()
    known = {n: e for n, e in pipeline.engines.by_name.items() if n != "vae_encoder"}
    older = replace(pipeline, engines=replace(pipeline.engines, by_name=known))
    with running(older) as worker:
        answer = send(worker, {"image": png()})
    assert answer.status_code == 501 and error_of(answer)["code"] == "edits_unavailable"


def test_the_schema_describes_both_kinds_of_body(worker: Worker) -> None:
    paths = call(worker, "GET", "/openapi.json").json()["paths"]
    body = paths[EDIT]["post"]["requestBody"]["content"]
    assert set(body) == {"multipart/form-data", "application/json"}
    form, plain_json = (body[kind]["schema"] for kind in body)
    assert "strength" in form["properties"] and "strength" in plain_json["properties"]
    assert form["properties"]["image"] == {"type": "string", "format": "binary"}
    assert "$ref" not in json.dumps([form, plain_json])
