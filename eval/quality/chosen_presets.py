"""Which of a sweep's settings become the model's presets low, medium and high.

Of those within MLPerf's gates that no other beats in both speed and quality: low is the fastest,
high the nearest to the exact model, and medium the one between, of two the faster. More steps are
no better name unless they bring something. It measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eval.quality.pareto import QualitySetting, Tried, change, front
from sdxl.params import InvalidParams
from sdxl.presets import EXACT, MEASURED, Preset, Presets

PLAIN = QualitySetting()


def choose_presets(tried: Sequence[Tried]) -> Presets:
    """`tried[0]` is the exact model."""
    exact = tried[0]
    good = [each for each in tried if is_plain(each.setting) and change(each, exact).is_within]
    if not good:
        raise InvalidParams("grid", None, "needed settings of the usual precision and scheduler")
    best = [each.setting for each in front([exact, *good]) if is_plain(each.setting)]
    three = best[0], best[(len(best) - 1) // 2], best[-1]
    found = {
        name: Preset(setting.steps, setting.cache_interval)
        for name, setting in zip(MEASURED, three, strict=True)
    }
    return {**found, **EXACT}


def is_plain(setting: QualitySetting) -> bool:
    """It differs from the exact model in steps and interval alone. Tuned plans are presets by
    `sdxl tune`, which holds them against more."""
    return setting == replace(PLAIN, steps=setting.steps, cache_interval=setting.cache_interval)
