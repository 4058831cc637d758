"""What the GPUs of a service have used since their driver started, in joules, as its own page of
metrics says.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx

from eval.service import api_key
from eval.service.scraping import values_of

JOULES = "sdxl_gpu_energy_joules_total"


def meter_of(url: str, key: str = "") -> Callable[[], float] | None:
    """Reads all of its GPUs; None where it has none that count."""

    def read() -> list[float]:
        page = httpx.get(f"{url}/metrics", headers=api_key.headers(key), timeout=30).text
        return values_of(page, JOULES)

    return (lambda: sum(read())) if read() else None
