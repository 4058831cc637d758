"""A folder of built plans, and a manifest that describes the plans and their GPU.

Only this module knows the format of `manifest.json`. A plan is native code, so its digest is
checked before a runtime gets it. It knows no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.folders.manifest import (
    BANK,
    SIDES,
    ModelFolder,
    check_fields,
    check_one_of,
    spec_as_dict,
    spec_from_dict,
)
from engines.folders.profiles import Profile
from engines.folders.targets import Capability, Target
from sdxl.specs import ModelSpec, brief

FILE = "manifest.json"
SUFFIX = ".plan"
MAX_BATCH, MAX_DIM = 4096, 2**24


class EngineError(RuntimeError):
    """Engines cannot be used. The message names the folder, what is wrong and what is needed."""


@dataclass(frozen=True)
class EnginePlan:
    """One network's plan and its origin."""

    file: str
    sha256: str
    bytes: int
    recipe: str
    """digest of everything that the plan depends on; the same recipe is not built again"""
    spec: ModelSpec
    profiles: tuple[Profile, ...]
    seconds: float = 0.0
    peak_bytes: int = 0
    """memory that the build took"""

    def as_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "spec"}
        profiles = [{name: list(r) for name, r in p.ranges.items()} for p in self.profiles]
        return {**facts, "profiles": profiles, **spec_as_dict(self.spec)}

    @classmethod
    def from_dict(cls, name: str, value: Mapping[str, Any]) -> EnginePlan:
        rest = dict(value)
        spec = spec_from_dict(name, {side: rest.pop(side, ()) for side in (*SIDES, BANK)})
        profiles = tuple(_profile(ranges) for ranges in rest.pop("profiles"))
        return check_fields(cls(spec=spec, profiles=profiles, **rest))


@dataclass(frozen=True)
class EngineFolder(ModelFolder):
    """Built plans, as manifest.json describes them."""

    FILE, FORMAT, COMMAND = FILE, 3, "sdxl build"
    KIND, REMEDY, ERROR = "a manifest", "build again", EngineError

    backend: str
    backend_version: str
    gpu: str
    capability: Capability
    max_batch: int
    is_sparse: bool
    plans: Mapping[str, EnginePlan]
    loras: tuple[Any, ...]
    export_parity: Mapping[str, Any]
    """findings of the export's check"""
    parity: Mapping[str, Any]
    """findings of running the plans on their GPU, or why they were not run"""
    costs: Mapping[str, Any]
    """seconds of a call, by network and rows"""
    device_bytes: int
    """the engines' memory on the GPU"""

    @classmethod
    def read(cls, folder: Path) -> EngineFolder:
        """Read a manifest; check tensors, profiles and the plans' sizes. `plan_bytes` checks
        digests."""
        engines = super().read(folder)
        engines.check_specs("export and build again")
        for name, plan in engines.plans.items():
            dims = {tensor.name: len(tensor.dims) for tensor in plan.spec.all_inputs}
            if not plan.profiles or any(_dims(p) != dims for p in plan.profiles):
                raise EngineError(
                    f"{folder / FILE}: {name!r} has profiles of other tensors than its inputs; "
                    "build again"
                )
            path = engines.file(plan.file)
            engines.check_size(path, path.stat().st_size, plan.bytes)
        return engines

    @classmethod
    def parse(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_one_of("max_batch", value["max_batch"], range(1, MAX_BATCH + 1))
        plans = {n: EnginePlan.from_dict(n, plan) for n, plan in value.pop("plans").items()}
        major, minor = map(int, value.pop("capability"))
        loras = tuple(value.pop("loras"))
        return {**value, "plans": plans, "capability": (major, minor), "loras": loras}

    def as_dict(self) -> dict[str, Any]:
        plans = {name: plan.as_dict() for name, plan in self.plans.items()}
        return {**super().as_dict(), "plans": plans}

    @property
    def specs(self) -> dict[str, ModelSpec]:
        return {name: plan.spec for name, plan in self.plans.items()}

    @property
    def size(self) -> int:
        """The bytes of all plans."""
        return sum(plan.bytes for plan in self.plans.values())

    @property
    def is_run(self) -> bool:
        """Whether the plans were compared with the model. Plans that failed are not published."""
        return bool(self.parity.get("findings"))

    @property
    def unchecked(self) -> str | None:
        """The missing check; None if export and plans were both compared with the model."""
        if not self.export_parity.get("findings"):
            return "its export was published without a check"
        return None if self.is_run else str(self.parity.get("note") or "not run")

    def mismatch(self, target: Target, version: str) -> str | None:
        """Return why these engines cannot run here; None if they can."""
        if not self.runs_on(target):
            return f"built for a {self.gpu}, found a {target.name} here"
        if version != self.backend_version:
            return f"built with {self.backend} {self.backend_version}, found {version} here"
        return None

    def runs_on(self, target: Target) -> bool:
        """Return whether the plans run on a GPU. tensorrt's plans run on one kind of GPU,
        tensorrt-rtx's on an architecture."""
        if self.backend == "tensorrt-rtx":
            return self.capability == target.capability
        return self.gpu == target.name

    def plan_bytes(self, name: str) -> bytes:
        """Read a plan and check its digest, which must precede deserialising."""
        return self.content(self.plans[name].file, self.plans[name].sha256)


def _profile(ranges: Mapping[str, Any]) -> Profile:
    return Profile({n: (_sides(a), _sides(b), _sides(c)) for n, (a, b, c) in ranges.items()})


def _dims(profile: Profile) -> dict[str, int | None]:
    """Return the number of dims of each tensor; None if the numbers of its three shapes differ."""
    counts = {name: set(map(len, shapes)) for name, shapes in profile.ranges.items()}
    return {name: min(count) if len(count) == 1 else None for name, count in counts.items()}


def _sides(dims: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(dim) is int and 0 <= dim < MAX_DIM for dim in dims):
        raise ValueError(f"a profile has the dims {brief(dims)}, expected numbers below {MAX_DIM}")
    return tuple(dims)
