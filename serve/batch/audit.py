"""`sdxl batch --verify`: does a job's output hold exactly what its input asks for?

It reads the input again, every ledger and every picture, and believes none of them alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sdxl.handover import in_threads
from sdxl.params import GenerationParams, InvalidParams
from sdxl.picture_files import BrokenPicture, opened
from serve.batch import ledger
from serve.batch.job import BatchJob
from serve.batch.ledger import Entry
from serve.batch.reading import input_digest
from serve.batch.rows import ShardPiece, shard_name
from serve.batch.store import Store
from serve.batch.tars import LOOSE, reader

THREADS = 8


@dataclass
class Audit:
    rows: int = 0
    images: int = 0
    dead_letters: int = 0
    problems: list[str] = field(default_factory=list)


def audit(store: Store, job: BatchJob) -> Audit:
    check_input(job)
    found, shards = Audit(), set[str]()
    for piece in job.shards():
        shards.add(shard_name(piece.shard))
        audit_shard(store, piece, found)
    found.problems += strangers(store, shards)
    return found


def check_input(job: BatchJob) -> None:
    paths = [Path(name) for name in job.inputs]
    for path in paths:
        if not path.is_file():
            raise InvalidParams("input", str(path), "needed the job's input, to know its ids")
    if input_digest(paths) != job.input_sha256:
        raise InvalidParams("input", str(paths[0].parent), "it has changed since the job began")


def audit_shard(store: Store, piece: ShardPiece, found: Audit) -> None:
    name, read = shard_name(piece.shard), reader(store)
    known = ledger.read(store, name)
    found.rows += len(piece.rows)
    for row in piece.rows:
        entry = known.pop(row.ordinal, None)
        if entry is None or entry.id != row.id:
            found.problems.append(f"{row.line}: {row.id!r} is neither a picture nor a dead letter")
        elif entry.error is not None:
            found.dead_letters += 1
        elif row.error is not None:
            found.problems.append(f"{row.line}: {row.id!r} has a picture, and should not")
        else:
            known[row.ordinal] = entry
    found.problems += [
        f"{entry.line}: {entry.id!r} is in the ledger, and not in the input"
        for ordinal, entry in known.items()
        if ordinal not in {row.ordinal for row in piece.rows}
    ]
    pictures = [known[row.ordinal] for row in piece.rows if row.ordinal in known]
    found.images += len(pictures)
    judged = in_threads(partial(judge, read), pictures, THREADS)
    found.problems += [problem for problem in judged if problem is not None]
    found.problems += extra_files(store, name, pictures)


def judge(read: Any, entry: Entry) -> str | None:
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
    """None where the ledger does not tell it."""
    params = GenerationParams.from_dict(entry.params)
    # Of a masked part that was worked at by itself the whole image comes back.
    is_part = params.mask_padding is not None
    return None if is_part or not (params.width and params.height) else params.result_size


def extra_files(store: Store, shard: str, pictures: list[Entry]) -> list[str]:
    expected = {entry.file for entry in pictures}
    there = [f"images/{shard}/{name}" for name in store.names(f"images/{shard}")]
    return [f"{name}: no row asked for it" for name in there if name not in expected]


def strangers(store: Store, shards: set[str]) -> Iterator[str]:
    """What lies beside the shards of this job."""
    for name in store.names("images"):
        if name.removesuffix(".tar") not in shards:
            yield f"images/{name}: no shard of this job"
    for name in store.ledgers():
        if name not in shards:
            yield f"ledger of {name}: no shard of this job"
    for name in store.names(LOOSE):
        if store.names(f"{LOOSE}/{name}"):
            yield f"{LOOSE}/{name}: not packed yet"
