"""sd-webui-controlnet's units and routes, by webuiapi's unchanged client and other programs."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from sdxl.canny import canny
from sdxl.images import read_parameters
from sdxl.picture_files import file_of
from serve.front.api import create_app
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, error_of, listening_to
from tests.serve.test_controls import MAP, assert_same, digest, map_of
from tests.serve.test_edits import EDIT, data_url, hole, png
from tests.serve.test_webui_api import TXT2IMG, api_of

IMG2IMG = "/sdapi/v1/img2img"
ASKED: dict[str, Any] = {"prompt": "a red circle", "seed": 7, "steps": 3}
LIKE_V1: dict[str, Any] = {"cfg_scale": 5, "sampler_name": "Euler"}
SIZE = {"width": 128, "height": 128}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def url(controlled: Worker) -> Iterator[str]:
    with listening_to(create_app([controlled], ServeSettings(sdapi=True))) as found:
        yield found


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def edges(controlled: Worker) -> str:
    """The net's name with its hash."""
    return f"edges [{controlled.pipeline.catalogue.find('control', 'edges').webui_hash}]"


def text_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


def image_of(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def units(*given: Any) -> dict[str, Any]:
    """webuiapi adds units to one dictionary for all calls, unless a call passes its own."""
    return {"controlnet_units": list(given), "alwayson_scripts": {}}


def difference(found: Image.Image, expected: Image.Image) -> int:
    """The largest difference of a pixel; other calls round differently."""
    return int(np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max())


def body_of(*units: Any, **fields: Any) -> dict[str, Any]:
    return {**ASKED, **SIZE, **fields, "alwayson_scripts": {"controlnet": {"args": [*units]}}}


def made(http: httpx.Client, path: str, body: Any) -> bytes:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text[:500]
    return base64.b64decode(answer.json()["images"][0])


def ours(http: httpx.Client, path: str, **fields: Any) -> bytes:
    answer = http.post(path, json={**ASKED, "size": "128x128", "guidance_scale": 5, **fields})
    assert answer.status_code == 200, answer.text[:500]
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


def test_webuiapi_s_unit_makes_the_picture_of_v1(url: str, http: httpx.Client, edges: str) -> None:
    webuiapi = pytest.importorskip("webuiapi")
    unit = webuiapi.ControlNetUnit(
        image=image_of(MAP), module="none", model=edges, weight=0.7, guidance_end=0.8,
        control_mode=1,
    )  # fmt: skip
    answer = api_of(url).txt2img(**ASKED, **SIZE, **LIKE_V1, **units(unit))
    sent = unit.to_dict()["image"]
    control = {"name": "edges", "strength": 0.7, "end": 0.8, "mode": "prompt", "resize": "fill"}
    # webuiapi saves the picture again, so its bytes differ.
    control |= {"image": f"data:image/png;base64,{sent}", "low": 64, "high": 64}
    expected = ours(http, GENERATE, controls=[control])
    assert difference(answer.image, image_of(expected)) < 3
    assert read_parameters(expected)["controls"][0]["image"] == digest(base64.b64decode(sent))
    assert sent not in json.dumps(answer.parameters), "the answer does not repeat the maps"
    unit.enabled = False
    plain = api_of(url).txt2img(**ASKED, **SIZE, **LIKE_V1, **units(unit))
    assert difference(plain.image, answer.image) > 20


def test_webuiapi_s_unit_without_an_image_uses_the_edited_one(url: str, http: httpx.Client) -> None:
    webuiapi = pytest.importorskip("webuiapi")
    unit = webuiapi.ControlNetUnit(model="edges", module="canny", threshold_a=50, threshold_b=90)
    image = image_of(png())
    asked = {**ASKED, **SIZE, "steps": 4, "denoising_strength": 0.8, **LIKE_V1}
    answer = api_of(url).img2img(images=[image], **asked, **units(unit))
    control = {"name": "edges", "preprocess": "canny", "low": 50, "high": 90}
    images = [{"image_url": data_url(file_of(image))}]
    expected = ours(http, EDIT, images=images, strength=0.8, steps=4, controls=[control])
    assert difference(answer.image, image_of(expected)) < 3
    assert len(answer.images) == 1


def test_webuiapi_reads_the_lists(url: str, edges: str) -> None:
    api = api_of(url)
    assert api.controlnet_version() == 3
    assert api.controlnet_model_list()[0] == edges and len(api.controlnet_model_list()) == 2
    assert api.controlnet_module_list() == ["none", "canny", "ip-adapter-auto"]
    found = api.controlnet_detect([image_of(MAP)], "canny", threshold_a=50, threshold_b=150)
    expected = canny(np.asarray(image_of(MAP)), 50, 150)
    assert np.array_equal(np.asarray(found.image.convert("L")), expected)


def test_the_extension_s_lists_have_its_shapes(http: httpx.Client, edges: str) -> None:
    assert http.get("/controlnet/settings").json() == {"control_net_unit_count": 16}
    models = http.get("/controlnet/model_list").json()["model_list"]
    kinds = http.get("/controlnet/control_types").json()["control_types"]
    assert kinds["All"] == {
        "module_list": ["none", "canny", "ip-adapter-auto"],
        "model_list": ["None", *models],
        "default_option": "none",
        "default_model": "None",
    }
    assert kinds["Canny"] == {
        **kinds["All"],
        "model_list": ["None", models[1]],
        "default_option": "canny",
        "default_model": models[1],
    }
    listed = http.get("/controlnet/module_list").json()
    sliders = listed["module_detail"]["canny"]["sliders"]
    assert [(each["name"], each["value"]) for each in sliders] == [
        ("Resolution", 512),
        ("Canny Low Threshold", 100),
        ("Canny High Threshold", 200),
    ]


def test_detect_answers_with_pngs_and_bounds_their_size(http: httpx.Client) -> None:
    asked = {"controlnet_module": "canny", "controlnet_input_images": [text_of(MAP), data_url(MAP)]}
    answer = http.post("/controlnet/detect", json={**asked, "controlnet_threshold_a": -1}).json()
    assert answer["info"] == "Success" and len(set(answer["images"])) == 1
    expected = canny(np.asarray(image_of(MAP)), 100, 200)
    found = image_of(base64.b64decode(answer["images"][0]))
    assert np.array_equal(np.asarray(found)[..., 0], expected)
    large = text_of(file_of(Image.new("RGB", (4000, 2000))))
    answer = http.post("/controlnet/detect", json={"controlnet_input_images": [large]}).json()
    assert image_of(base64.b64decode(answer["images"][0])).size == (2048, 1024)
    wrong: list[dict[str, Any]] = [
        {"controlnet_input_images": []},
        {"controlnet_input_images": ["%%%"]},
        {"controlnet_input_images": [text_of(b"text")]},
        {**asked, "controlnet_module": "depth_midas"},
        {"controlnet_input_images": [text_of(MAP)] * 17},
    ]
    for body in wrong:
        refused = http.post("/controlnet/detect", json=body)
        assert refused.status_code == 400 and error_of(refused)["param"], refused.text


def test_a_map_is_shown_before_a_request(http: httpx.Client) -> None:
    body = {"image": data_url(MAP), "preprocess": "canny", "low": 50, "high": 150}
    answer = http.post("/v1/images/maps", json=body).json()
    drawn = np.asarray(image_of(base64.b64decode(answer["b64_json"])))[..., 0]
    assert np.array_equal(drawn, canny(np.asarray(image_of(MAP)), 50, 150))
    for wrong in ({"image": "x"}, {"preprocess": "depth"}, {"low": 5000}):
        refused = http.post("/v1/images/maps", json={**body, **wrong})
        assert refused.status_code == 400 and error_of(refused)["param"], refused.text


@pytest.mark.parametrize(
    ("unit", "control"),
    [
        ({"input_image": text_of(MAP)}, {}),
        ({"image": {"image": data_url(MAP), "mask": None}}, {}),
        ({"image": [[text_of(MAP), ""]]}, {}),
        ({"control_mode": "ControlNet is more important"}, {"mode": "control"}),
        ({"control_mode": 2}, {"mode": "control"}),
        ({"guessmode": True}, {"mode": "guess"}),
        ({"guess_mode": True, "control_mode": 1}, {"mode": "guess"}),
        ({"guidance_start": 0.3, "guidance": 0.9}, {"start": 0.3, "end": 0.9}),
        ({"resize_mode": 0}, {"resize": "stretch"}),
        ({"resize_mode": "Scale to Fit (Inner Fit)"}, {"resize": "crop"}),
        ({"resize_mode": "Resize and Fill"}, {"resize": "fill"}),
        ({"module": "Canny", "threshold_a": -1, "threshold_b": 300}, {"preprocess": "canny"}),
        ({"module": "None", "pixel_perfect": True, "processor_res": 64, "low_vram": True}, {}),
        ({"hr_option": "Low res only", "save_detected_map": False, "mask": ""}, {}),
        (
            {"model": "union", "union_control_type": "Normal Map"},
            {"name": "more/union", "type": "normal"},
        ),
    ],
)
def test_a_unit_becomes_a_control(
    http: httpx.Client, unit: dict[str, Any], control: dict[str, Any]
) -> None:
    usual = {"model": "Edges"}
    if not unit.keys() & {"image", "input_image"}:
        usual["image"] = text_of(MAP)
    found = made(http, TXT2IMG, body_of({**usual, **unit}, cfg_scale=5))
    entry = {"name": "edges", "image": data_url(MAP), "resize": "crop", **control}
    assert_same(found, ours(http, GENERATE, controls=[entry]))


def test_units_that_are_off_change_nothing(http: httpx.Client) -> None:
    units = [
        {"enabled": False, "model": "nothing", "module": "depth_midas"},
        {"enabled": True, "model": "None", "image": text_of(MAP)},
        {"module": "none"},
        {},
        None,
    ]
    found = made(http, TXT2IMG, body_of(*units, cfg_scale=5))
    assert_same(found, ours(http, GENERATE))
    scripts = {"ControlNet": {"args": []}, "ADetailer": {"args": [False]}}
    body = {**ASKED, **SIZE, "cfg_scale": 5, "alwayson_scripts": scripts}
    assert_same(made(http, TXT2IMG, body), found)


def test_only_masked_edits_take_a_map_of_the_whole_image(http: httpx.Client) -> None:
    unit: dict[str, Any] = {"model": "edges", "image": text_of(map_of(1, 400, 300))}
    body = body_of(unit, steps=4, init_images=[text_of(png(400, 300))])
    body |= {"mask": text_of(hole(400, 300, (200, 100, 240, 140))), "inpaint_full_res": True}
    assert read_parameters(made(http, IMG2IMG, body))["mask_padding"] == 0
    unit["inpaint_crop_input_image"] = False
    refused = http.post(IMG2IMG, json=body)
    assert "inpaint_crop_input_image must be true" in error_of(refused)["message"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": "egdes"}, "must name ControlNets of the model, such as edges ["),
    ({"model": "edges [00000000]"}, "such as edges ["),
    ({"model": "../edges"}, "such as edges ["),
    ({"module": "depth_midas"}, "unit 0: module must be none or canny, got 'depth_midas'"),
    ({"model": "None", "module": "reference_only"}, "module must be none or canny"),
    ({"mask": text_of(MAP)}, "unit 0: mask is not possible here"),
    ({"image": {"image": text_of(MAP), "mask": text_of(MAP)}}, "mask is not possible here"),
    ({"image": "/etc/passwd"}, "unit 0: image must be a picture in base64"),
    ({"image": [text_of(MAP)] * 3}, "image must be one picture in base64"),
    ({"image": 5}, "image must be one picture in base64"),
    ({"weight": 3}, "unit 0: weight must be a number from 0 to 2, got 3"),
    ({"guidance_start": -1}, "guidance_start must be a number from 0 to 1"),
    ({"control_mode": 3}, "control_mode must be one of 'Balanced', 'My prompt"),
    ({"control_mode": "loud"}, "control_mode must be one of 'Balanced'"),
    ({"resize_mode": "Cut"}, "resize_mode must be one of"),
    ({"union_control_type": "Colour"}, "union_control_type must be one of 'OpenPose'"),
    ({"enabled": "yes"}, "enabled must be"),
    ({"advanced_weighting": [1.0] * 10}, "advanced_weighting is not possible here"),
    ({"input_mode": "batch"}, "input_mode is not possible here"),
]
"""fields of a unit"""
UNIT = {"model": "edges", "image": text_of(MAP)}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        *(({"args": [{**UNIT, **fields}]}, words) for fields, words in WRONG),
        ({"args": [5]}, "unit 0 must be an object, got '5'"),
        ({"args": UNIT}, "args of ControlNet must be a list"),
        ({"args": [UNIT] * 17}, "at most 16 units, got 17"),
        ("edges", "must be a list"),
    ],
)
def test_a_wrong_unit_is_refused_by_name(
    http: httpx.Client, controlled: Worker, script: Any, words: str
) -> None:
    body = {**ASKED, **SIZE, "alwayson_scripts": {"ControlNet": script}}
    error = error_of(answer := http.post(TXT2IMG, json=body))
    assert (answer.status_code, error["param"]) == (400, "alwayson_scripts")
    assert words in error["message"] and len(error["message"]) < 500
    assert controlled.is_idle


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ({"model": "edges"}, "with 'edges': needs the picture of its map"),
        ({"model": "edges", "image": text_of(b"text")}, "its map must be a"),
        ({"model": "union", "image": text_of(MAP)}, "type must be one of"),
        (
            {"model": "edges", "image": text_of(MAP), "guidance_start": 1.0},
            "start must be below end",
        ),
    ],
)
def test_a_wrong_map_is_refused_as_by_v1(http: httpx.Client, unit: Any, words: str) -> None:
    answer = http.post(TXT2IMG, json=body_of(unit))
    assert (answer.status_code, error_of(answer)["param"]) == (400, "controls")
    assert words in error_of(answer)["message"]


def test_a_second_leg_has_the_map_too(http: httpx.Client) -> None:
    unit = {"model": "edges", "image": text_of(MAP)}
    body = body_of(unit, enable_hr=True, hr_scale=1.5, denoising_strength=0.5)
    assert image_of(made(http, TXT2IMG, body)).size == (192, 192)
    unit["hr_option"] = "High res only"
    assert "hr_option must be 'Both'" in error_of(http.post(TXT2IMG, json=body))["message"]


def test_without_the_setting_the_routes_name_it(controlled: Worker) -> None:
    with listening_to(create_app([controlled], ServeSettings())) as found:
        answer = httpx.get(f"{found}/controlnet/version")
    assert answer.status_code == 404 and "`sdapi`" in error_of(answer)["message"]
