"""Reads input files (txt, jsonl, csv, parquet) as a stream of raw records, in constant memory.

It checks the names of columns, not their values.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, get_args

from sdxl.parameter import NEEDED as NEEDED_TEXT
from sdxl.parameter import Attachment, Parameter
from sdxl.params import BY_NAME, PARAMETERS, PICTURED, InvalidParams, renamed
from sdxl.suggestions import did_you_mean
from serve.batch.row_pictures import CONTROL_COLUMNS, PICTURES

ID = "id"


def entries_of(each: Parameter, text: str) -> list[Any]:
    """Check the entries of a CSV field; return them as in JSON."""
    assert issubclass(each.item, Attachment)
    each.parse(text)
    return each.item.entries(text)


COLUMNS: Mapping[str, Callable[[str], Any]] = {
    **{
        each.column: partial(entries_of, each) if each.kind is Attachment else each.parse
        for each in PARAMETERS.values()
    },
    **dict.fromkeys((ID, *PICTURES), str),
    **CONTROL_COLUMNS,
}
"""The columns, each with a function that parses its text."""
WITH_PICTURES = (*PICTURES, *PICTURED, *CONTROL_COLUMNS)
"""Columns that may name a file."""
PARAMETERS_BY_COLUMN = {each.column: each for each in PARAMETERS.values()}
NEEDED: Mapping[type, str] = {str: "text", int: "whole numbers", float: "numbers"}
SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
PARQUET_ROWS = 1024
MAX_LINE = 2**20
"""Bytes; the longest prompt takes a quarter of them, an image as a data URL more."""


@dataclass(frozen=True)
class Record:
    """The content of a line, or the error that makes it unreadable."""

    line: str
    values: dict[str, Any]
    error: str | None = None
    folder: str = ""
    """the folder of its pictures, if it names any"""


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Return the files of paths and patterns; files of a pattern are sorted by name."""
    inputs = list[Path]()
    for pattern in patterns:
        is_file = Path(pattern).is_file()
        paths = [Path(pattern)] if is_file else sorted(map(Path, glob.glob(pattern)))
        files = [path for path in paths if path.is_file()]
        if not files:
            needed = "must be an existing file, or a pattern that matches one"
            raise InvalidParams("input", pattern, needed)
        inputs += files
    for path in inputs:
        if path.suffix.lower() not in SUFFIXES:
            raise InvalidParams(
                "input", str(path), f"must be a file that ends in {', '.join(SUFFIXES)}"
            )
        try:
            str(path.absolute()).encode()
        except UnicodeEncodeError as error:
            raise InvalidParams("input", str(path), "must be valid UTF-8") from error
    return inputs


def input_digest(paths: Sequence[Path]) -> str:
    """Digest the files' content in order; their paths do not count."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def read(paths: Sequence[Path]) -> Iterator[Record]:
    for path in paths:
        for record in READERS[path.suffix.lower()](path):
            has_files = any(name in record.values for name in WITH_PICTURES)
            yield replace(record, folder=str(path.absolute().parent)) if has_files else record


def count(paths: Sequence[Path]) -> int:
    """Count the records for a progress display, with as little parsing as possible."""
    records = 0
    for path in paths:
        match path.suffix.lower():
            case ".parquet":
                records += int(open_parquet(path).metadata.num_rows)
            case ".csv":
                records += sum(1 for _ in read_csv(path))
            case _:
                records += sum(1 for _ in read_lines(path))
    return records


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines that are not empty, with their places. Lines that are too long are cut."""
    with path.open("rb") as file:
        for number, line in enumerate(bounded_lines(file), 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            text = text if len(line) > MAX_LINE else text.strip()
            if text:
                yield f"{path.name}, line {number}", text


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE + 1):
        yield line
        while len(line) > MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE + 1)


def check_length(text: bytes) -> None:
    if len(text) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} bytes")


def read_txt(path: Path) -> Iterator[Record]:
    for line, text in read_lines(path):
        try:
            check_length(text)
            yield Record(line, {"prompt": text.decode()})
        except ValueError as error:
            cause = error.reason if isinstance(error, UnicodeDecodeError) else error
            yield Record(line, {}, f"prompt must be UTF-8 text ({cause})")


def read_jsonl(path: Path) -> Iterator[Record]:
    for line, text in read_lines(path):
        try:
            check_length(text)
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield Record(line, {}, f"must be a JSON object ({error})")
            continue
        if not isinstance(values, dict):
            yield Record(line, {}, f"must be a JSON object, found {type(values).__name__}")
            continue
        given = {k: v for k, v in values.items() if v is not None}
        try:
            yield Record(line, renamed(given, lambda each: each.column))
        except InvalidParams as error:
            yield Record(line, {}, str(error))


def read_csv(path: Path) -> Iterator[Record]:
    # Python's default limit for a field is too low for an image as a data URL.
    csv.field_size_limit(MAX_LINE)
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        reader = csv.DictReader(csv_lines(file), strict=True)
        try:
            reader.fieldnames = checked_columns(path, reader.fieldnames or [])
            for values in reader:
                yield csv_record(f"{path.name}, line {reader.line_num}", values)
        except csv.Error as error:
            raise InvalidParams("input", str(path), f"must be a CSV file ({error})") from error


def csv_lines(file: IO[str]) -> Iterator[str]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise csv.Error(f"a line is longer than {MAX_LINE} characters")
        yield line


def csv_record(line: str, values: dict[Any, Any]) -> Record:
    if None in values:
        return Record(line, {}, "must have as many fields as the header")
    parsed: dict[str, Any] = {}
    for name, text in values.items():
        # An empty prompt is valid; other empty fields count as missing.
        if text or (name == "prompt" and text is not None):
            try:
                parsed[name] = COLUMNS[name](text)
            except ValueError:
                each = PARAMETERS_BY_COLUMN.get(name)
                needed = each.needed if each else NEEDED_TEXT[CONTROL_COLUMNS[name]]
                return Record(line, parsed, f"{name} must be {needed}, got {text!r}")
    return Record(line, parsed)


def read_parquet(path: Path) -> Iterator[Record]:
    file = open_parquet(path)
    number = 0
    with parquet_errors(path):
        names = checked_columns(path, file.schema_arrow.names)
        for batch in file.iter_batches(PARQUET_ROWS):
            for values in batch.rename_columns(names).to_pylist():
                number += 1
                given = {k: v for k, v in values.items() if v is not None}
                yield Record(f"{path.name}, row {number}", given)


def open_parquet(path: Path) -> Any:
    import pyarrow.parquet as parquet

    with parquet_errors(path):
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
    names = checked_columns(path, schema.names)
    for name, column in zip(names, schema, strict=True):
        check_kind(path, name, column.type)
    return file


def check_kind(path: Path, name: str, kind: Any) -> None:
    """Refuse a column of a wrong type: every row would be an error."""
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    each = PARAMETERS_BY_COLUMN.get(name)
    needed = each.stored_kind if each else CONTROL_COLUMNS.get(name, str)
    if not (holds(kind, needed) or types.is_null(kind)):
        shown = f"{path}: {name} of {kind}"
        raise InvalidParams("input", shown, f"must be a column of {values_of(needed)}")


def holds(kind: Any, needed: Any) -> bool:
    import pyarrow.types as types

    if items := get_args(needed):
        return is_list(kind) and holds(kind.value_type, items[0])
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if needed is str:
        return is_text
    if issubclass(needed, Attachment):
        return is_text or types.is_struct(kind)
    return types.is_integer(kind) or (needed is float and types.is_floating(kind))


def values_of(needed: Any) -> str:
    if items := get_args(needed):
        return f"lists of {values_of(items[0])}"
    return needed.form() if issubclass(needed, Attachment) else NEEDED[needed]


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    # Text that is not UTF-8 raises Python's error, not pyarrow's.
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise InvalidParams("input", str(path), f"must be a Parquet file ({line})") from error


def checked_columns(path: Path, names: Sequence[str]) -> list[str]:
    """Return the columns under our names, or refuse unknown and repeated ones."""
    columns = [BY_NAME[name].column if name in BY_NAME else name for name in names]
    for name in columns:
        if name not in COLUMNS:
            needed = f"must be one of the columns {', '.join(COLUMNS)}"
            hint = did_you_mean(name, COLUMNS)
            raise InvalidParams("input", f"{path}: {name}", needed, hint)
        if columns.count(name) > 1:
            raise InvalidParams("input", f"{path}: {name}", "must have each column once")
    if "prompt" not in columns:
        raise InvalidParams("input", str(path), "must have a column named prompt")
    return columns


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".csv": read_csv, ".parquet": read_parquet}
