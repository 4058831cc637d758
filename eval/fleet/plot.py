"""The plot of `sdxl bench fleet`, as SVG: latency by fleet size, and by router."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from eval.fleet.outcome import Outcome
from eval.quality.plot import STYLE
from sdxl.files import write_atomic

COLOURS = ("#9aa5b1", "#e9a23b", "#2a9d8f", "#1f4e79")


def plot_fleet(
    sizes: Sequence[int], by_router: Mapping[str, Sequence[Outcome]], file: Path
) -> None:
    """p50 and p99 of each router by the number of replicas."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        for axis, share in zip(figure.subplots(1, 2), (0.5, 0.99), strict=True):
            for colour, (router, outcomes) in zip(COLOURS, by_router.items(), strict=False):
                seconds = [each.quantile(share) for each in outcomes]
                axis.plot(sizes, seconds, marker="o", color=colour, label=router)
            axis.set_xscale("log")
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_xlabel("replicas")
            axis.set_title(f"p{100 * share:.0f}, seconds", fontsize=10)
        axis.legend(frameon=False, fontsize=8)
        data = io.BytesIO()
        metadata: Any = {"Date": None}
        figure.savefig(data, format="svg", metadata=metadata)
        write_atomic(file, data.getvalue())
