"""The plot of a sweep, as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from eval.quality.pareto import QualitySetting, Tried, change, front
from eval.quality.protocol import CLIP_TOLERANCE, FID_TOLERANCE
from sdxl.files import write_atomic

COLOURS = {"fp32": "#1f4e79", "fp16": "#2a9d8f", "int8": "#d1495b", "fp8": "#e9a23b"}
TUNED = "tuned plan"
MARKERS = {"interval 1": "o", "interval 2": "s", "interval 3": "^", TUNED: "*"}
OTHER_MARKER = "D"
GREY, PALE = "#555555", "#dfe8ee"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "sdxl",
    "figure.dpi": 150,
}


def plot_pareto(tried: Sequence[Tried], stem: Path) -> None:
    """Speed against the change of FID and of CLIP, with shaded gates and each panel's front."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        axes = figure.subplots(1, 2)
        _panel(axes[0], tried, "FID", FID_TOLERANCE)
        _panel(axes[1], tried, "CLIP", CLIP_TOLERANCE)
        place: Any = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
        figure.legend(handles=_legend(tried), ncols=9, columnspacing=1.2, **place)
        write_figure(figure, stem)


def _panel(axis: Any, tried: Sequence[Tried], name: str, gate: float) -> None:
    def height(each: Tried) -> float:
        changes = change(each, tried[0])
        return 100 * (changes.fid if name == "FID" else changes.clip)

    axis.axhspan(-100 * gate, 100 * gate, color=PALE, zorder=0)
    axis.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    best = front(tried, lambda changes: changes.fid if name == "FID" else -changes.clip)
    axis.plot([t.speed for t in best], [height(t) for t in best], color=GREY, linewidth=1, zorder=2)
    for each in tried:
        setting = each.setting
        axis.scatter(
            each.speed,
            height(each),
            s=46 if setting.deep_steps is None else 110,
            color=COLOURS.get(setting.precision, GREY),
            marker=MARKERS.get(reuse(setting), OTHER_MARKER),
            edgecolors="black" if each in best else "white",
            linewidths=0.9,
            zorder=3,
        )
    for i, each in enumerate(best):
        text = f"{each.setting.scheduler}, {each.setting.steps} steps"
        if each.setting.cut != "reference":
            text += ", fresh skips"
        if each.setting.deep_steps is not None:
            text += ", tuned"
        offset = (6, 8 if i % 2 == 0 else -13)
        style: Any = {"textcoords": "offset points", "fontsize": 7.5, "color": GREY}
        axis.annotate(text, (each.speed, height(each)), xytext=offset, **style)
    axis.set_xlabel("images/s")
    axis.set_ylabel(f"{name}, change from the exact model, %")
    axis.set_title(f"{name} ({'lower' if name == 'FID' else 'higher'} is better)", fontsize=10)
    # Linear around the gates, where settings differ little; logarithmic beyond.
    axis.set_yscale("symlog", linthresh=200 * gate, linscale=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.margins(x=0.12, y=0.12)


def reuse(setting: QualitySetting) -> str:
    return f"interval {setting.cache_interval}" if setting.deep_steps is None else TUNED


def _legend(tried: Sequence[Tried]) -> list[Any]:
    precisions = dict.fromkeys(t.setting.precision for t in tried)
    reuses = sorted({reuse(t.setting) for t in tried})
    entries = [(name, "o", COLOURS.get(name, GREY)) for name in precisions]
    entries += [(name, MARKERS.get(name, OTHER_MARKER), GREY) for name in reuses]
    return [
        *(
            Line2D([], [], linestyle="none", marker=marker, color=colour, label=name)
            for name, marker, colour in entries
        ),
        Line2D([], [], color=GREY, linewidth=1, label="the front"),
        Patch(color=PALE, label="MLPerf's gates"),
    ]


def write_figure(figure: Figure, stem: Path) -> None:
    for suffix in ("png", "svg"):
        data = io.BytesIO()
        # Without a date, equal figures give equal bytes.
        metadata: Any = {"Date": None} if suffix == "svg" else None
        figure.savefig(data, format=suffix, metadata=metadata)
        write_atomic(stem.with_suffix(f".{suffix}"), data.getvalue())
