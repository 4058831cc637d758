"""What `sdxl serve` waits for before anybody can ask it anything."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_what_starts_the_service_loads_no_torch() -> None:
    """It looks at the checkpoint and describes the application; only replicas compute. Torch there
    was a second of every start."""
    code = (
        "import sys, serve.app; from sdxl.checkpoint import check_files; check_files('mini');"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
