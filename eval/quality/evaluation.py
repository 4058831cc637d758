"""Scores pictures chunk by chunk: each chunk's findings reach the disk before the next begins, so
no more than a chunk of pictures is in memory and a run that was killed goes on where it was.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.measuring.bootstrap import Interval, interval
from eval.measuring.kept_facts import keep_facts
from eval.measuring.timing import Spread, Timed, wall_s
from eval.quality.alikeness import psnr, ssim
from eval.quality.frechet import QuickFrechet, frechet_distance
from eval.quality.protocol import ScoreRange
from eval.quality.sources import Source
from eval.quality.task import Judges, QualityTask
from sdxl.files import prepare_folder, write_atomic, write_json
from sdxl.images import Pixels
from sdxl.params import InvalidParams

CHUNK = 32
"""pictures at least; several full batches of any engine, so that chunks cost no speed"""
CALLS_A_CHUNK = 4
"""A chunk ends with fewer and fewer under way: it is several times what is under way at once."""
FACTS = "evaluation.json"
ALIKE = ("psnr", "ssim", "distance")
"""how near each picture is to the exact model's"""

Findings = Mapping[str, Tensor]


@dataclass(frozen=True)
class Figure:
    value: float
    interval: Interval
    gate: ScoreRange | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.gate is None else self.gate.holds(self.value)


@dataclass(frozen=True)
class Scores:
    """What an evaluation found."""

    pictures: int
    figures: Mapping[str, Figure]
    images_per_s: Spread | None
    """of making the pictures, over chunks; None where they were there already"""

    def as_dict(self) -> dict[str, Any]:
        figures = {n: {**asdict(f), "holds": f.holds} for n, f in self.figures.items()}
        speed = {"images/s": asdict(self.images_per_s)} if self.images_per_s else {}
        return {"pictures": self.pictures, "figures": figures, **speed}


@dataclass(frozen=True)
class Evaluation:
    """`exact` gives the pictures that each one is compared with; `save` keeps the pictures; `timed`
    is the clock that they are made against."""

    task: QualityTask
    source: Source
    folder: Path
    exact: Source | None = None
    save: Path | None = None
    timed: Timed = wall_s

    def run(self, rounds: int, on_pictures: Callable[[int], None] = lambda _: None) -> Scores:
        self._open()
        judges = self.task.load()
        count = len(self.task.captions)
        for start in range(0, count, self.chunk):
            indices = range(start, min(start + self.chunk, count))
            if not self._is_done(indices):
                self._score(indices, judges)
            on_pictures(len(indices))
        return self._summary(judges, rounds)

    @cached_property
    def chunk(self) -> int:
        """As many pictures as the source makes at once, several times; that of an evaluation which
        is gone on with, however many there are now."""
        with suppress(OSError, ValueError, KeyError):
            stored = json.loads((self.folder / FACTS).read_text(encoding="utf-8"))
            return max(1, int(stored["chunk"]))
        return max(CHUNK, CALLS_A_CHUNK * getattr(self.source, "at_once", 0))

    def _open(self) -> None:
        """Go on with what is there, where it is of the same evaluation."""
        if self.save is not None:
            prepare_folder(self.save)
        facts = self.task.as_dict() | {"source": self.source.describe(), "chunk": self.chunk}
        facts |= {"exact": self.exact.describe() if self.exact else None}
        keep_facts(self.folder, FACTS, facts, "evaluation")

    def _file(self, start: int) -> Path:
        return self.folder / f"chunk-{start:06}.npz"

    def _is_done(self, indices: range) -> bool:
        kept = [picture_file(self.save, i) for i in indices] if self.save is not None else []
        return all(path.exists() for path in (self._file(indices.start), *kept))

    def _score(self, indices: range, judges: Judges) -> None:
        pictures: list[Pixels] = []
        seconds = self.timed(lambda: pictures.extend(self.source.pictures(indices)))
        self._check_sizes(indices, pictures)
        captions = [self.task.captions[i] for i in indices]
        rows: dict[str, Any] = {
            "features": judges.features(pictures).numpy(),
            "clip": judges.clip.scores(pictures, captions),
            "images_per_s": [len(indices) / seconds],
        }
        if self.exact is not None:
            others = self.exact.pictures(indices)
            pairs = list(zip(pictures, others, strict=True))
            rows["psnr"] = [psnr(a, b) for a, b in pairs]
            rows["ssim"] = [ssim(a, b) for a, b in pairs]
            rows["distance"] = judges.clip.distances(pictures, others)
        if self.save is not None:
            save(self.save, indices, pictures)
        data = io.BytesIO()
        arrays: dict[str, Any] = {name: np.asarray(values) for name, values in rows.items()}
        np.savez(data, **arrays)
        write_atomic(self._file(indices.start), data.getvalue())

    def _check_sizes(self, indices: Sequence[int], pictures: Sequence[Pixels]) -> None:
        side = self.task.side
        for index, picture in zip(indices, pictures, strict=True):
            if picture.shape != (side, side, 3):
                shown = f"picture {index} of {picture.shape[1]}×{picture.shape[0]}"
                raise InvalidParams("images", shown, f"needed {side}×{side}")

    def _summary(self, judges: Judges, rounds: int) -> Scores:
        found = self.findings()
        features, count = found["features"], len(found["clip"])
        quick = QuickFrechet(judges.reference)
        fid = frechet_distance(features.split(self.chunk), judges.reference)
        figures = {
            "FID": Figure(
                fid,
                interval(fid, lambda rows: quick(features[rows]), count, rounds),
                self.task.fid_gate,
            ),
            "CLIP": _mean(found["clip"], rounds, self.task.clip_gate),
        }
        figures |= {name: _mean(found[name], rounds) for name in ALIKE if name in found}
        is_stored = getattr(self.source, "is_stored", False)
        speed = None if is_stored else Spread.of(found["images_per_s"].tolist())
        scores = Scores(count, figures, speed)
        write_json(self.folder / "scores.json", scores.as_dict())
        return scores

    def findings(self) -> Findings:
        """What every picture scored, in their order."""
        chunks = []
        for start in range(0, len(self.task.captions), self.chunk):
            with np.load(self._file(start)) as stored:
                chunks.append({name: torch.from_numpy(stored[name]) for name in stored.files})
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _mean(values: Tensor, rounds: int, gate: ScoreRange | None = None) -> Figure:
    mean = float(values.double().mean())
    spread = interval(mean, lambda rows: float(values[rows].double().mean()), len(values), rounds)
    return Figure(mean, spread, gate)


def save(folder: Path, indices: Sequence[int], pictures: Sequence[Pixels]) -> None:
    from PIL import Image

    from sdxl.picture_files import file_of

    for index, picture in zip(indices, pictures, strict=True):
        write_atomic(picture_file(folder, index), file_of(Image.fromarray(picture)))


def picture_file(folder: Path, index: int) -> Path:
    return folder / f"{index:06}.png"
