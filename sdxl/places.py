"""The folders of the embedded model and of this project's caches. It creates no folder."""

from __future__ import annotations

import os
from pathlib import Path

MINI = Path(__file__).parent / "mini" / "weights"
LORAS = MINI.with_name("loras")
CONTROLNETS = MINI.with_name("controlnets")
IP_ADAPTERS = MINI.with_name("ip_adapters")
MINI_REFINER = MINI.with_name("refiner")
HOME = "SDXL_HOME"


def home() -> Path:
    chosen = os.environ.get(HOME)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "sdxl-deepcache"
