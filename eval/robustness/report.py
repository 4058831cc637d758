"""The report of a run: checks with measured and allowed values, as JSON and as a plot."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eval.measuring.system_description import processor
from eval.measuring.timing import quantile
from eval.robustness.clients import Outcome
from eval.robustness.processes import Growth, ProcessWatch
from sdxl.files import prepare_folder, write_atomic, write_json

STEP_S = 10.0
"""the plot's interval for counts of answers"""
GREY = "#555555"
COLOURS = {"200": "#2a9d8f", "429": "#e9a23b", "left": "#9aa5b1", "other": "#d1495b"}
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
ABOVE |= {"frameon": False, "fontsize": 8, "ncols": 5}
"""a legend above its panel"""


@dataclass(frozen=True)
class Check:
    """One condition."""

    name: str
    found: Any
    allowed: Any
    holds: bool

    def __str__(self) -> str:
        return f"{'ok ' if self.holds else 'NO '} {self.name}: {self.found}, allowed {self.allowed}"


def at_most(name: str, measured: float, allowed: float) -> Check:
    return Check(name, round(measured, 3), allowed, measured <= allowed)


def none_of(name: str, broken: Sequence[Any]) -> Check:
    """`broken`: everything that breaks the condition; the report shows five."""
    shown = [str(each) for each in broken[:5]]
    return Check(name, f"{len(broken)}: {shown}" if broken else 0, 0, not broken)


def some(name: str, count: int) -> Check:
    """The other checks need at least one."""
    return Check(name, count, "at least 1", count > 0)


@dataclass
class RunReport:
    name: str
    settings: Mapping[str, Any]
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    """the time on time.perf_counter, and the title"""
    watch: ProcessWatch | None = None

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        facts = {name: value for name, value in self.facts.items() if name != "findings"}
        return "\n".join([json.dumps(facts), *map(str, self.checks)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "holds": self.holds,
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"cpu": processor(), "python": platform.python_version()},
            "settings": dict(self.settings),
            "checks": [asdict(check) for check in self.checks],
            **self.facts,
            "answers": summary(self.outcomes),
            "kills": Counter(title for _, title in self.kills),
            "processes": [rounded(asdict(growth)) for growth in self.growths],
        }

    def write(self, folder: Path) -> None:
        prepare_folder(folder)
        write_json(folder / f"{self.name}.json", self.as_dict())
        if self.watch is not None:
            plot(self, folder / f"{self.name}.png")


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts and times by kind of client."""
    by_kind: dict[str, Any] = {}
    for kind in sorted({each.kind for each in outcomes}):
        of_kind = [each for each in outcomes if each.kind == kind]
        took = [each.took_s for each in of_kind if each.status == 200]
        by_kind[kind] = {
            "statuses": {str(k): n for k, n in sorted(Counter(o.status for o in of_kind).items())},
            "p50_s": round(quantile(took, 0.5), 3) if took else None,
            "p99_s": round(quantile(took, 0.99), 3) if took else None,
        }
    return by_kind


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 1) if isinstance(v, float) else v for k, v in values.items()}


def plot(report: RunReport, path: Path) -> None:
    """Answers, their times, and the processes' memory, over the run."""
    import io

    from matplotlib.figure import Figure

    assert report.watch is not None
    zero_s = report.watch.began_s
    panels = 3 if report.outcomes else 1
    figure = Figure(figsize=(9, 1 + 2.4 * panels), layout="constrained", dpi=110)
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    memory = axes[-1]
    if report.outcomes:
        _plot_answers(axes[0], report.outcomes, zero_s)
        good = [o for o in report.outcomes if o.status == 200]
        at_s, took_s = [o.ended_s - zero_s for o in good], [o.took_s for o in good]
        axes[1].scatter(at_s, took_s, s=4, color=COLOURS["200"])
        axes[1].set_ylabel("s to a picture")
    titles = list(report.watch.titles)
    for (title, _), samples in report.watch.seen.items():
        colour = f"C{titles.index(title)}"
        memory.plot([s.at_s for s in samples], [s.rss_mb for s in samples], color=colour, lw=1)
    for number, title in enumerate(titles):
        memory.plot([], [], color=f"C{number}", label=title)
    memory.set_ylabel("resident MB")
    memory.set_xlabel("s")
    memory.set_ylim(bottom=0)
    memory.legend(**ABOVE)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        for killed_s, _ in report.kills:
            axis.axvline(killed_s - zero_s, color=GREY, lw=0.4, ls=":")
    verdict = "all conditions hold" if report.holds else "a condition fails"
    dotted = "; dotted: a killed process" if report.kills else ""
    figure.suptitle(f"{report.name}: {verdict}{dotted}", fontsize=10)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_atomic(path, data.getvalue())


def _plot_answers(axis: Any, outcomes: Sequence[Outcome], zero_s: float) -> None:
    ended_s: dict[str, list[float]] = {name: [] for name in COLOURS}
    for each in outcomes:
        name = {200: "200", 400: "200", 429: "429", -1: "left"}.get(each.status, "other")
        ended_s[name].append(each.ended_s - zero_s)
    last_s = max((each.ended_s - zero_s for each in outcomes), default=0.0)
    edges = np.arange(0, max(last_s, 0.0) + 2 * STEP_S, STEP_S)
    colours, labels = list(COLOURS.values()), list(COLOURS)
    axis.hist(list(ended_s.values()), edges, stacked=True, color=colours, label=labels)
    axis.set_ylabel(f"answers in {STEP_S:g} s")
    axis.legend(**ABOVE)
