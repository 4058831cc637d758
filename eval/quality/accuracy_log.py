"""LoadGen's mlperf_log_accuracy.json, as `sdxl bench mlperf --accuracy` writes it: raw pixels in
hex, one sample a line. A log of 5000 pictures has 30 GB, so lines are located once and read one by
one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from eval.quality.sources import refuse_count, stamp_of
from eval.quality.task import QualityTask
from sdxl.images import Pixels
from sdxl.params import InvalidParams

FILE = "mlperf_log_accuracy.json"


class AccuracyLog:
    """The pictures of a log, as a source."""

    is_stored = True

    def __init__(self, path: Path, task: QualityTask) -> None:
        self.path, self.side = path, task.side
        try:
            self.places = _places(path)
        except (OSError, ValueError, KeyError) as error:
            needed = f"must be LoadGen's {FILE}"
            raise InvalidParams("accuracy_log", str(path), f"{needed} ({error})") from error
        count = len(task.captions)
        missing = sum(i not in self.places for i in range(count))
        if missing:
            refuse_count("accuracy_log", path, count - missing, count)
        self.pictures([0])

    def describe(self) -> dict[str, Any]:
        return {"accuracy_log": str(self.path.resolve()), "stamp": stamp_of([self.path])}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        with self.path.open("rb") as file:
            return [self._picture(_pixels(file, self.places[index])) for index in indices]

    def _picture(self, data: bytes) -> Pixels:
        side = self.side
        if len(data) != 3 * side**2:
            needed = f"must hold pictures of {3 * side**2} bytes, {side}×{side}"
            raise InvalidParams("accuracy_log", f"a picture of {len(data)} bytes", needed)
        return np.frombuffer(data, np.uint8).reshape(side, side, 3).copy()


def read_samples(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the index and bytes of each sample. An index may occur more than once."""
    with path.open("rb") as file:
        for line in file:
            if b"qsl_idx" in line:
                entry = _entry(line)
                yield entry["qsl_idx"], bytes.fromhex(entry["data"])


def read_pictures(path: Path, indices: Set[int]) -> dict[int, bytes]:
    """The bytes of those samples of `indices` that the log has."""
    places = _places(path)
    with path.open("rb") as file:
        return {index: _pixels(file, places[index]) for index in places.keys() & indices}


def _pixels(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return bytes.fromhex(_entry(file.readline())["data"])


def _places(path: Path) -> dict[int, int]:
    """The offset of each sample's line."""
    places: dict[int, int] = {}
    place = 0
    with path.open("rb") as file:
        for line in file:
            if b"qsl_idx" in line:
                # Do not parse the pixels, which are most of the line.
                head = line[: line.index(b'"data"')].strip().rstrip(b",") + b"}"
                places.setdefault(json.loads(head.lstrip(b"[,"))["qsl_idx"], place)
            place += len(line)
    return places


def _entry(line: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(line.strip().strip(b"[],"))
    return entry
