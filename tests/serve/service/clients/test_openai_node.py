"""OpenAI's package for node, unchanged, the newest of two majors, against a whole service; and the
example that uses it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.serve.service.clients.conftest import RED
from tests.serve.service.clients.reports import ROOT, Report, last_line
from tests.serve.services import Service
from tests.serve.test_openai_client import image_of
from tests.tools import install_node, tool

CALLS = Path(__file__).with_name("calls.mjs")
EXAMPLE = ROOT / "examples" / "generate.mjs"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["7.57.0", pytest.param("6.49.0", marks=pytest.mark.long)])
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_node(tmp_path_factory.mktemp("node"), f"openai@{request.param}")


@pytest.fixture(scope="module")
def report(packages: Path, running: Service, pictures: Path) -> Report:
    script = shutil.copy(CALLS, packages)
    command = [tool("node", "nodejs"), str(script), running.url, str(pictures)]
    return last_line(command, packages, {"PATH": os.environ["PATH"], "HOME": str(packages)})


def test_it_lists_models(report: Report) -> None:
    listed, retrieved = report["models"]
    assert listed[0] == retrieved == "sdxl-mini" and "mini-llm" in listed


def test_the_client_generates(report: Report) -> None:
    images = [image_of(text) for text in report["generate"]]
    assert [(image.format, image.size) for image in images] == [("WEBP", (128, 96))] * 2
    assert httpx.get(report["url"]).headers["content-type"] == "image/png"


@pytest.mark.parametrize("kind", ["image_generation", "image_edit"])
def test_it_streams(report: Report, kind: str) -> None:
    events = report["stream" if kind == "image_generation" else "edit stream"]
    assert [e["type"] for e in events] == [f"{kind}.partial_image"] * 2 + [f"{kind}.completed"]
    assert all(image_of(e["b64_json"]).size == (128, 128) for e in events)
    assert events[-1]["usage"]["total_tokens"] == 77


def test_the_client_edits(report: Report) -> None:
    made = [image_of(text).convert("RGB") for text in report["edit"]]
    assert [image.getpixel((4, 4)) for image in made] == [RED] * 2
    assert image_of(report["edit of a stream"][0]).size == (128, 128)


def test_a_chat_is_answered(report: Report) -> None:
    assert report["chat"].startswith("a red circle")
    assert "".join(report["chat stream"]) == report["chat helper"] == report["chat"]


@pytest.mark.parametrize(
    ("name", "kind", "status", "param", "message"),
    [
        ("size", "BadRequestError", 400, "size", "size must be 'auto', or WIDTHxHEIGHT"),
        ("model", "NotFoundError", 404, "model", "The model 'dall-e-2' does not exist"),
        ("deadline", "RateLimitError", 429, "deadline_s", "Refused: ready in"),
        ("variation", "NotFoundError", 404, None, "/v1/images/variations is not served here"),
    ],
)
def test_errors_are_its_own_classes(
    report: Report, name: str, kind: str, status: int, param: str | None, message: str
) -> None:
    error = report[name]
    assert (error["error"], error["status"], error["param"]) == (kind, status, param)
    assert message in error["message"] and error["requestID"]


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("abort", "APIUserAbortError"), ("abort of a stream", "image_generation.partial_image")],
)
def test_a_request_that_the_client_leaves_ends(report: Report, name: str, outcome: str) -> None:
    found, busy_s, freed_s = report[name]
    assert found == outcome
    assert freed_s < busy_s / 4, f"free after {freed_s} s; all of it would have taken {busy_s} s"


def test_a_timeout_is_an_error_class_of_the_client(report: Report) -> None:
    assert report["timeout"]["error"] == "APIConnectionTimeoutError"


def test_the_example_makes_a_picture(packages: Path, running: Service) -> None:
    script = shutil.copy(EXAMPLE, packages)
    environment = {"PATH": os.environ["PATH"], "OPENAI_BASE_URL": f"{running.url}/v1"}
    command = [tool("node", "nodejs"), str(script), "a ring", "picture.png"]
    subprocess.run(command, cwd=packages, env=environment, check=True, timeout=100)
    with Image.open(packages / "picture.png") as image:
        assert image.size == (128, 128)
