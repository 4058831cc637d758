"""The web page and the API's documentation as files: complete, small, and without other origins."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from serve.front.page import add_pages
from serve.worker.worker import Worker
from tests.serve.servers import call
from tests.serve.services import ROOT

WEB = ROOT / "serve" / "web"
MOST_BYTES = 130 * 1024
IMPORT = re.compile(r'^import .* from "\./(.+)";$', re.MULTILINE)


def get(worker: Worker, path: str, **headers: str) -> httpx.Response:
    return call(worker, "GET", path, headers=headers)


class Links(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_at_most_130_kb() -> None:
    sizes = {path.name: path.stat().st_size for path in WEB.iterdir()}
    assert sum(sizes.values()) <= MOST_BYTES, f"{sum(sizes.values())} bytes of {MOST_BYTES}"


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_everything_a_page_links_to_is_there_and_of_this_origin(worker: Worker, page: str) -> None:
    answer = get(worker, page)
    assert answer.headers["content-type"].startswith("text/html")
    for link in Links(answer.text).found:
        assert ":" not in link and not link.startswith("/"), f"{link} leaves the service"
        if not link.startswith("#"):
            assert get(worker, f"/{link.removeprefix('./')}").status_code == 200, link


def test_every_import_is_there_and_every_module_is_imported() -> None:
    imported = {name for path in WEB.glob("*.js") for name in IMPORT.findall(path.read_text())}
    assert imported | {"main.js"} == {path.name for path in WEB.glob("*.js")}


@pytest.mark.parametrize("path", ["/", "/web/main.js", "/docs", "/docs/swagger-ui.css"])
def test_files_are_of_this_origin_and_cheap_to_ask_for_again(worker: Worker, path: str) -> None:
    answer = get(worker, path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = get(worker, path, **{"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/web/../page.py", "/web/%2e%2e/page.py", "/web/..%2fpage.py", "/web/", "/web/none"]
)
def test_only_the_page_s_files_are_served(worker: Worker, path: str) -> None:
    answer = get(worker, path)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_an_installed_package_holds_the_pages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["serve"]
    held = {path for pattern in patterns for path in (ROOT / "serve").glob(pattern)}
    files = {*WEB.iterdir(), *(ROOT / "serve" / "swagger_ui").iterdir()}
    assert files <= held, f"not in the package: {files - held}"


def test_the_guide_is_built_of_the_docs_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build is strict: a broken link fails it."""
    built = tmp_path / "guide"
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", built)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr("serve.front.page.GUIDE", built)
    app = FastAPI()
    add_pages(app)
    client = TestClient(app)
    answer = client.get("/docs/guide/models.html")
    assert "ControlNet" in answer.text
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    for link in Links(answer.text).found:
        if ":" not in link and not link.startswith("#"):
            assert client.get(f"/docs/guide/{link}").status_code == 200, link
    assert client.get("/docs").status_code == 200
