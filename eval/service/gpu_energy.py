"""What GPUs of a service have used since their driver started, in joules, as its own page of
metrics says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import httpx

from eval.service import api_key
from eval.service.scraping import values_of

JOULES = "sdxl_gpu_energy_joules_total"


def meter_of(url: str, work: Literal["images", "llm"], key: str = "") -> Callable[[], float] | None:
    """Reads those that do this work; None where none counts."""

    def read() -> list[float]:
        page = httpx.get(f"{url}/metrics", headers=api_key.headers(key), timeout=30).text
        lines = [line for line in page.splitlines() if f'work="{work}"' in line]
        return values_of("\n".join(lines), JOULES)

    return (lambda: sum(read())) if read() else None
