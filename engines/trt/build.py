"""Builds a folder of TensorRT plans from an export folder.

Workers build the plans into a folder beside the target. It is renamed when all plans are built. A
killed build can be continued, and a plan whose recipe did not change is not built again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engines.control_graphs import variant_graph
from engines.folders.engine_folder import FILE, SUFFIX, EngineError, EngineFolder, EnginePlan
from engines.folders.export_folder import ExportFolder, Graph
from engines.folders.manifest import MALFORMED, spec_as_dict
from engines.folders.profiles import profiles
from engines.folders.publishing import (
    disk_errors,
    link_or_copy,
    locked,
    publish,
    refuse_other_folder,
    sync_folder,
)
from engines.folders.targets import Target
from engines.parity.proof import Proof, not_run
from engines.trt.flavours import Flavour
from engines.trt.plan_worker import PlanJob, run_worker
from sdxl.digests import sha256_of
from sdxl.files import OutputError, write_atomic
from sdxl.places import home
from sdxl.specs import ModelSpec, plain_name, with_images, with_loras, with_residuals

RECIPE = 1
"""Increase this number when a change to the code makes plans worth building again."""

Prove = Callable[[EngineFolder], Proof]
"""runs built engines, or returns why they cannot run here"""
OnProgress = Callable[[str, float], None]
"""gets the network and its plan's progress from 0 to 1"""


@dataclass(frozen=True)
class BuildSpec:
    """The plans of one build, and their folder."""

    export: ExportFolder
    target: Target
    flavour: Flavour
    max_batch: int
    is_sparse: bool
    out: Path
    has_loras: bool = False
    """Build plans for requests' LoRAs too."""
    has_controlnets: bool = False
    """Build plans for requests' ControlNets too."""
    has_image_prompts: bool = False
    """Build plans for requests' image prompts too."""

    @cached_property
    def specs(self) -> dict[str, ModelSpec]:
        """The networks to build."""
        export = self.export
        added = with_loras(export.specs) if self.has_loras else {}
        if self.has_controlnets:
            added |= with_residuals(export.specs | added, export.arch)
        if self.has_image_prompts:
            added |= with_images(export.specs | added, export.arch)
        return export.specs | {
            name: variant_graph(export.graph_bytes(plain_name(name)), spec)[1]
            for name, spec in added.items()
        }

    def graph(self, name: str) -> Graph:
        """Return the graph from which a plan is made."""
        return self.export.graphs[plain_name(name)]

    def job(self, name: str, plan: Path) -> PlanJob:
        graph, spec = self.graph(name), self.specs[name]
        has_exact = self.flavour.times_kernels
        ranges = profiles(spec, self.export.arch, self.max_batch, has_exact=has_exact)
        is_listed = self.target.sm in self.flavour.architectures
        return PlanJob(
            name=name,
            onnx=str(self.export.folder / graph.file),
            plan=str(plan),
            module=self.flavour.module,
            architecture=self.target.sm if is_listed else None,
            profiles=[dict(profile.ranges) for profile in ranges],
            spec=spec_as_dict(spec),
            timing_cache=str(self._timing_cache) if self.flavour.times_kernels else None,
            is_sparse=self.is_sparse,
        )

    def recipe(self, name: str) -> str:
        """Return a digest of everything that the plan depends on, but not of its folder."""
        graph, job = self.graph(name), self.job(name, Path())
        facts = {
            "recipe": RECIPE,
            "graph": graph.sha256,
            "data": {file: self.export.data[file].sha256 for file in graph.data},
            "gpu": self.target.name if self.flavour.times_kernels else self.target.sm,
            "version": self.flavour.version,
            **{key: getattr(job, key) for key in ("module", "profiles", "spec", "is_sparse")},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def manifest(self, plans: dict[str, EnginePlan], proof: Proof) -> EngineFolder:
        return EngineFolder(
            folder=self.out,
            model=self.export.model,
            model_digest=self.export.model_digest,
            precision=self.export.precision,
            cut=self.export.cut,
            arch=self.export.arch,
            backend=self.flavour.name,
            backend_version=self.flavour.version,
            gpu=self.target.name,
            capability=self.target.capability,
            max_batch=self.max_batch,
            is_sparse=self.is_sparse,
            plans=plans,
            loras=self.export.loras,
            export_parity=self.export.parity,
            **vars(proof),
        )

    @property
    def _timing_cache(self) -> Path:
        return home() / "timing" / f"{self.flavour.name}-{self.flavour.version}-{self.target.key}"


def build(
    order: BuildSpec,
    on_progress: OnProgress = lambda name, share: None,
    prove: Prove = lambda engines: not_run("not asked for"),
) -> EngineFolder:
    """Build the engines that are missing at `order.out`, run all with `prove`, which raises if they
    differ from the model, and publish them."""
    with locked(order.out, waits=False):
        published = _read_published(order.out)
        refuse_other_folder(order.out, FILE, "a folder of engines")
        reusable = {} if published is None else _reusable_plans(order, published)
        if published is not None and _is_complete(order, reusable, published):
            return published if published.is_run else _run_again(published, prove)
        making = order.out.with_name(f".{order.out.name}.making")
        with disk_errors(order.out, "a folder that can be written"):
            making.mkdir(exist_ok=True)
            plans = {}
            for name in order.specs:
                if plan := reusable.get(name):
                    (making / plan.file).unlink(missing_ok=True)
                    link_or_copy(order.out / plan.file, making / plan.file)
                plans[name] = (
                    plan
                    or _read_finished(order, name, making)
                    or _build_plan(order, name, making, on_progress)
                )
            order.manifest(plans, not_run("being built")).write(making)
            order.manifest(plans, prove(EngineFolder.read(making))).write(making)
            sync_folder(making)
            # The notes, which tell the next build which plans are finished, are removed last.
            finished = {FILE, *(plan.file for plan in plans.values())}
            for path in making.iterdir():
                if path.name not in finished:
                    path.unlink()
        publish(making, order.out)
        return EngineFolder.read(order.out)


def _is_complete(
    order: BuildSpec, reusable: dict[str, EnginePlan], published: EngineFolder
) -> bool:
    """Return whether the order's engines are published, even if their proof failed."""
    proof = Proof(published.parity, published.costs, published.device_bytes)
    has_all = set(reusable) == set(order.specs)
    return has_all and order.manifest(reusable, proof).as_dict() == published.as_dict()


def _run_again(engines: EngineFolder, prove: Prove) -> EngineFolder:
    """Run plans that were built without their GPU."""
    proven = replace(engines, **vars(prove(engines)))
    if proven != engines:
        proven.write()
    return proven


def _read_published(out: Path) -> EngineFolder | None:
    """Read the published engines; None if they are missing or damaged, and must be built again."""
    try:
        return EngineFolder.read(out)
    except EngineError:
        return None


def _reusable_plans(order: BuildSpec, published: EngineFolder) -> dict[str, EnginePlan]:
    """Return the published plans that are undamaged and have the order's recipe."""
    return {
        name: plan
        for name, plan in published.plans.items()
        if name in order.specs
        and plan.recipe == order.recipe(name)
        and sha256_of(published.folder / plan.file) == plan.sha256
    }


def _read_finished(order: BuildSpec, name: str, making: Path) -> EnginePlan | None:
    """Return the plan if an earlier, stopped build finished it."""
    try:
        plan = EnginePlan.from_dict(
            name, json.loads(_note(making, name).read_text(encoding="utf-8"))
        )
        is_same = plan.recipe == order.recipe(name)
        return plan if is_same and sha256_of(making / plan.file) == plan.sha256 else None
    except (OSError, *MALFORMED):
        return None


def _build_plan(order: BuildSpec, name: str, making: Path, on_progress: OnProgress) -> EnginePlan:
    _check_space(order, name)
    path, unfinished = making / f"{name}{SUFFIX}", making / f"{name}.unfinished"
    job = order.job(name, unfinished)
    if job.timing_cache:
        Path(job.timing_cache).parent.mkdir(parents=True, exist_ok=True)
    log = making / f"{name}.log"
    # load_checked is needed because TensorRT opens graph and weights by name.
    cost = order.export.load_checked(
        lambda: run_worker(job, log, lambda share: on_progress(name, share))
    )
    os.replace(unfinished, path)
    plan = EnginePlan.from_dict(
        name,
        {
            "file": path.name,
            "sha256": sha256_of(path),
            "bytes": path.stat().st_size,
            "recipe": order.recipe(name),
            "profiles": job.profiles,
            **job.spec,
            **cost,
        },
    )
    write_atomic(_note(making, name), json.dumps(plan.as_dict()).encode())
    on_progress(name, 1.0)
    return plan


def _check_space(order: BuildSpec, name: str) -> None:
    """Refuse at once a build that would fill the disk after minutes."""
    needed = sum(order.export.data[file].bytes for file in order.graph(name).data)
    free = shutil.disk_usage(order.out.parent).free
    if free < needed:
        message = f"{free / 1e6:.1f} MB free, {name} takes at least {needed / 1e6:.1f} MB"
        raise OutputError(order.out, OSError(errno.ENOSPC, message), "on a disk with enough space")


def _note(making: Path, name: str) -> Path:
    return making / f"{name}.json"
