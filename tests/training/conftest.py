"""Training in two steps, which runs every line of a stage and teaches nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from sdxl.mini.scenes import Image, Scene, draw
from training.fitting import Schedule
from training.mini import control, own_courses
from training.mini.judge import Straightened
from training.mini.plan import TrainingPlan


def short_plan(**counts: int) -> TrainingPlan:
    """Return a plan with two steps a stage and two rows a batch, and these other counts."""
    step, plan = Schedule(steps=2, peak_rate=1e-3, seed=1), TrainingPlan()
    short: dict[str, Any] = {f.name: 2 for f in fields(plan) if f.name.endswith("_batch")}
    short |= {f.name: step for f in fields(plan) if isinstance(f.default, Schedule)}
    short["contrasts"] = tuple(replace(each, schedule=step, groups=4) for each in plan.contrasts)
    return replace(plan, own_courses=(step, step), **short | counts)


@pytest.fixture
def accepts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept paintings that do not show their captions or follow their maps."""

    def redraw(_: Image, scene: Scene) -> Straightened:
        return Straightened(draw(scene, 0), 0.9)

    monkeypatch.setattr(own_courses, "straighten", redraw)
    monkeypatch.setattr(control, "FAR", 99)
