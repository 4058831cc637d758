"""The unchanged official `openai` package against a real server on loopback."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from sdxl.checkpoint import find
from sdxl.images import read_parameters
from sdxl.picture_files import file_of
from serve.front.edits import EditRequest
from serve.front.image_orders import size_of
from serve.front.openai_images import ImageRequest
from serve.orders import ModelCard
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, listening
from tests.serve.workers import fake, fake_pipeline
from tests.waiting import wait_until

PROMPT = "a green star"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Worker]]:
    with listening(fake_pipeline(tick_s=0.005)) as found:
        yield found


@pytest.fixture
def client(server: tuple[str, Worker]) -> Iterator[openai.OpenAI]:
    with client_of(server[0]) as found:
        yield found


def client_of(url: str, key: str = "anything") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def image_of(text: str | None) -> Image.Image:
    assert text is not None
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_the_client_generates(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    assert "sdxl" in model and client.models.retrieve(model).id == model
    answer = client.images.generate(prompt=PROMPT, model=model, n=2, size="128x128", quality="low")
    assert answer.data is not None and answer.usage is not None
    assert [image_of(d.b64_json).size for d in answer.data] == [(128, 128)] * 2
    assert (answer.output_format, answer.background) == ("png", "opaque")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (154, 0, 154)
    details = usage.input_tokens_details
    assert (details.text_tokens, details.image_tokens) == (154, 0)


def test_extensions_travel_in_extra_body(client: openai.OpenAI) -> None:
    extra = {"seed": 5, "steps": 3, "negative_prompt": "red"}
    answer = client.images.generate(prompt=PROMPT, extra_body=extra, output_format="webp")
    assert answer.data is not None
    assert answer.data[0].model_extra is not None and answer.data[0].model_extra["seed"] == 5
    assert image_of(answer.data[0].b64_json).format == "WEBP"


def test_it_streams_partial_images(client: openai.OpenAI) -> None:
    extra = {"steps": 12, "seed": 2}
    stream = client.images.generate(prompt=PROMPT, stream=True, partial_images=2, extra_body=extra)
    events = list(stream)
    *partial, last = events
    assert [e.type for e in partial] == ["image_generation.partial_image"] * 2
    assert all(image_of(e.b64_json).size == (128, 128) for e in events)
    assert last.type == "image_generation.completed" and last.usage.total_tokens == 77


ERRORS: dict[str, tuple[type[openai.APIStatusError], dict[str, Any]]] = {
    "400": (openai.BadRequestError, {"size": "100x100"}),
    "404": (openai.NotFoundError, {"model": "dall-e-2"}),
    "429": (openai.RateLimitError, {"extra_body": {"deadline_s": 0.001}}),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_the_sdk_s_own_classes(client: openai.OpenAI, case: str) -> None:
    kind, given = ERRORS[case]
    with pytest.raises(kind) as caught:
        client.images.generate(prompt=PROMPT, **given)
    error = caught.value
    assert error.request_id and error.status_code == int(case)
    assert isinstance(error.body, dict) and set(error.body) == {"message", "type", "param", "code"}


def test_a_failure_in_the_middle_of_a_stream_is_an_api_error(server: tuple[str, Worker]) -> None:
    fake(server[1].pipeline, "vae_decoder").fault = RuntimeError("broken")
    with client_of(server[0]) as client, pytest.raises(openai.APIError, match="engine failed"):
        list(client.images.generate(prompt=PROMPT, stream=True, extra_body={"steps": 2}))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_frees_its_slot(is_streamed: bool) -> None:
    body = {"prompt": PROMPT, "n": 4, "steps": 100, "deadline_s": 60, "stream": is_streamed}
    with listening(fake_pipeline(tick_s=0.05)) as (url, worker):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}{GENERATE}", json=body, timeout=0.2)
        wait_until(lambda: worker.is_idle)
        assert worker.steps_taken < 4 * 100


@pytest.mark.slow
def test_overload_is_only_200_and_429() -> None:
    async def call(http: httpx.AsyncClient, seed: int) -> int:
        body = {"prompt": PROMPT, "seed": seed, "steps": 10, "deadline_s": 5}
        return (await http.post(GENERATE, json=body)).status_code

    async def scenario(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            return await asyncio.gather(*(call(http, seed) for seed in range(60)))

    with listening(fake_pipeline(tick_s=0.02), queue=8) as (url, _):
        statuses = asyncio.run(scenario(url))
    found = {status: statuses.count(status) for status in set(statuses)}
    assert set(found) == {200, 429}, found


def picture_file(name: str, *, hole: bool = False) -> tuple[str, bytes]:
    image = Image.new("RGBA", (128, 128), (200, 40, 40, 255))
    if hole:
        image.paste((0, 0, 0, 0), (32, 32, 96, 96))
    return name, file_of(image)


def test_the_client_edits(client: openai.OpenAI) -> None:
    extra = {"seed": 5, "steps": 4, "strength": 1.0, "deep_steps": "0,2"}
    image, mask = picture_file("image.png"), picture_file("mask.png", hole=True)
    answer = client.images.edit(
        image=image, mask=mask, prompt=PROMPT, n=2, size="128x128", extra_body=extra
    )
    assert answer.data is not None and answer.usage is not None
    made = [image_of(data.b64_json).convert("RGB") for data in answer.data]
    assert [image.size for image in made] == [(128, 128)] * 2
    assert [image.getpixel((4, 4)) for image in made] == [(200, 40, 40)] * 2
    assert [d.model_extra["seed"] for d in answer.data if d.model_extra] == [5, 6]


def test_lists_of_an_edit_travel_as_the_client_writes_them(client: openai.OpenAI) -> None:
    """The client sends `deep_steps[]` once for each value."""
    extra = {"seed": 5, "steps": 4, "strength": 1.0, "deep_steps": [0, 2]}
    answer = client.images.edit(image=picture_file("a.png"), prompt=PROMPT, extra_body=extra)
    assert answer.data and answer.data[0].b64_json
    stored = read_parameters(base64.b64decode(answer.data[0].b64_json))
    assert stored["deep_steps"] == [0, 2]


def test_it_streams_partial_edits(client: openai.OpenAI) -> None:
    images, extra = [picture_file("image.png")], {"steps": 12}
    events = list(
        client.images.edit(
            image=images, prompt=PROMPT, stream=True, partial_images=2, extra_body=extra
        )
    )
    assert [e.type for e in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert all(image_of(e.b64_json).size == (128, 128) for e in events)


NOT_OF_REQUESTS = {"image", "mask", "extra_headers", "extra_query", "extra_body", "timeout"}
REFUSED = {"markup"}
"""refused fields: a picture with marks, which tests/serve/test_edits.py sends"""


@pytest.mark.parametrize(
    ("method", "fields"), [("generate", ImageRequest), ("edit", EditRequest)], ids=str
)
def test_its_fields_are_known(
    client: openai.OpenAI, method: str, fields: type[ImageRequest]
) -> None:
    theirs = set(inspect.signature(getattr(client.images, method)).parameters) - NOT_OF_REQUESTS
    assert theirs - REFUSED <= set(fields.model_fields)


def test_all_fields_of_generate_together_make_a_picture(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "sdxl-mini", "n": 1, "size": "96x128", "quality": "low", "style": "vivid",
        "background": "opaque", "moderation": "low", "output_format": "jpeg", "user": "me",
        "output_compression": 60, "response_format": "b64_json", "safety_identifier": "hash",
    }  # fmt: skip
    theirs = inspect.signature(client.images.generate).parameters
    newer = {name: fields.pop(name) for name in [*fields] if name not in theirs}
    answer = client.images.generate(prompt=PROMPT, **fields, extra_body=newer)
    assert (answer.output_format, answer.size, answer.quality) == ("jpeg", "96x128", "low")
    image = image_of(answer.data[0].b64_json)
    assert (image.format, image.size) == ("JPEG", (96, 128))


def test_the_safety_identifier_is_returned(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt=PROMPT, quality="low", user="old", extra_body={"safety_identifier": "hash of a name"}
    )
    assert answer.safety_identifier == "hash of a name"  # type: ignore[attr-defined,unused-ignore]
    details: Any = answer.to_dict()["usage"]
    assert details["output_tokens_details"] == {"text_tokens": 0, "image_tokens": 0}
    old = client.images.generate(prompt=PROMPT, quality="low", user="old").to_dict()
    assert old["safety_identifier"] == "old"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("complexity", "low"),
        ("frame_count", 4),
        ("frame_duration_ms", 100),
        ("svg", {"model": "x"}),
        ("output_format", "gif"),
        ("output_format", "svg"),
        ("background", "transparent"),
    ],
)
def test_an_impossible_field_is_refused(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt=PROMPT, extra_body={field: value})
    assert caught.value.param == field and field in caught.value.message


@pytest.mark.parametrize(("quality", "steps"), [("xhigh", 30), ("max", 50)])
def test_top_qualities_run_the_exact_model(client: openai.OpenAI, quality: Any, steps: int) -> None:
    answer = client.images.generate(prompt=PROMPT, extra_body={"quality": quality})
    body: Any = answer.to_dict()
    (data,) = body["data"]
    assert (data["deep_steps"], data["shallow_steps"]) == (steps, 0)
    assert body["quality"] == quality


def test_a_model_answers_to_its_aliases() -> None:
    with listening(aliases="gpt-image-1=sdxl-mini, dall-e-3=mini") as (url, _), client_of(url) as c:
        for name in ("gpt-image-1", "dall-e-3", "mini", "sdxl-mini"):
            answer = c.images.generate(prompt=PROMPT, model=name, quality="low")
            assert answer.to_dict()["model"] == "sdxl-mini"
            assert c.models.retrieve(name).id == "sdxl-mini"
        with pytest.raises(openai.NotFoundError, match="here is 'sdxl-mini'"):
            c.images.generate(prompt=PROMPT, model="gpt-image-2")


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("1024x1024", "512x512"),
        ("1536x1024", "512x344"),
        ("1024x1792", "296x512"),
        ("100x100", "96x96"),
        ("16x16", "64x64"),
        ("128x96", "128x96"),
        ("99999x10", "512x64"),
    ],
)
def test_an_unknown_size_becomes_the_nearest_if_allowed(asked: Any, made: str) -> None:
    card = ModelCard("sdxl-mini", find("mini").sizes)
    width, height = size_of(asked, card, ServeSettings(nearest_size=True))
    assert f"{width}x{height}" == made


def test_the_answer_says_which_size_it_became() -> None:
    with listening(nearest_size=True) as (url, _), client_of(url) as c:
        answer = c.images.generate(prompt=PROMPT, size="1024x1024", quality="low")
        assert answer.size == "512x512" and answer.data
        assert image_of(answer.data[0].b64_json).size == (512, 512)
