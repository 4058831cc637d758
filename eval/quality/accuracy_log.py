"""LoadGen's mlperf_log_accuracy.json, as `sdxl bench mlperf --accuracy` leaves it and as the
benchmark's own script reads it: raw pixels in hex, a sample a line. That of 5000 pictures has 30
GB, so lines are found once and read when they are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from eval.quality.sources import refuse_count, stamp_of
from eval.quality.task import QualityTask
from sdxl.images import Pixels
from sdxl.params import InvalidParams

FILE = "mlperf_log_accuracy.json"


class AccuracyLog:
    """A source of pictures."""

    is_stored = True

    def __init__(self, path: Path, task: QualityTask) -> None:
        self.path, self.side = path, task.side
        try:
            self.places = _places(path)
        except (OSError, ValueError, KeyError) as error:
            needed = f"needed LoadGen's {FILE}"
            raise InvalidParams("accuracy_log", str(path), f"{needed} ({error})") from error
        count = len(task.captions)
        missing = sum(i not in self.places for i in range(count))
        if missing:
            refuse_count("accuracy_log", path, count - missing, count)
        self.pictures([0])

    def describe(self) -> dict[str, Any]:
        return {"accuracy_log": str(self.path.resolve()), "stamp": stamp_of([self.path])}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        found = []
        with self.path.open("rb") as file:
            for index in indices:
                file.seek(self.places[index])
                found.append(self._picture(_entry(file.readline())["data"]))
        return found

    def _picture(self, text: str) -> Pixels:
        data, side = bytes.fromhex(text), self.side
        if len(data) != 3 * side**2:
            needed = f"needed {3 * side**2}, a picture of {side}×{side}"
            raise InvalidParams("accuracy_log", f"a picture of {len(data)} bytes", needed)
        return np.frombuffer(data, np.uint8).reshape(side, side, 3).copy()


def logged(path: Path) -> Iterator[tuple[int, bytes]]:
    """The index and bytes of each sample, one at a time; one may come more than once."""
    with path.open("rb") as file:
        for line in file:
            if b"qsl_idx" in line:
                entry = _entry(line)
                yield entry["qsl_idx"], bytes.fromhex(entry["data"])


def pictures_of(path: Path, indices: Set[int]) -> dict[int, bytes]:
    """The bytes of these, where they are there: of a log that is too large to be held."""
    places, found = _places(path), {}
    with path.open("rb") as file:
        for index in places.keys() & indices:
            file.seek(places[index])
            found[index] = bytes.fromhex(_entry(file.readline())["data"])
    return found


def _places(path: Path) -> dict[int, int]:
    """Where each sample's line begins."""
    found: dict[int, int] = {}
    place = 0
    with path.open("rb") as file:
        for line in file:
            if b"qsl_idx" in line:
                # Without its pixels, which are the long part.
                head = line[: line.index(b'"data"')].strip().rstrip(b",") + b"}"
                found.setdefault(json.loads(head.lstrip(b"[,"))["qsl_idx"], place)
            place += len(line)
    return found


def _entry(line: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line.strip().strip(b"[],"))
    return found
