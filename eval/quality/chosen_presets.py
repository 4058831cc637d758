"""Which of a sweep's settings become the model's presets low, medium and high.

Each has a step count of its own, the three least at which anything is within MLPerf's gates. At
each it is the fastest cache interval within the gates that is no faster than the preset below it:
what is within the gates counts as equally good, and a better name must not mean less work. It
measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from eval.quality.pareto import QualitySetting, Tried, change
from sdxl.params import InvalidParams
from sdxl.presets import EXACT, MEASURED, Preset, Presets

PLAIN = QualitySetting()
SPEED = attrgetter("speed")


def choose_presets(tried: Sequence[Tried]) -> Presets:
    """`tried[0]` is the exact model."""
    good = [each for each in tried if is_plain(each.setting) and change(each, tried[0]).is_within]
    counts = sorted({each.setting.steps for each in good})
    if not counts:
        raise InvalidParams("grid", None, "needed settings of the usual precision and scheduler")
    found: dict[str, Preset] = {}
    fastest = float("inf")
    # With fewer step counts than names, the last stands for the better ones too.
    for name, steps in zip(MEASURED, [*counts, *counts[-1:] * len(MEASURED)], strict=False):
        at = [each for each in good if each.setting.steps == steps]
        slower = [each for each in at if each.speed <= fastest]
        best = max(slower, key=SPEED) if slower else min(at, key=SPEED)
        fastest = best.speed
        found[name] = Preset(steps, best.setting.cache_interval)
    return {**found, **EXACT}


def is_plain(setting: QualitySetting) -> bool:
    """It differs from the exact model in steps and interval alone. Tuned plans are presets by
    `sdxl tune`, which holds them against more."""
    return setting == replace(PLAIN, steps=setting.steps, cache_interval=setting.cache_interval)
