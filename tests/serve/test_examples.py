"""What examples/ shows runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

from tests.serve.servers import listening

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_python_example_makes_a_picture(tmp_path: Path) -> None:
    with listening() as (url, _):
        environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1"}
        command = [sys.executable, str(EXAMPLES / "generate.py"), "a ring", "picture.png"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=50)
    with Image.open(tmp_path / "picture.png") as image:
        assert image.size == (128, 128)
