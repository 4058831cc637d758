"""Plans checked on whole pictures of captions that nothing was tuned on: FID, CLIP and, for drawn
scenes, the pixel judge; and how near the pictures are to the exact model's of the same guidance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.quality.evaluation import Evaluation, Findings
from eval.quality.frechet import QuickFrechet
from eval.quality.pareto import Change
from eval.quality.sources import Folder, Painted
from eval.quality.task import QualityTask
from eval.tuning.course import CachePlan, Course, exact
from sdxl.mini.judge import faults
from sdxl.mini.scenes import Scene
from sdxl.pipeline import Pipeline

NO_FID = 1e-6
RIGHT = "right"
"""the share of pictures in which the pixel judge finds no fault"""


@dataclass(frozen=True)
class CheckedPlan:
    plan: CachePlan
    cost_s: float
    """of an image's steps"""
    findings: Findings
    fid: float

    @property
    def scores(self) -> dict[str, float]:
        means = {name: float(self.findings[name].double().mean()) for name in self.per_picture}
        return {"FID": self.fid, **means}

    @property
    def per_picture(self) -> list[str]:
        return [name for name in ("clip", RIGHT, "psnr") if name in self.findings]

    def loss_to(self, exact: CheckedPlan) -> float:
        """Of FID and CLIP the worse, in MLPerf's gates; see pareto.Change. Where the exact model's
        own pictures are the reference, its FID is 0, and whatever is further off loses by FID."""
        mine, whole = self.scores, exact.scores
        fid = mine["FID"] / max(whole["FID"], NO_FID) - 1
        return Change(fid, mine["clip"] / whole["clip"] - 1).loss

    def as_dict(self) -> dict[str, Any]:
        return {**self.plan.as_dict(), "cost_s": self.cost_s, **self.scores}


@dataclass(frozen=True)
class PlanCheck:
    """`reference` is the exact model: pictures are held against its own of their scheduler and
    guidance. `scenes` are what the captions tell, where they are of drawn scenes."""

    task: QualityTask
    folder: Path
    reference: Course
    scenes: list[Scene] | None

    def run(self, plan: CachePlan, cost_s: float, pipeline: Pipeline) -> CheckedPlan:
        """The exact plan of a scheduler and guidance goes before the others."""
        folder = self.folder / plan.slug
        requests = tuple(plan.apply_to(request) for request in self.task.requests)
        task = replace(self.task, requests=requests)
        whole = self.exact_of(plan)
        source = None if plan == whole else Folder(self.folder / whole.slug / "pictures", task)
        painted = Painted(pipeline, requests)
        evaluation = Evaluation(task, painted, folder, source, folder / "pictures")
        evaluation.run(1)
        found = dict(evaluation.findings())
        if self.scenes is not None:
            found[RIGHT] = self._judged(Folder(folder / "pictures", task))
        quick = QuickFrechet(self.task.load().reference)
        return CheckedPlan(plan, cost_s, found, quick(found["features"]))

    def exact_of(self, plan: CachePlan) -> CachePlan:
        whole = replace(
            self.reference, scheduler=plan.course.scheduler, guided_until=plan.course.guided_until
        )
        return exact(whole)

    def _judged(self, pictures: Folder) -> torch.Tensor:
        assert self.scenes is not None
        found = pictures.pictures(range(len(self.scenes)))
        pairs = zip(found, self.scenes, strict=True)
        return torch.tensor([float(not faults(np.asarray(image), s)) for image, s in pairs])
