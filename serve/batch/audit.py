"""`sdxl batch --verify`: compares a job's input, ledgers and pictures with each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sdxl.handover import in_threads
from sdxl.params import GenerationParams, InvalidParams
from sdxl.picture_files import BrokenPicture, opened
from serve.batch import ledger
from serve.batch.job import BatchJob
from serve.batch.ledger import Entry
from serve.batch.reading import input_digest
from serve.batch.rows import ShardPiece, shard_name
from serve.batch.store import Store
from serve.batch.tars import LOOSE, THREADS, reader


@dataclass
class Audit:
    rows: int = 0
    images: int = 0
    dead_letters: int = 0
    problems: list[str] = field(default_factory=list)


def audit(store: Store, job: BatchJob) -> Audit:
    check_input(job)
    result, shards = Audit(), set[str]()
    for piece in job.shards():
        shards.add(shard_name(piece.shard))
        audit_shard(store, piece, result)
    result.problems += foreign_files(store, shards)
    return result


def check_input(job: BatchJob) -> None:
    paths = [Path(name) for name in job.inputs]
    for path in paths:
        if not path.is_file():
            raise InvalidParams("input", str(path), "must be the job's input, to check its ids")
    if input_digest(paths) != job.input_sha256:
        raise InvalidParams("input", str(paths[0].parent), "must not change after the job began")


def audit_shard(store: Store, piece: ShardPiece, result: Audit) -> None:
    name, read = shard_name(piece.shard), reader(store)
    known = ledger.read(store, name)
    result.rows += len(piece.rows)
    for row in piece.rows:
        entry = known.pop(row.ordinal, None)
        if entry is None or entry.id != row.id:
            result.problems.append(f"{row.line}: {row.id!r} is neither a picture nor a dead letter")
        elif entry.error is not None:
            result.dead_letters += 1
        elif row.error is not None:
            result.problems.append(f"{row.line}: {row.id!r} has a picture, but is not valid")
        else:
            known[row.ordinal] = entry
    pictures = [known.pop(row.ordinal) for row in piece.rows if row.ordinal in known]
    result.problems += [
        f"{entry.line}: {entry.id!r} is in the ledger, but not in the input"
        for entry in known.values()
    ]
    result.images += len(pictures)
    problems = in_threads(partial(problem_of, read), pictures, THREADS)
    result.problems += [problem for problem in problems if problem is not None]
    expected = {entry.file for entry in pictures}
    files = [f"images/{name}/{file}" for file in store.names(f"images/{name}")]
    result.problems += [f"{file}: no row asks for it" for file in files if file not in expected]


def problem_of(read: Callable[[str], bytes], entry: Entry) -> str | None:
    try:
        data = read(entry.file)
    except FileNotFoundError:
        return f"{entry.file}: the file is missing"
    except OSError as error:
        return f"{entry.file}: it cannot be read ({error.strerror or error})"
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        return f"{entry.file}: its sha256 is {digest[:16]}…, the ledger says {entry.sha256[:16]}…"
    try:
        with opened(data) as image:
            image.load()
            size = image.size
    except BrokenPicture as error:
        return f"{entry.file}: {error}"
    wanted = wanted_size(entry)
    if wanted is not None and size != wanted:
        return f"{entry.file}: {size[0]}x{size[1]}, wanted {wanted[0]}x{wanted[1]}"
    return None


def wanted_size(entry: Entry) -> tuple[int, int] | None:
    """Return a picture's expected size; None if the ledger does not determine it."""
    params = GenerationParams.from_dict(entry.params)
    # An edit of a masked part returns the whole image.
    is_part = params.mask_padding is not None
    return None if is_part or not (params.width and params.height) else params.result_size


def foreign_files(store: Store, shards: set[str]) -> Iterator[str]:
    """Report files that belong to no shard of this job, or are not packed."""
    for name in store.names("images"):
        if name.removesuffix(".tar") not in shards:
            yield f"images/{name}: no shard of this job"
    for name in store.ledgers():
        if name not in shards:
            yield f"ledger of {name}: no shard of this job"
    for name in store.names(LOOSE):
        if store.names(f"{LOOSE}/{name}"):
            yield f"{LOOSE}/{name}: not packed yet"
