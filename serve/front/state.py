"""One HTTP front's state: what it counts, how many requests are open, whether it takes more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.front.metrics import FrontMetrics


@dataclass
class Front:
    metrics: FrontMetrics = field(default_factory=FrontMetrics)
    open_requests: int = 0
    is_draining: bool = False
    is_signed: bool = True
    """whether answers carry the request's id from here on; Ray's proxy adds it by itself"""

    async def metrics_of_all(self) -> Sequence[Any]:
        """What all fronts count; this one knows of no others."""
        return self.metrics.collect()

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new, and return when the last answer is out."""
        self.is_draining = True
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        while self.open_requests and clock() < until_s:
            await asyncio.sleep(0.02)
