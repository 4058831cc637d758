"""Counts of the host's work."""

from __future__ import annotations

from typing import Any

from triton import knobs

from engines.cuda.recordings import Ticks
from eval.gpu import mixed
from sdxl.engine import Engines
from sdxl.specs import SDXL_1_0


def test_only_work_within_the_context_is_counted() -> None:
    device: Any = None
    before = knobs.compilation.listener
    ticks = Ticks(device)
    ticks.counts.update(captured=5, replayed=9)
    with mixed.counted(Engines(SDXL_1_0, {}, run_recorded=ticks)) as counts:
        for cache_hit in (True, False, False):
            knobs.compilation.listener(src=None, cache_hit=cache_hit)
        ticks.counts.update(replayed=3, evicted=1)
    assert counts == {"loaded": 1, "compiled": 2, "replayed": 3, "evicted": 1}
    assert knobs.compilation.listener is before
