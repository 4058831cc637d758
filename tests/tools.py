"""Programs that some tests run. Where one is missing the test skips, with what would bring it; in
CI that is a failure."""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRED = "CI_REQUIRES_TOOLS"


def tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        told = f"{name} is not installed (Debian's package {package})"
        assert not os.environ.get(REQUIRED), f"{told}, and {REQUIRED} is set"
        pytest.skip(told)
    return found
