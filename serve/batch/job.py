"""What makes a job this job and no other, as `job.json` beside its pictures.

A start with anything else is refused, and hears what differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from sdxl.parameter import USUAL_INTERVAL
from sdxl.params import GenerationParams, InvalidParams, Sizes
from sdxl.presets import EXACT, QUALITIES, Preset
from sdxl.provenance import OFF, PROVENANCES
from serve.batch.batch_spec import RANGES
from serve.batch.intake import Intake
from serve.batch.reading import SUFFIXES, read
from serve.batch.rows import ShardPiece
from serve.batch.store import Store

FILE = "job.json"
KEPT = ("threads", "engine", "presets", "usual_interval")
"""as the job began with them"""
NOT_IDENTITY = ("inputs", "rows", "threads", "origin", "presets", "usual_interval")
"""Where the input lies may change, and what a revision is called; the others follow from what may
not, or are kept."""
FORMERLY = {"low": Preset(10, 1), "medium": Preset(20, 2), "high": Preset(30, 2), **EXACT}
"""Of a job that began when every model had the same."""


class NoJob(RuntimeError):
    """A place that holds no job, or none that can be read."""


@dataclass(frozen=True)
class BatchJob:
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    inputs: tuple[str, ...]
    input_sha256: str
    rows: int
    """pictures, as far as can be told without reading every line"""
    parameters: dict[str, Any]
    """those given as flags; a row's own go before them"""
    n: int
    format: str
    is_tarred: bool
    shard_size: int
    deterministic: bool
    model: str
    model_sha256: str
    sizes: dict[str, int] | None
    """the image sides that the model takes; None where a service knows"""
    engine: dict[str, Any]
    """what computes the pictures; filled by the first worker"""
    threads: int
    """of each worker on a CPU: another number would round differently"""
    provenance: str = OFF
    """what its pictures say of their origin; a service says what it is set to"""
    origin: str = ""
    """of a model of the hub: `org/name@commit`"""
    presets: dict[str, Preset] = field(default_factory=lambda: dict(FORMERLY))
    """what `quality` means in its input"""
    usual_interval: int | None = USUAL_INTERVAL
    """of deep steps, where a row says nothing of caches; None: by its steps. A job that began
    before that was so does not say."""

    def intake(self) -> Intake:
        sizes = Sizes(**self.sizes) if self.sizes else None
        return Intake(
            self.parameters,
            self.n,
            self.model,
            sizes,
            self.format,
            self.presets,
            usual_interval=self.usual_interval,
        )

    def shards(self) -> Iterator[ShardPiece]:
        return self.intake().shards(read([Path(name) for name in self.inputs]), self.shard_size)

    def check(self) -> None:
        """What its types do not say, of a job that was read."""
        GenerationParams.from_dict(self.parameters)
        for name in self.inputs:
            if "\0" in name or Path(name).suffix.lower() not in SUFFIXES:
                raise InvalidParams("inputs", name, f"needed files in {', '.join(SUFFIXES)}")
        if self.provenance not in ("", *PROVENANCES):
            needed = f"needed one of {', '.join(PROVENANCES)}"
            raise InvalidParams("provenance", self.provenance, needed)
        if self.sizes:
            Sizes(**self.sizes)
        if set(self.presets) != set(QUALITIES):
            raise InvalidParams("presets", [*self.presets], f"needed {', '.join(QUALITIES)}")
        for name, (low, high) in RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise InvalidParams(name, getattr(self, name), f"needed {low} to {high}")

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False).encode() + b"\n"

    def check_same(self, stored: BatchJob) -> None:
        """That a stored job is this one; what only a worker can tell may still be empty."""
        mine, theirs = asdict(self), json.loads(stored.as_json())
        for name, value in json.loads(self.as_json()).items():
            is_unknown = name == "engine" and not mine[name]
            if name not in NOT_IDENTITY and not is_unknown and value != theirs[name]:
                raise InvalidParams(
                    name,
                    brief(value),
                    f"the job there has {brief(theirs[name])}: needed the "
                    "same to go on with it, or another --out",
                )


def brief(value: object) -> object:
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= 80 else text[:80] + "…"


def load_job(store: Store) -> BatchJob | None:
    try:
        data = store.get(FILE)
    except FileNotFoundError:
        return None
    try:
        job = TypeAdapter(BatchJob).validate_json(data, strict=True)
        job.check()
    except (InvalidParams, TypeError, ValueError) as error:
        cause = " ".join(str(error).split())[:300]
        raise NoJob(f"{FILE}: not what sdxl batch writes ({cause})") from error
    return job


def need_job(store: Store, place: str) -> BatchJob:
    job = load_job(store)
    if job is None:
        raise NoJob(f"{place}: needed the output folder of a job; {FILE} is not there")
    return job
