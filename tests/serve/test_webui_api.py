"""stable-diffusion-webui's API, called by its unchanged Python client and like other programs."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from sdxl.images import read_parameters
from sdxl.picture_files import file_of
from serve.worker.worker import Worker
from tests.serve.servers import file_of_keys, listening
from tests.serve.workers import fake_pipeline
from tests.waiting import wait_until

PROMPT = "a red circle on a blue background"
TXT2IMG = "/sdapi/v1/txt2img"
CLIP_SKIP = "CLIP_stop_at_last_layers"
MINE, OTHER = ({"x-client": address} for address in ("10.0.0.1", "10.0.0.2"))
"""headers of two clients"""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Worker]]:
    with listening(sdapi=True) as found:
        yield found


@pytest.fixture
def http(served: tuple[str, Worker]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0], timeout=30) as found:
        yield found


def api_of(url: str, **options: Any) -> Any:
    webuiapi = pytest.importorskip("webuiapi")
    address = httpx.URL(url)
    return webuiapi.WebUIApi(host=address.host, port=address.port, **options)


@pytest.mark.filterwarnings("ignore")
def test_webuiapi_makes_pictures_and_reads_them(served: tuple[str, Worker]) -> None:
    api = api_of(served[0])
    made = api.txt2img(
        prompt=PROMPT, negative_prompt="blue", seed=7, steps=4, cfg_scale=3, n_iter=2,
        width=128, height=96, sampler_name="DPM++ 2M", scheduler="Karras",
    )  # fmt: skip
    assert [image.size for image in made.images] == [(128, 96)] * 2
    assert made.info["all_seeds"] == [7, 8] and made.info["prompt"] == PROMPT
    assert made.info["infotexts"][1].startswith(f"{PROMPT}\nNegative prompt: blue\nSteps: 4")
    stored = api.png_info(made.image)
    assert stored.info == made.info["infotexts"][0]
    assert stored.parameters["scheduler"] == "dpmpp_2m_karras"


@pytest.mark.filterwarnings("ignore")
def test_webuiapi_reads_the_service_s_lists(served: tuple[str, Worker]) -> None:
    api = api_of(served[0])
    assert api.util_get_model_names() == ["sdxl-mini.safetensors"]
    assert {"Euler", "Euler a", "DDIM", "DPM++ 2M"} <= set(api.util_get_sampler_names())
    assert set(api.util_get_scheduler_names()) == {
        *("automatic", "normal", "karras", "exponential", "beta", "align_your_steps"),
        "sgm_uniform",
    }
    api.util_set_model("mini")
    assert api.util_get_current_model() == "sdxl-mini.safetensors"
    assert (api.get_loras(), api.get_sd_vae()) == ([], [])
    assert [each["name"] for each in api.get_upscalers()] == ["Lanczos"]
    assert api.get_memory()["ram"]["total"] > 0
    assert api.get_scripts() == {"txt2img": [], "img2img": []}
    api.util_wait_for_ready()
    api.refresh_checkpoints()
    assert api.interrupt() == api.skip() == {}


@pytest.mark.parametrize("prompt", [PROMPT, "", " "])
def test_the_picture_is_the_one_that_v1_makes(http: httpx.Client, prompt: str) -> None:
    asked = {"prompt": prompt, "seed": 3, "steps": 4}
    theirs = http.post(TXT2IMG, json={**asked, "cfg_scale": 5, "sampler_name": "Euler"}).json()
    ours = http.post("/v1/images/generations", json=asked).json()
    assert theirs["images"] == [ours["data"][0]["b64_json"]]


def test_what_open_webui_asks_is_answered(http: httpx.Client) -> None:
    """Open WebUI sets the model, sizes and steps by options, then reads base64 `images`."""
    options = http.get("/sdapi/v1/options").json()
    assert options["sd_model_checkpoint"] == "sdxl-mini.safetensors"
    answer = http.post("/sdapi/v1/options", json={"sd_model_checkpoint": "sdxl-mini"})
    assert answer.status_code == 200
    body = {"prompt": PROMPT, "batch_size": 1, "width": 128, "height": 128, "steps": 4}
    answer = http.post(TXT2IMG, json={**body, "negative_prompt": ""})
    stored = read_parameters(base64.b64decode(answer.json()["images"][0]))
    assert (stored["steps"], stored["cache_interval"]) == (4, 1), "no such client speaks of caches"


def test_what_sillytavern_asks_is_answered(http: httpx.Client) -> None:
    """SillyTavern's image extension sends extra fields that turn features off."""
    body = {
        "prompt": PROMPT, "negative_prompt": "", "sampler_name": "Euler a", "steps": 4,
        "scheduler": "automatic", "cfg_scale": 7, "width": 128, "height": 128,
        "restore_faces": False, "enable_hr": False, "hr_upscaler": "Latent", "hr_scale": 2,
        "denoising_strength": 0.7, "hr_second_pass_steps": 0, "seed": -1, "save_images": True,
        "override_settings": {"CLIP_stop_at_last_layers": 1}, "do_not_save_grid": False,
        "override_settings_restore_afterwards": True, "send_images": True,
        "alwayson_scripts": {"ADetailer": {"args": [False]}},
    }  # fmt: skip
    answer = http.post(TXT2IMG, json=body)
    assert answer.status_code == 200 and len(answer.json()["images"]) == 1
    assert http.get("/sdapi/v1/sd-models").json()[0]["title"] == "sdxl-mini.safetensors"


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({"denoising_strength": False}, 400, "denoising_strength"),
        ({"seed": True}, 400, "seed"),
        ({"enable_hr": 0}, 400, "enable_hr"),
        ({"restore_faces": True}, 400, "restore_faces"),
        ({"styles": ["ink"]}, 400, "styles"),
        ({"subseed_strength": 2}, 400, "subseed_strength"),
        ({"script_name": "X/Y/Z plot"}, 400, "script_name"),
        ({"alwayson_scripts": {"ControlNet": {"args": [{"model": "x"}]}}}, 400, "alwayson_scripts"),
        ({"sampler_name": "UniPC"}, 400, "sampler_name"),
        ({"width": 100, "height": 128}, 400, "size"),
        ({"width": 128}, 400, "height"),
        ({"height": 128, "width": 0}, 400, "width"),
        ({"s_churn": 5}, 400, "s_churn"),
        ({"steps": 100_000}, 400, "steps"),
        ({"batch_size": 4, "n_iter": 4}, 400, "n_iter"),
        ({"batch_size": 10**3000, "n_iter": 10**3000}, 400, "batch_size"),
        ({"enable_hr": True, "hr_second_pass_steps": 10**400}, 400, "hr_second_pass_steps"),
        ({"enable_hr": True, "denoising_strength": 0}, 400, "denoising_strength"),
        ({"enable_hr": True, "denoising_strength": 1e-320}, 400, "denoising_strength"),
        ({"enable_hr": True, "denoising_strength": 1e-5}, 400, "denoising_strength"),
        ({"enable_hr": True, "denoising_strength": 0.03}, 400, "upscale_steps"),
        ({"alwayson_scripts": {"ControlNet": 5, "controlnet": []}}, 400, "alwayson_scripts"),
        ({"override_settings": {"sd_model_checkpoint": "dreamshaper"}}, 404, "sd_model_checkpoint"),
        ({"override_settings": {"eta_noise_seed_delta": 31337}}, 400, "options"),
        ({"cfg_scale": 1000}, 400, "guidance_scale"),
        ({"override_settings": {"samples_format": []}}, 400, "samples_format"),
        ({"override_settings": {"samples_format": {}}}, 400, "samples_format"),
        ({"override_settings": {CLIP_SKIP: True}}, 400, CLIP_SKIP),
        ({"save_to": "\ud800"}, 400, "save_to"),
        ({"comments": {"a": ["b\udfff"]}}, 400, "comments"),
        ({"alwayson_scripts": {"\ud800": {"args": [False]}}}, 400, "alwayson_scripts"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    http: httpx.Client, asked: dict[str, Any], status: int, param: str
) -> None:
    body = json.dumps({"prompt": PROMPT, "steps": 4, **asked})
    answer = http.post(TXT2IMG, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_refused_sampler_is_answered_with_the_valid_pairs(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "sampler_name": "DDIM", "scheduler": "karras"}
    message = http.post(TXT2IMG, json=asked).json()["error"]["message"]
    assert message.startswith("sampler_name must be one of Euler (Karras, ")
    assert message.endswith("got 'DDIM' with scheduler 'karras'")
    assert "Euler a, DDIM (SGM Uniform), DPM++ 2M (Karras, Exponential, Beta), " in message


def test_steps_are_refused_in_the_words_of_v1(http: httpx.Client) -> None:
    error = http.post(TXT2IMG, json={"prompt": PROMPT, "steps": 0}).json()["error"]
    assert error["message"] == "steps must be a whole number from 1 to 1000, got 0"


def test_a_file_that_is_no_picture_is_refused(http: httpx.Client) -> None:
    for image in ("%%%", base64.b64encode(b"text").decode()):
        answer = http.post("/sdapi/v1/png-info", json={"image": image})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")


def test_progress_and_interrupt_concern_only_a_client_s_own_requests() -> None:
    with listening(fake_pipeline(tick_s=0.05), sdapi=True, client_header="x-client") as (url, _):
        answers: list[httpx.Response] = []
        body = {"prompt": PROMPT, "steps": 100}
        thread = threading.Thread(
            target=lambda: answers.append(
                httpx.post(url + TXT2IMG, json=body, headers=MINE, timeout=60)
            )
        )
        thread.start()

        def progress(client: dict[str, str]) -> Any:
            return httpx.get(f"{url}/sdapi/v1/progress", headers=client).json()

        wait_until(lambda: progress(MINE)["progress"] or answers)
        assert progress(OTHER)["progress"] == 0 and not answers
        httpx.post(f"{url}/sdapi/v1/interrupt", headers=OTHER)
        state = progress(MINE)["state"]
        assert state["job_count"] == 1 and state["sampling_steps"] == 100
        assert not state["interrupted"] and progress(MINE)["eta_relative"] > 0
        httpx.post(f"{url}/sdapi/v1/interrupt", headers=MINE)
        thread.join(30)
        assert answers[0].status_code == 200 and answers[0].json()["images"] == []
        assert progress(MINE)["progress"] == 0


def test_options_hold_for_the_client_that_set_them() -> None:
    with listening(sdapi=True, client_header="x-client") as (url, _):
        httpx.post(f"{url}/sdapi/v1/options", json={"samples_format": "webp"}, headers=MINE)
        kinds = []
        for client in (MINE, OTHER):
            body = {"prompt": PROMPT, "steps": 2}
            answer = httpx.post(url + TXT2IMG, json=body, headers=client, timeout=30)
            kinds.append(base64.b64decode(answer.json()["images"][0])[:4])
        assert kinds == [b"RIFF", b"\x89PNG"]
        webp = httpx.get(f"{url}/sdapi/v1/options", headers=MINE).json()["samples_format"]
        assert webp == "webp"


def test_a_key_is_needed_and_may_come_as_a_password(tmp_path: Path) -> None:
    with listening(sdapi=True, keys=file_of_keys(tmp_path, secret="me")) as (url, _):
        body = {"prompt": PROMPT, "steps": 2}
        assert httpx.post(url + TXT2IMG, json=body).status_code == 401
        assert httpx.post(url + TXT2IMG, json=body, auth=("me", "wrong")).status_code == 401
        answer = httpx.post(url + TXT2IMG, json=body, auth=("me", "secret"), timeout=30)
        assert answer.status_code == 200


def test_without_the_setting_there_is_no_such_api() -> None:
    with listening() as (url, _):
        assert httpx.post(url + TXT2IMG, json={"prompt": PROMPT}).status_code == 404


def test_jpeg_and_webp_contain_their_text_too(http: httpx.Client) -> None:
    for format in ("jpg", "webp"):
        body = {"prompt": PROMPT, "steps": 2, "override_settings": {"samples_format": format}}
        answer = http.post(TXT2IMG, json=body).json()
        stored = http.post("/sdapi/v1/png-info", json={"image": answer["images"][0]}).json()
        assert stored["parameters"]["prompt"] == PROMPT
        assert io.BytesIO(base64.b64decode(answer["images"][0])).read(2) in (b"\xff\xd8", b"RI")


def canvas() -> Image.Image:
    return Image.new("RGB", (128, 128), (200, 40, 40))


def hole(mode: str = "L") -> Image.Image:
    mask = Image.new("L", (128, 128), 0)
    mask.paste(255, (32, 32, 96, 96))
    return mask if mode == "L" else Image.merge("RGBA", (mask, mask, mask, mask))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", ["L", "RGBA", "inverted"])
@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("is_part", [True, False])
def test_webuiapi_edits(served: tuple[str, Worker], given: str, fill: int, is_part: bool) -> None:
    mask = hole("RGBA" if given == "RGBA" else "L")
    made = api_of(served[0]).img2img(
        images=[canvas()], mask_image=ImageOps.invert(mask) if given == "inverted" else mask,
        inpainting_mask_invert=int(given == "inverted"), inpainting_fill=fill,
        inpaint_full_res=is_part, mask_blur=0, denoising_strength=0.8,
        prompt=PROMPT, seed=5, steps=4, width=128, height=128,
    )  # fmt: skip
    image = made.image.convert("RGB")
    assert image.size == (128, 128) and made.info["all_seeds"] == [5]
    assert image.getpixel((4, 4)) == image.getpixel((120, 60)) == (200, 40, 40)
    assert image.getpixel((64, 64)) != (200, 40, 40)


@pytest.mark.filterwarnings("ignore")
def test_img2img_is_the_edit_that_v1_makes(served: tuple[str, Worker]) -> None:
    text = base64.b64encode(file_of(canvas(), compress_level=1)).decode()
    asked = {"prompt": PROMPT, "seed": 3, "steps": 4}
    body = {**asked, "init_images": [text], "denoising_strength": 0.5, "cfg_scale": 5}
    theirs = httpx.post(f"{served[0]}/sdapi/v1/img2img", json=body, timeout=30).json()
    images = [{"image_url": f"data:image/png;base64,{text}"}]
    body = {**asked, "images": images, "strength": 0.5}
    ours = httpx.post(f"{served[0]}/v1/images/edits", json=body, timeout=30).json()
    assert theirs["images"] == [ours["data"][0]["b64_json"]]


@pytest.mark.parametrize("has_mask", [False, True])
def test_an_edited_picture_is_white_where_it_is_transparent(
    http: httpx.Client, has_mask: bool
) -> None:
    """Here the base64 has lines."""

    def edited(picture: Image.Image) -> str:
        picture.paste((200, 40, 40), (16, 16, 64, 64))
        image, mask = (base64.encodebytes(file_of(each)).decode() for each in (picture, hole()))
        body = {"prompt": PROMPT, "seed": 3, "steps": 4, "init_images": [image]}
        answer = http.post("/sdapi/v1/img2img", json=body | ({"mask": mask} if has_mask else {}))
        return str(answer.json()["images"][0])

    clear, white = Image.new("RGBA", (128, 128)), Image.new("RGB", (128, 128), "white")
    assert edited(clear) == edited(white)


@pytest.mark.parametrize(
    ("field", "value"),
    [("resize_mode", 1), ("inpainting_fill", 2), ("init_images", []), ("init_images", ["x"])],
)
def test_img2img_refuses_what_it_cannot_do(http: httpx.Client, field: str, value: object) -> None:
    images = [base64.b64encode(file_of(canvas())).decode()]
    body = {"prompt": PROMPT, "steps": 2, "init_images": images, field: value}
    answer = http.post("/sdapi/v1/img2img", json=body)
    assert answer.status_code == 400 and field.split("_")[-1][:5] in answer.text, answer.text


def test_png_info_reads_a_picture_of_full_size(http: httpx.Client) -> None:
    noise = Image.effect_noise((1024, 1024), 90).convert("RGB")
    text = PngInfo()
    text.add_text("parameters", "a cat\nSteps: 20, Seed: 5")
    file = file_of(noise, pnginfo=text)
    assert len(file) > 1 << 20
    # The pixels are not decoded: half of them will do.
    for data in (file, file[: 1 << 19]):
        body = {"image": base64.b64encode(data).decode()}
        answer = http.post("/sdapi/v1/png-info", json=body)
        assert answer.status_code == 200 and answer.json()["info"].startswith("a cat")
