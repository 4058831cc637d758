"""The examples in examples/ run unchanged."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.serve.servers import listening
from tests.serve.services import Service
from tests.serve.test_batch_api import batch_api, line

EXAMPLES = Path(__file__).parents[3] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


def test_the_python_example_makes_a_picture(tmp_path: Path) -> None:
    with listening() as (url, _):
        environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1"}
        command = [sys.executable, str(EXAMPLES / "generate.py"), "a ring", "picture.png"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=50)
    with Image.open(tmp_path / "picture.png") as image:
        assert image.size == (128, 128)


def test_the_batch_example_makes_a_file_of_answers(tmp_path: Path) -> None:
    requests = "".join(json.dumps(line(name)) + "\n" for name in "ab")
    (tmp_path / "requests.jsonl").write_text(requests)
    with batch_api(tmp_path) as found:
        environment = {**os.environ, "OPENAI_BASE_URL": str(found.client.base_url)}
        command = [sys.executable, str(EXAMPLES / "batch.py"), "requests.jsonl", "answers.jsonl"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=50)
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(each)["custom_id"] for each in answers] == ["a", "b"]


def code_cells(notebook: Path) -> list[Any]:
    cells = json.loads(notebook.read_text())["cells"]
    return [each for each in cells if each["cell_type"] == "code"]


def test_every_example_is_documented() -> None:
    page = (EXAMPLES / "README.md").read_text()
    missing = [each.name for each in EXAMPLES.iterdir() if f"]({each.name})" not in page]
    assert missing == ["README.md"]


def test_the_notebook_is_stored_without_output() -> None:
    cells = code_cells(NOTEBOOK)
    assert cells and not any(each["outputs"] or each["execution_count"] for each in cells)


@pytest.mark.timeout(400)
def test_the_notebook_shows_pictures_in_every_cell(running: Service, tmp_path: Path) -> None:
    copy = Path(shutil.copy(NOTEBOOK, tmp_path))
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": f"{running.url}/v1",
        # The connection files and the history are in the test's folder.
        **dict.fromkeys(("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), str(tmp_path)),
    }
    jupyter = Path(sys.executable).with_name("jupyter-execute")
    done = subprocess.run(
        [str(jupyter), "--inplace", "--timeout=120", str(copy)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    cells = code_cells(copy)
    shown = [[size_of(output) for output in each["outputs"]] for each in cells]
    sizes = [[size for size in each if size] for each in shown]
    assert sizes == [[], [(128, 128)], [(128, 128)], [(128, 128)], [(512, 128)]]
    printed = "".join(line for each in cells[2]["outputs"] for line in each.get("text", ()))
    kinds = [event.removeprefix("image_generation.") for event in printed.split()]
    assert kinds == [*["partial_image"] * 3, "completed"]


def size_of(output: Any) -> tuple[int, int] | None:
    """Return the size of the picture in a cell's output, or None."""
    png = output.get("data", {}).get("image/png")
    return Image.open(io.BytesIO(base64.b64decode(png))).size if png else None
