"""The plot of a sweep, as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from eval.quality.pareto import QualitySetting, Tried, change_interval, front, relative_change
from eval.quality.protocol import CLIP_TOLERANCE, FID_TOLERANCE
from sdxl.files import write_atomic

COLOURS = {"fp32": "#1f4e79", "fp16": "#2a9d8f", "int8": "#d1495b", "fp8": "#e9a23b"}
TUNED = "tuned plan"
MARKERS = {"interval 1": "o", "interval 2": "s", "interval 3": "^", TUNED: "*"}
OTHER_MARKER = "D"
GREY, FAINT, PALE = "#555555", "#b8bcc0", "#dfe8ee"
GATES_SHOWN = 5
"""the range of an axis, in gates; a larger change is drawn at the end, with its number"""
LIST_COLUMNS = 3
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "sdxl",
    "figure.dpi": 150,
}


def plot_pareto(tried: Sequence[Tried], stem: Path) -> None:
    """Plot speed against the changes of FID and CLIP, with shaded gates and each panel's front. The
    front's settings are numbered."""
    fronts = {
        "FID": front(tried, lambda changes: changes.fid),
        "CLIP": front(tried, lambda changes: -changes.clip),
    }
    best = {id(each): each for each in (*fronts["FID"], *fronts["CLIP"])}.values()
    numbers = {each.setting: i for i, each in enumerate(sorted(best, key=speed), 1)}
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        places = figure.subplot_mosaic([list(fronts), ["legend"] * 2], height_ratios=[4, 1])
        for name, gate in (("FID", FID_TOLERANCE), ("CLIP", CLIP_TOLERANCE)):
            _panel(places[name], tried, name, 100 * gate, fronts[name], numbers)
        _legend(places["legend"], tried, numbers)
        write_figure(figure, stem)


def speed(tried: Tried) -> float:
    return tried.speed


def _panel(
    axis: Any,
    tried: Sequence[Tried],
    name: str,
    gate: float,
    best: Sequence[Tried],
    numbers: Mapping[QualitySetting, int],
) -> None:
    most = GATES_SHOWN * gate

    def height(each: Tried) -> float:
        return 100 * relative_change(name, each, tried[0])

    def shown(value: float) -> float:
        return min(max(value, -most), most)

    axis.axhspan(-gate, gate, color=PALE, zorder=0)
    axis.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    axis.plot(list(map(speed, best)), [shown(height(t)) for t in best], color=GREY, linewidth=1)
    for each in tried:
        setting, value = each.setting, height(each)
        spread = change_interval(name, each, tried[0])
        bar = [shown(100 * spread.low), shown(100 * spread.high)]
        axis.plot([each.speed] * 2, bar, color=FAINT, linewidth=1, zorder=1)
        axis.scatter(
            each.speed,
            shown(value),
            s=46 if setting.deep_steps is None else 110,
            color=COLOURS.get(setting.precision, GREY),
            marker=MARKERS.get(reuse(setting), OTHER_MARKER),
            edgecolors="black" if each in best else "white",
            linewidths=0.9,
            clip_on=False,
            zorder=3,
        )
        text = [f"{numbers[setting]}"] if each in best else []
        if abs(value) > most:
            text.append(f"{value:+.3g}%")
        # Place the text inside the panel, beside the front's line.
        across, side = (-7, "right") if abs(value) > most else (6, "left")
        place = (across, -11 if value > 0 else 5)
        style: Any = {"textcoords": "offset points", "fontsize": 8, "ha": side}
        axis.annotate("  ".join(text), (each.speed, shown(value)), xytext=place, **style)
    axis.set_xlabel("images/s")
    axis.set_ylabel(f"{name}, change from the exact model, %")
    axis.set_title(f"{name} ({'lower' if name == 'FID' else 'higher'} is better)", fontsize=10)
    ends = [shown(height(each)) for each in tried]
    axis.set_ylim(min(ends) - gate / 2, max(ends) + gate / 2)
    axis.margins(x=0.08)


def reuse(setting: QualitySetting) -> str:
    return f"interval {setting.cache_interval}" if setting.deep_steps is None else TUNED


def _legend(axis: Any, tried: Sequence[Tried], numbers: Mapping[QualitySetting, int]) -> None:
    precisions = dict.fromkeys(t.setting.precision for t in tried)
    reuses = sorted({reuse(t.setting) for t in tried})
    entries = [(name, "o", COLOURS.get(name, GREY)) for name in precisions]
    entries += [(name, MARKERS.get(name, OTHER_MARKER), GREY) for name in reuses]
    handles = [
        *(
            Line2D([], [], linestyle="none", marker=marker, color=colour, label=name)
            for name, marker, colour in entries
        ),
        Line2D([], [], color=GREY, linewidth=1, label="nothing is faster and better"),
        Line2D([], [], color=FAINT, linewidth=1, label="95% interval"),
        Patch(color=PALE, label="MLPerf's gates"),
    ]
    axis.axis("off")
    place: Any = {"loc": "upper center", "frameon": False, "fontsize": 8}
    axis.legend(handles=handles, ncols=6, columnspacing=1.2, **place)
    lines = [f"{number}  {setting}" for setting, number in numbers.items()]
    rows = -(-len(lines) // LIST_COLUMNS)
    for column in range(LIST_COLUMNS):
        text = "\n".join(lines[column * rows : (column + 1) * rows])
        place = {"va": "top", "fontsize": 7.5, "color": GREY, "linespacing": 1.4}
        axis.text(column / LIST_COLUMNS, 0.45, text, transform=axis.transAxes, **place)


def write_figure(figure: Figure, stem: Path) -> None:
    for suffix in ("png", "svg"):
        data = io.BytesIO()
        # Without a date, equal figures give equal bytes.
        metadata: Any = {"Date": None} if suffix == "svg" else None
        figure.savefig(data, format=suffix, metadata=metadata)
        write_atomic(stem.with_suffix(f".{suffix}"), data.getvalue())
