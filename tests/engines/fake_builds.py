"""Builds without TensorRT: the worker's double writes plans that the runtime's double can load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.folders.engine_folder import EngineFolder, EnginePlan
from engines.folders.export_folder import ExportFolder
from engines.folders.targets import TARGETS
from engines.parity.proof import Proof
from engines.trt.build import BuildSpec
from engines.trt.flavours import TENSORRT_RTX
from engines.trt.plan_worker import PlanJob
from tests.engines.trt_double import plan_bytes

L40S = TARGETS["l40s"]


@dataclass
class FakeWorker:
    """Replaces run_worker. The build of the network `fails_at` raises `fault`."""

    built: list[str] = field(default_factory=list)
    fails_at: str | None = None
    fault: BaseException = field(default_factory=lambda: RuntimeError("killed"))

    def __call__(
        self, job: PlanJob, log: Path, on_share: Callable[[float], None]
    ) -> dict[str, Any]:
        if job.name == self.fails_at:
            raise self.fault
        self.built.append(job.name)
        on_share(0.5)
        entry = {"file": "", "sha256": "", "bytes": 0, "recipe": "", "profiles": job.profiles}
        plan = EnginePlan.from_dict(job.name, {**entry, **job.spec})
        Path(job.plan).write_bytes(plan_bytes(plan.spec, list(plan.profiles)))
        return {"seconds": 1.0, "peak_bytes": 2**30}


def proven(engines: EngineFolder) -> Proof:
    """Return a proof as if the plans had been run on their GPU."""
    finding = {"what": "4 pictures, PSNR in dB", "measured": 41.5, "required": 40, "is_least": True}
    return Proof({"findings": [finding], "note": ""}, {"unet_deep": {"2": 0.5}}, 2**30)


def order_of(export: ExportFolder, out: Path, **changes: Any) -> BuildSpec:
    facts = {"target": L40S, "flavour": TENSORRT_RTX, "max_batch": 4, "is_sparse": False}
    return BuildSpec(export=export, out=out, **{**facts, **changes})
