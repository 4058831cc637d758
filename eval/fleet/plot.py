"""The plot of `sdxl bench fleet`, as PNG and SVG: latency by fleet size, and by router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from eval.fleet.outcome import Outcome
from eval.quality.plot import STYLE, write_figure

COLOURS = ("#9aa5b1", "#e9a23b", "#2a9d8f", "#1f4e79")


def plot_fleet(
    title: str, sizes: Sequence[int], by_router: Mapping[str, Sequence[Outcome]], stem: Path
) -> None:
    """p50 and p99 of each router by the number of replicas."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        figure.suptitle(title, fontsize=10)
        for axis, share in zip(figure.subplots(1, 2), (0.5, 0.99), strict=True):
            for colour, (router, outcomes) in zip(COLOURS, by_router.items(), strict=False):
                seconds = [each.quantile(share) for each in outcomes]
                axis.plot(sizes, seconds, marker="o", color=colour, label=router)
            axis.set_xscale("log")
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_xlabel("replicas")
            axis.set_ylabel(f"seconds until {share:.0%} of the pictures are ready")
        handles, routers = axis.get_legend_handles_labels()
        figure.legend(
            handles, routers, loc="outside lower center", ncols=len(routers), frameon=False
        )
        write_figure(figure, stem)
