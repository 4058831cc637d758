"""A folder of built plans and the manifest that says what they are and what they run on.

`manifest.json` is stated here and nowhere else. A plan is native code: nothing is given to a
runtime before its digest was found to be the one that was written. It knows no runtime.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.folders.export_folder import PRECISIONS
from engines.folders.json_fields import MALFORMED, check_fields, check_one_of
from engines.folders.listed_files import Listing
from engines.folders.model_folder import ModelFolder
from engines.folders.profiles import Profile
from engines.folders.spec_json import outdated, spec_as_dict, spec_from_dict
from engines.folders.targets import Capability, Target
from sdxl.specs import CUTS, Architecture, ModelSpec, brief

FORMAT = 3
FILE = "manifest.json"
SUFFIX = ".plan"
MAX_BATCH, MAX_DIM = 4096, 2**24


class EngineError(RuntimeError):
    """Engines that cannot be used: which folder, what was found, what is needed."""


@dataclass(frozen=True)
class EnginePlan:
    """One network's plan, and what it was made from."""

    file: str
    sha256: str
    bytes: int
    recipe: str
    """digest of everything that went into it: the same recipe is not built again"""
    spec: ModelSpec
    profiles: tuple[Profile, ...]
    seconds: float = 0.0
    peak_bytes: int = 0
    """memory that building it took"""

    def as_dict(self) -> dict[str, Any]:
        profiles = [
            {name: list(range_) for name, range_ in p.ranges.items()} for p in self.profiles
        ]
        facts = {
            name: getattr(self, name)
            for name in ("file", "sha256", "bytes", "recipe", "seconds", "peak_bytes")
        }
        return {**facts, "profiles": profiles, **spec_as_dict(self.spec)}

    @classmethod
    def from_dict(cls, name: str, value: Mapping[str, Any]) -> EnginePlan:
        rest = dict(value)
        spec = spec_from_dict(name, {side: rest.pop(side) for side in ("inputs", "outputs")})
        profiles = tuple(_profile(ranges) for ranges in rest.pop("profiles"))
        return check_fields(cls(spec=spec, profiles=profiles, **rest))


@dataclass(frozen=True)
class EngineFolder(ModelFolder):
    """What manifest.json says."""

    DESCRIPTION = FILE

    backend: str
    backend_version: str
    gpu: str
    capability: Capability
    max_batch: int
    is_sparse: bool
    plans: Mapping[str, EnginePlan]
    loras: tuple[Any, ...]
    export_parity: Mapping[str, Any]
    """what the check of the export found"""
    parity: Mapping[str, Any]
    """what running the plans on their GPU found, or why they were not run"""
    costs: Mapping[str, Any]
    """seconds of a call, by network and rows"""
    device_bytes: int
    """that the engines hold on the GPU"""

    @classmethod
    def read(cls, folder: Path) -> EngineFolder:
        """What the manifest says; sizes are checked, digests when a plan is about to be used."""
        path = folder / FILE
        try:
            value = _listing(folder).described(FORMAT, "sdxl build")
            engines = check_fields(cls(folder=folder, **_parsed(value)))
        except (OSError, *MALFORMED) as error:
            cause = f"{type(error).__name__}: {error}"
            raise EngineError(f"{path}: not a manifest ({cause}); build again") from error
        engines.check_specs()
        for plan in engines.plans.values():
            path = engines._listing.file(plan.file)
            engines._listing.check_size(path, path.stat().st_size, plan.bytes)
        return engines

    def as_dict(self) -> dict[str, Any]:
        rest = {name: value for name, value in vars(self).items() if name != "folder"}
        plans = {name: plan.as_dict() for name, plan in self.plans.items()}
        return {"format": FORMAT, **rest, "arch": asdict(self.arch), "plans": plans}

    @property
    def size(self) -> int:
        """bytes of all plans"""
        return sum(plan.bytes for plan in self.plans.values())

    @property
    def is_run(self) -> bool:
        """Whether the plans were held against the model; what failed is not published."""
        return bool(self.parity.get("findings"))

    @property
    def unchecked(self) -> str | None:
        """What nobody looked at; None where all of it was held against the model."""
        if not self.export_parity.get("findings"):
            return "its export was published without a check"
        return None if self.is_run else str(self.parity.get("note") or "not run")

    def mismatch(self, target: Target | None, version: str | None, digest: str) -> str | None:
        """Why these engines cannot run this model here; None when they can."""
        if self.model_digest != digest:
            return (
                f"built from the weights {self.model_digest[:12]} ({self.model}), "
                f"needed {digest[:12]}"
            )
        if target is None:
            return f"built for a {self.gpu}, found no NVIDIA GPU here"
        if not self.runs_on(target):
            return f"built for a {self.gpu}, found a {target.name} here"
        if version != self.backend_version:
            return (
                f"built with {self.backend} {self.backend_version}, found {version or 'none'} here"
            )
        return None

    def runs_on(self, target: Target) -> bool:
        """tensorrt's plans are for one kind of GPU, tensorrt-rtx's for an architecture."""
        if self.backend == "tensorrt-rtx":
            return self.capability == target.capability
        return self.gpu == target.name

    def plan_bytes(self, name: str) -> bytes:
        """A plan, proven to be the one that was built: only now may it be deserialised."""
        plan = self.plans[name]
        path = self._listing.file(plan.file)
        content = path.read_bytes()
        self._listing.check_size(path, len(content), plan.bytes)
        self._listing.check_digest(path, hashlib.sha256(content).hexdigest(), plan.sha256)
        return content

    def check_specs(self) -> None:
        """The plans have today's tensors: names, dims and types."""
        specs = {name: plan.spec for name, plan in self.plans.items()}
        if wrong := outdated(specs, self.arch, self.cut):
            raise EngineError(f"{self.folder / FILE}: {wrong}; export and build again")
        for name, plan in self.plans.items():
            dims = {tensor.name: len(tensor.dims) for tensor in plan.spec.inputs}
            if not plan.profiles or any(_dims(p) != dims for p in plan.profiles):
                raise EngineError(
                    f"{self.folder / FILE}: {name!r} has profiles of other tensors than its "
                    "inputs; build again"
                )

    @property
    def _listing(self) -> Listing:
        return _listing(self.folder)


def _listing(folder: Path) -> Listing:
    return Listing(folder / FILE, EngineError, "build again")


def _parsed(value: dict[str, Any]) -> dict[str, Any]:
    check_one_of("cut", value["cut"], CUTS)
    check_one_of("precision", value["precision"], PRECISIONS)
    check_one_of("max_batch", value["max_batch"], range(1, MAX_BATCH + 1))
    plans = {name: EnginePlan.from_dict(name, plan) for name, plan in value.pop("plans").items()}
    arch = Architecture.from_dict(value.pop("arch"))
    major, minor = map(int, value.pop("capability"))
    loras = tuple(value.pop("loras"))
    return {**value, "plans": plans, "arch": arch, "capability": (major, minor), "loras": loras}


def _profile(ranges: Mapping[str, Any]) -> Profile:
    return Profile({n: (_sides(a), _sides(b), _sides(c)) for n, (a, b, c) in ranges.items()})


def _dims(profile: Profile) -> dict[str, int | None]:
    """How many each tensor has; None where its three shapes differ in that."""
    counts = {name: set(map(len, shapes)) for name, shapes in profile.ranges.items()}
    return {name: min(found) if len(found) == 1 else None for name, found in counts.items()}


def _sides(dims: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(dim) is int and 0 <= dim < MAX_DIM for dim in dims):
        raise ValueError(f"a profile has the dims {brief(dims)}, needed numbers below {MAX_DIM}")
    return tuple(dims)
