"""What examples/ shows runs as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.serve.servers import listening
from tests.serve.test_batch_api import doors, line

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_python_example_makes_a_picture(tmp_path: Path) -> None:
    with listening() as (url, _):
        environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1"}
        command = [sys.executable, str(EXAMPLES / "generate.py"), "a ring", "picture.png"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=50)
    with Image.open(tmp_path / "picture.png") as image:
        assert image.size == (128, 128)


@pytest.mark.slow
def test_the_batch_example_makes_a_file_of_answers(tmp_path: Path) -> None:
    requests = "".join(json.dumps(line(name)) + "\n" for name in "ab")
    (tmp_path / "requests.jsonl").write_text(requests)
    with doors(tmp_path) as found:
        environment = {**os.environ, "OPENAI_BASE_URL": str(found.client.base_url)}
        command = [sys.executable, str(EXAMPLES / "batch.py"), "requests.jsonl", "answers.jsonl"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=50)
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(each)["custom_id"] for each in answers] == ["a", "b"]
