"""Writes a job's results from its ledgers: manifest, dead letters, summary and contact sheet."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from sdxl.parameter import Attachment, table_of
from sdxl.params import PARAMETERS, GenerationParams
from sdxl.picture_files import BrokenPicture, file_of, opened
from serve.batch import ledger
from serve.batch.ledger import Entry, as_json
from serve.batch.progress import BatchProgress
from serve.batch.store import Store
from serve.batch.tars import reader
from serve.render.contact_sheet import Pixels, contact_sheet

MANIFEST, DEAD_LETTERS, SUMMARY = "manifest.parquet", "dead_letter.jsonl", "summary.json"
LEDGER_COLUMNS: dict[str, type] = {
    **dict.fromkeys(("id", "file", "sha256", "engine"), str),
    **dict.fromkeys(("ordinal", "size"), int),
    "seconds": float,
}
"""The manifest's columns besides a picture's parameters."""
GROUP_ROWS = 8192
"""Rows of a Parquet group. Parquet indexes each group: the index of smaller ones would be large."""
SHEET, SHEET_PICTURES = "contact_sheet.png", 24


def write_results(store: Store, progress: BatchProgress, facts: dict[str, Any]) -> dict[str, int]:
    counts, engines = write_lists(store)
    progress.rows = sum(counts.values())
    unreadable = write_sheet(store, counts["images"])
    if unreadable:
        progress.trouble = f"{unreadable[0]} cannot be read; --read-back makes such pictures again"
    summary = {**facts, **counts, "images_by_engine": engines, "run": progress.as_dict()}
    store.put(SUMMARY, json.dumps(summary, indent=2).encode() + b"\n")
    return counts


def write_lists(store: Store) -> tuple[dict[str, int], Counter[str]]:
    """Write manifest and dead letters, a few thousand rows at a time. Return their counts, and the
    number of pictures by engine."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    entries, dead, engines = ledger.read_all(store), 0, Counter[str]()
    schema = arrow.schema([(name, arrow_type(kind)) for name, kind in manifest_columns().items()])
    with tempfile.TemporaryDirectory() as folder:
        manifest, letters = Path(folder, MANIFEST), Path(folder, DEAD_LETTERS)
        with parquet.ParquetWriter(manifest, schema) as table, letters.open("wb") as file:
            while group := list(islice(entries, GROUP_ROWS)):
                pictures = [entry for entry in group if entry.error is None]
                rows = [manifest_row(entry, schema.names) for entry in pictures]
                table.write_table(arrow.Table.from_pylist(rows, schema=schema))
                engines.update(entry.engine for entry in pictures)
                file.writelines(letter(entry) for entry in group if entry.error is not None)
                dead += len(group) - len(pictures)
        store.put_file(MANIFEST, manifest)
        store.put_file(DEAD_LETTERS, letters)
    return {"images": engines.total(), "dead_letters": dead}, engines


def manifest_row(entry: Entry, names: Sequence[str]) -> dict[str, Any]:
    # A ledger that another program wrote may name LoRAs as text.
    params = GenerationParams.from_dict(entry.params).as_dict()
    facts = {**params, **vars(entry), "seconds": entry.timings.get("total_s")}
    return {name: facts.get(name) for name in names}


def letter(entry: Entry) -> bytes:
    facts = {"id": entry.id, "line": entry.line, "ordinal": entry.ordinal, "error": entry.error}
    return as_json(facts) + b"\n"


def manifest_columns() -> dict[str, Any]:
    return {**LEDGER_COLUMNS, **{each.name: each.stored_kind for each in PARAMETERS.values()}}


def arrow_type(kind: Any) -> Any:
    import pyarrow as arrow

    if items := get_args(kind):
        return arrow.list_(arrow_type(items[0]))
    if issubclass(kind, Attachment):
        return arrow.struct([(n, arrow_type(p.stored_kind)) for n, p in table_of(kind).items()])
    return {str: arrow.string(), int: arrow.int64(), float: arrow.float64()}[kind]


def write_sheet(store: Store, images: int) -> list[str]:
    """Draw a contact sheet of pictures from the whole job. Return the files that are unreadable."""
    unreadable: list[str] = []
    if not images:
        return unreadable
    read, shown = reader(store), min(images, SHEET_PICTURES)
    pictures: list[tuple[Pixels, str]] = []
    for number, entry in enumerate(e for e in ledger.read_all(store) if e.error is None):
        if number * shown // images > (number - 1) * shown // images:
            try:
                with opened(read(entry.file)) as image:
                    pictures.append((np.asarray(image.convert("RGB")), entry.params["prompt"]))
            except (BrokenPicture, OSError):
                unreadable.append(entry.file)
    if pictures:
        store.put(SHEET, file_of(Image.fromarray(contact_sheet(pictures))))
    return unreadable
