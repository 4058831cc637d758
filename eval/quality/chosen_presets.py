"""Which of a sweep's settings become the model's presets low, medium and high.

Each has a step count of its own, the three least at which anything is within MLPerf's gates. At
each it is the fastest cache interval within the gates that loses no more than the preset below it:
a better name must not mean a worse picture. It measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eval.quality.pareto import QualitySetting, Tried, change
from sdxl.params import InvalidParams
from sdxl.presets import EXACT, MEASURED, Preset, Presets

PLAIN = QualitySetting()


def choose_presets(tried: Sequence[Tried]) -> Presets:
    """`tried[0]` is the exact model."""
    good = [each for each in tried if is_plain(each) and change(each, tried[0]).is_within]
    counts = sorted({each.setting.steps for each in good})
    if not counts:
        raise InvalidParams("grid", None, "needed settings of the usual precision and scheduler")
    losses = {each.setting: change(each, tried[0]).loss for each in good}
    found: dict[str, Preset] = {}
    most = float("inf")
    # With fewer step counts than names, the last stands for the better ones too.
    for name, steps in zip(MEASURED, [*counts, *counts[-1:] * len(MEASURED)], strict=False):
        at = [each for each in good if each.setting.steps == steps]
        least = min(losses[each.setting] for each in at)
        near = [each for each in at if losses[each.setting] <= max(most, least)]
        best = max(near, key=lambda each: each.speed)
        most = losses[best.setting]
        found[name] = Preset(steps, best.setting.cache_interval)
    return {**found, **EXACT}


def is_plain(tried: Tried) -> bool:
    """It differs from the exact model in steps and interval alone. Tuned plans are presets by
    `sdxl tune`, which holds them against more."""
    setting = tried.setting
    return setting == replace(PLAIN, steps=setting.steps, cache_interval=setting.cache_interval)
