"""The plot of a tuning: cost against quality, plain choices beside tuned plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eval.quality.plot import GREY, STYLE, add_legend, write_figure
from eval.tuning.checks import CheckedPlan
from eval.tuning.result import TuningResult

PANELS = {
    "psnr": "PSNR to the exact pictures, dB (higher is better)",
    "FID": "FID (lower is better)",
    "clip": "CLIP (higher is better)",
}
SCHEDULER_COLOURS = ("#1f4e79", "#d1495b", "#2a9d8f", "#e9a23b", "#6a4c93", "#555555")
KINDS = {"exact steps": "o", "even caches": "s", "tuned": "*"}


def plot_tuning(result: TuningResult, stem: Path) -> None:
    families = list(dict.fromkeys(family_of(each) for each in result.checked))
    colours = dict(zip(families, SCHEDULER_COLOURS * len(families), strict=False))
    with rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.6), layout="constrained")
        for axis, (name, title) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
            for family in families:
                own = [c for c in result.checked if family_of(c) == family and name in c.scores]
                _draw(axis, own, name, colours[family], result)
            axis.set_xlabel("cost of an image, share of the exact model's")
            axis.set_title(title, fontsize=9)
            axis.margins(x=0.06, y=0.08)
        add_legend(figure, _legend(colours), ncols=8)
        write_figure(figure, stem)


def family_of(each: CheckedPlan) -> str:
    """What shares exact pictures, and is drawn in one colour."""
    course = each.plan.course
    share = "" if course.guided_until == 1 else f", guided to {course.guided_until:g}"
    return f"{course.precision} {course.scheduler}{share}"


def kind_of(each: CheckedPlan) -> str:
    if each.plan.is_exact:
        return "exact steps"
    return "even caches" if each.plan.has_even_caches else "tuned"


def _draw(
    axis: Any, own: Sequence[CheckedPlan], name: str, colour: str, result: TuningResult
) -> None:
    for kind, marker in KINDS.items():
        shown = sorted((c for c in own if kind_of(c) == kind), key=lambda c: c.cost_s)
        axis.plot(
            [result.share(c) for c in shown],
            [c.scores[name] for c in shown],
            color=colour,
            marker=marker,
            markersize=11 if kind == "tuned" else 6,
            markeredgecolor="white",
            linewidth=0.8,
            linestyle=":" if kind == "tuned" else "-" if kind == "exact steps" else "--",
            zorder=3 if kind == "tuned" else 2,
        )


def _legend(colours: dict[str, str]) -> list[Any]:
    families = [
        Line2D([], [], color=colour, linewidth=3, label=name) for name, colour in colours.items()
    ]
    kinds = [
        Line2D([], [], color=GREY, linestyle="none", marker=marker, label=kind)
        for kind, marker in KINDS.items()
    ]
    return [*families, *kinds]
