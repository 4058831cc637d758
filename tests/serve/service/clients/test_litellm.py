"""LiteLLM, unchanged: the library against a whole service, and OpenAI's client through
examples/litellm.yaml as a proxy. LiteLLM does not pass on streams of pictures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.service.clients.conftest import RED
from tests.serve.service.clients.reports import CALLS_S, ROOT, Report, last_line
from tests.serve.services import Service, end_with_tests, free_port
from tests.serve.test_openai_client import client_of, image_of
from tests.tools import install_python
from tests.waiting import wait_until

PACKAGE = "litellm[proxy]==1.106.2"
PYTHON = [sys.executable, "-S"]
"""Without -S the project's packages would be on the path too."""
CALLS = "tests.serve.service.clients.litellm_calls"
KEY = "sk-only-for-tests-0123456789abcdef"
EXAMPLE = ROOT / "examples" / "litellm.yaml"
PROMPT = "a green star"
SEEDED = {"seed": 5, "steps": 4, "deadline_s": 300}

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_python(tmp_path_factory.mktemp("litellm"), PACKAGE)


def environment_of(packages: Path, home: Path) -> dict[str, str]:
    """Only `packages` is on the path, and no list of models is fetched."""
    return {
        "PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(packages),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # fmt: skip


@pytest.fixture(scope="module")
def report(running: Service, packages: Path, pictures: Path) -> Report:
    command = [*PYTHON, "-m", CALLS, running.url, str(pictures)]
    return last_line(command, ROOT, environment_of(packages, pictures))


@pytest.fixture(scope="module")
def proxy(
    running: Service, packages: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """The unchanged example, except for the service's port."""
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    config = EXAMPLE.read_text().replace("http://127.0.0.1:8000", running.url)
    (folder / "litellm.yaml").write_text(config)
    command = [*PYTHON, str(packages / "bin" / "litellm"), "--config", "litellm.yaml"]
    environment = {**environment_of(packages, folder), "LITELLM_MASTER_KEY": KEY}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder, env=environment, stdout=file, stderr=file, preexec_fn=end_with_tests,
        )  # fmt: skip
    try:
        wait_until(lambda: is_up(url) or process.poll() is not None, CALLS_S, 0.5, log.read_text)
        assert process.poll() is None, log.read_text()
        with client_of(url, KEY) as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_it_makes_pictures(report: Report) -> None:
    first, second = (image_of(text) for text in report["generate"])
    assert first.size == second.size == (128, 96) and first.tobytes() != second.tobytes()
    assert report["generate again"] == report["generate"][:1], "the same seed is the same picture"
    assert image_of(report["webp"][0]).format == "WEBP"
    assert image_of(report["asynchronous"][0]).size == (128, 128)
    assert report["usage"]["total_tokens"] == 77


def test_the_client_edits(report: Report) -> None:
    made = [image_of(text).convert("RGB") for text in report["edit"]]
    assert [image.getpixel((4, 4)) for image in made] == [RED] * 2
    assert all(image.getpixel((64, 64)) != RED for image in made)


def test_a_chat_is_answered(report: Report) -> None:
    assert report["chat"].startswith("a red circle")
    assert "".join(report["chat stream"]) == report["chat"] and len(report["chat stream"]) > 3


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("size", "BadRequestError", "size must be 'auto', or WIDTHxHEIGHT"),
        ("model", "NotFoundError", "The model 'dall-e-2' does not exist"),
        ("deadline", "RateLimitError", "Refused: ready in"),
        ("not a picture", "BadRequestError", "must be a PNG, JPEG or WEBP file"),
    ],
)
def test_errors_keep_their_kind_and_words(report: Report, name: str, kind: str, text: str) -> None:
    assert kind in report[name]["error"] and text in report[name]["message"]


def test_the_proxy_lists_both_models(proxy: openai.OpenAI) -> None:
    assert {model.id for model in proxy.models.list()} == {"sdxl", "chat"}


def test_the_proxy_s_picture_is_the_service_s(proxy: openai.OpenAI, running: Service) -> None:
    """This also holds for fields that LiteLLM does not know, which Open WebUI sends."""
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "size": "128x128",
        "response_format": "b64_json",
        "extra_body": SEEDED,
    }
    through = proxy.images.generate(model="sdxl", **asked)
    with client_of(running.url) as client:
        direct = client.images.generate(model="sdxl-mini", **asked)
    assert through.data[0].b64_json == direct.data[0].b64_json


def test_the_proxy_edits(proxy: openai.OpenAI, pictures: Path) -> None:
    answer = proxy.images.edit(
        model="sdxl",
        prompt=PROMPT,
        image=pictures / "image.png",
        mask=pictures / "mask.png",
        n=2,
        extra_body=SEEDED,
    )
    assert answer.data is not None
    made = [image_of(each.b64_json).convert("RGB") for each in answer.data]
    assert [image.getpixel((4, 4)) for image in made] == [RED] * 2


def test_the_proxy_chats(proxy: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "a red circle"}]
    create: Any = proxy.chat.completions.create
    whole = create(model="chat", messages=turns, temperature=0)
    stream = create(model="chat", messages=turns, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content and text.startswith("a red circle")


def test_the_proxy_passes_errors_on(proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="size must be 'auto', or WIDTHxHEIGHT"):
        proxy.images.generate(model="sdxl", prompt=PROMPT, size="100x100")
    with pytest.raises(openai.RateLimitError, match="Refused: ready in"):
        proxy.images.generate(model="sdxl", prompt=PROMPT, extra_body={"deadline_s": 0.001})
