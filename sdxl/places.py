"""Where this project keeps what it makes for itself. It makes no folder."""

from __future__ import annotations

import os
from pathlib import Path

HOME = "SDXL_HOME"


def home() -> Path:
    chosen = os.environ.get(HOME)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "sdxl-deepcache"
