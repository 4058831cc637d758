"""The tests that use OpenAI's package, run with the newest release of its second major version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.serve.service.clients.reports import ROOT
from tests.tools import install_python

VERSION = "2.54.0"
ALONE = (f"openai=={VERSION}", "distro==1.9.0")
"""packages to install without their dependencies, which are already installed"""
FILES = (
    "tests/serve/test_openai_client.py",
    "tests/serve/test_batch_api.py",
    "tests/serve/llm/test_text_api.py",
)
RUN = """
import inspect, sys, pytest

class ClientTests:
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if "openai." in inspect.getsource(item.function)]

version, *files = sys.argv[1:]
flags = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not long")
status = pytest.main([*flags, *files], plugins=[ClientTests()])
import openai
assert openai.__version__ == version, openai.__file__
sys.exit(status)
"""


def test_these_tests_use_another_major_version() -> None:
    assert not openai.__version__.startswith("2.")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_openai_2_passes_the_same_tests(tmp_path: Path) -> None:
    packages = install_python(tmp_path, "--no-deps", *ALONE)
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-c", RUN, VERSION, *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 50
