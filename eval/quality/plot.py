"""The plot of a sweep: speed against the changes of FID and CLIP."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from eval.quality.pareto import QualitySetting, Tried, front, relative_change
from eval.quality.protocol import CLIP_TOLERANCE, FID_TOLERANCE
from sdxl.files import write_atomic

COLOURS = {"fp32": "#1f4e79", "fp16": "#2a9d8f", "int8": "#d1495b", "fp8": "#e9a23b"}
TUNED = "tuned plan"
MARKERS = {"interval 1": "o", "interval 2": "s", "interval 3": "^", TUNED: "*"}
GREY, PALE = "#555555", "#dfe8ee"
GATES_SHOWN = 5
"""the range of an axis, in gates; larger changes are drawn at its end"""
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def plot_pareto(tried: Sequence[Tried], path: Path) -> None:
    """Plot MLPerf's gates as bands. Settings on the front have a black edge."""
    best = front(tried)
    precisions = dict.fromkeys(each.setting.precision for each in tried)
    reuses = sorted({reuse(each.setting) for each in tried})
    points = [(name, "o", COLOURS.get(name, GREY)) for name in precisions]
    points += [(name, MARKERS.get(name, "D"), GREY) for name in reuses]
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
        panels = figure.subplots(1, 2)
        for axis, name, gate in zip(
            panels, ("FID", "CLIP"), (FID_TOLERANCE, CLIP_TOLERANCE), strict=True
        ):
            most = 100 * gate * GATES_SHOWN
            axis.axhspan(-100 * gate, 100 * gate, color=PALE, zorder=0)
            for each in tried:
                setting = each.setting
                change = 100 * relative_change(name, each, tried[0])
                axis.scatter(
                    each.speed,
                    min(max(change, -most), most),
                    s=46 if setting.deep_steps is None else 110,
                    color=COLOURS.get(setting.precision, GREY),
                    marker=MARKERS.get(reuse(setting), "D"),
                    edgecolors="black" if each in best else "white",
                )
            axis.set(xlabel="images/s", ylabel=f"{name}, change from the exact model, %")
            axis.set_title(f"{name} ({'lower' if name == 'FID' else 'higher'} is better)")
        handles: list[Any] = [
            Line2D([], [], linestyle="none", marker=marker, color=colour, label=name)
            for name, marker, colour in points
        ]
        handles.append(Patch(color=PALE, label="MLPerf's gates"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_atomic(path, data.getvalue())


def reuse(setting: QualitySetting) -> str:
    return f"interval {setting.cache_interval}" if setting.deep_steps is None else TUNED
