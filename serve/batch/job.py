"""The identity of a job and of its engine, stored as `job.json` beside the pictures.

A run that differs is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

import engines
from sdxl.catalogue import AdapterFile, Catalogue
from sdxl.params import GenerationParams, InvalidParams, Sizes
from sdxl.presets import QUALITIES, Preset
from sdxl.provenance import OFF, PROVENANCES
from serve.batch.batch_spec import RANGES, BatchFailed, BatchSpec, check_ranges
from serve.batch.intake import Intake
from serve.batch.reading import SUFFIXES, read
from serve.batch.rows import ShardPiece
from serve.batch.store import Store, open_store, token
from serve.orders import ModelCard

FILE = "job.json"
KINDS = {"lora": "LoRA", "embedding": "embedding", "control": "ControlNet", "image": "IP-Adapter"}
KEPT = ("threads", "engine", "presets", "files")
"""Fields that a resumed job takes from its first run."""
NOT_IDENTITY = ("inputs", "rows", "threads", "origin", "presets", "maps", "files")
"""Fields that may differ: inputs may move, a revision may be renamed, `files` are compared when a
row names them, the rest follows from others or is kept."""
MAY_DIFFER = ("backend", "device", "gpu", "version")
"""Facts that may differ between workers with --mixed-gpus: pictures then differ in rounding."""
LABEL = ("backend", "precision", "device", "gpu", "version", "service")


class NoJob(RuntimeError):
    """The place contains no job, or a damaged one."""


@dataclass(frozen=True)
class BatchJob:
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    inputs: tuple[str, ...]
    input_sha256: str
    rows: int
    """estimated number of pictures"""
    parameters: dict[str, Any]
    """parameters from flags, with pictures as digests; a row's columns override them"""
    n: int
    format: str
    is_tarred: bool
    shard_size: int
    deterministic: bool
    model: str
    model_sha256: str
    sizes: Sizes | None
    """the model's image sides; None with --through"""
    engine: dict[str, Any]
    """the engine of the first worker; empty before"""
    threads: int
    """CPU threads of each worker, which change the rounding"""
    presets: dict[str, Preset]
    """presets for `quality` in the input"""
    provenance: str = OFF
    """provenance of the pictures; empty with --through"""
    origin: str = ""
    """`org/name@commit` of a model from the hub"""
    usual_interval: None = None
    """unused, but jobs of version 0.1.0 have it"""
    maps: dict[str, str] = field(default_factory=dict)
    """files of the pictures in `parameters` by digest"""
    files: dict[str, str] = field(default_factory=dict)
    """digests of the refiner, and of the LoRAs, embeddings, ControlNets and IP-Adapters that rows
    have named so far; empty with --through"""

    def intake(self) -> Intake:
        same = (self.parameters, self.n, self.model, self.sizes, self.format, self.presets)
        return Intake(*same, maps=self.maps)

    def shards(self) -> Iterator[ShardPiece]:
        return self.intake().shards(read([Path(name) for name in self.inputs]), self.shard_size)

    def check(self) -> None:
        """Check the values of a job that was read; its types are already checked."""
        GenerationParams.from_dict(self.parameters)
        for name in self.inputs:
            if "\0" in name or Path(name).suffix.lower() not in SUFFIXES:
                raise InvalidParams(
                    "inputs", name, f"must be files that end in {', '.join(SUFFIXES)}"
                )
        if self.provenance not in ("", *PROVENANCES):
            raise InvalidParams.unknown("provenance", self.provenance, PROVENANCES)
        if set(self.presets) != set(QUALITIES):
            raise InvalidParams("presets", [*self.presets], f"must be {', '.join(QUALITIES)}")
        check_ranges(self, RANGES)

    def with_files(self, files: Mapping[str, str]) -> BatchJob:
        """Add the files that rows name, or raise BatchFailed if one has changed."""
        for name, digest in files.items():
            if self.files.get(name, digest) != digest:
                raise BatchFailed(
                    f"{name} has changed since the job began with it; put the old file back, or "
                    "use another --out"
                )
        return replace(self, files={**self.files, **files})

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False).encode() + b"\n"

    def check_same(self, stored: BatchJob) -> None:
        """Refuse to resume a stored job that differs. The engine is empty until a worker starts."""
        first = json.loads(stored.as_json())
        for name, value in json.loads(self.as_json()).items():
            is_unknown = name == "engine" and not value
            if name not in NOT_IDENTITY and not is_unknown and value != first[name]:
                needed = (
                    f"must be {brief(first[name])} to resume the job there, or use another --out"
                )
                raise InvalidParams(name, brief(value), needed)


def engine_of(card: ModelCard) -> dict[str, Any]:
    return {name: value for name, value in card.engines.items() if name != "passed_over"}


def engine_label(engine: dict[str, Any]) -> str:
    return " ".join(str(engine[name]) for name in LABEL if name in engine)


def check_engine(engine: dict[str, Any], first: dict[str, Any], is_mixed: bool) -> None:
    """Raise BatchFailed if a worker with this engine may not join a job that began with `first`."""
    bad = {name for name in {*engine, *first} if engine.get(name) != first.get(name)}
    bad -= {*MAY_DIFFER} if is_mixed else set()
    if not bad:
        return
    message = f"engine {engine} cannot join: the job began with {first}"
    if bad <= {*MAY_DIFFER}:
        raise BatchFailed(
            f"{message}, and its pictures would differ in rounding; --mixed-gpus allows both"
        )
    needed = ", ".join(sorted(bad))
    raise BatchFailed(f"{message}, and its pictures would differ: expected the same {needed}")


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


def open_job(place: str) -> tuple[Store, BatchJob]:
    store = open_store(place, token())
    job = load_job(store)
    if job is None:
        raise NoJob(f"{place}: not the output folder of a job; {FILE} is not there")
    return store, job


# -- the files that rows name ----------------------------------------------------------------


def catalogue_for(order: BatchSpec) -> Catalogue:
    from sdxl.checkpoint import find

    folder = find(order.model).folder
    folders = order.lora_folder, order.control_folder, order.image_folder
    return engines.catalogue_of(order.model, folder, *folders)


def refiner_file(order: BatchSpec) -> dict[str, str]:
    """Return the digest of the refiner that the job loads; empty without one."""
    from engines.folders.digests import model_digest
    from sdxl.checkpoint import find_refiner

    name = order.parameters.get("refiner")
    if name is None:
        return {}
    checkpoint = find_refiner(name)
    return {f"refiner {checkpoint.name!r}": model_digest(checkpoint)}


def files_in(piece: ShardPiece, catalogue: Catalogue) -> dict[str, str]:
    files = (each for row in piece.rows if row.params for each in _named_in(row.params, catalogue))
    return {f"{KINDS[each.kind]} {each.name!r}": each.sha256 for each in files}


def _named_in(params: GenerationParams, catalogue: Catalogue) -> Iterator[AdapterFile]:
    """Yield the files that exist; a worker refuses rows that name others."""
    texts = {"prompt": params.prompt, "negative_prompt": params.negative_prompt or ""}
    with suppress(InvalidParams):
        for lora in params.loras or ():
            yield catalogue.find("lora", lora.name)
        for control in params.controls or ():
            yield catalogue.find("control", control.name)
        for prompt in params.image_prompts or ():
            yield catalogue.find("image", prompt.name)
        yield from catalogue.embeddings_in(texts)
