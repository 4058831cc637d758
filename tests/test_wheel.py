"""An installed wheel renders and serves without the repository. Its dependencies come from the
tests' environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import httpx
import pytest

from sdxl.images import read_parameters
from tests.serve.servers import GENERATE
from tests.serve.services import service
from tests.test_structure import MAY_IMPORT

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index")
PROMPT = "a red circle on a blue background"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def run(*command: str | Path, folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDXL_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of programs of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source, place = folder / "source", folder / "environment"
    for package in MAY_IMPORT:
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in FILES:
        shutil.copy(ROOT / name, source)
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", folder, source, folder=folder)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    venv.create(place)
    python = place / "bin" / "python"
    run(*PIP, "--python", python, "install", *OFFLINE, wheel, folder=folder)
    # Paths in that folder's own .pth files are ignored here, so this repository is not found.
    (own,) = place.glob("lib/*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert not (own / "training").exists(), "only a clone trains"
    show = "import sdxl, engines, onnx_export, serve, eval; print(sdxl.__file__, serve.__file__)"
    for file in run(python, "-c", show, folder=folder).split():
        assert Path(file).is_relative_to(own), file
    return place / "bin"


def test_it_renders(programs: Path, tmp_path: Path) -> None:
    run(programs / "sdxl", "render", PROMPT, "--steps", "4", "--out", "a.png", folder=tmp_path)
    parameters = read_parameters((tmp_path / "a.png").read_bytes())
    assert (parameters["prompt"], parameters["model"]) == (PROMPT, "sdxl-mini")


def test_it_serves_pictures_pages_and_its_licence(programs: Path, tmp_path: Path) -> None:
    command = ("env", "-u", "PYTHONPATH", str(programs / "sdxl"), "serve")
    with (
        service(tmp_path, "--llm", "none", command=command) as found,
        httpx.Client(base_url=found.url, timeout=60) as http,
    ):
        made = http.post(GENERATE, json={"prompt": PROMPT, "steps": 4})
        assert made.status_code == 200, made.text
        for path in ("/", "/web/main.js", "/docs", "/docs/start.js"):
            assert http.get(path).status_code == 200, path
        assert "Apache License" in http.get("/v1/license").json()["content"]
