"""Scores pictures chunk by chunk. Each chunk's scores are written before the next chunk begins, so
memory holds one chunk of pictures and an interrupted run can resume.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from eval.measuring.bootstrap import Interval, interval, resample
from eval.measuring.kept_facts import check_facts
from eval.measuring.psnr import psnr_db
from eval.measuring.timing import Spread, Timed, wall_s
from eval.quality.frechet import FrechetDistance
from eval.quality.protocol import ScoreRange
from eval.quality.sources import Source
from eval.quality.task import Judges, QualityTask
from sdxl.files import prepare_folder, write_atomic, write_json
from sdxl.images import Pixels
from sdxl.params import InvalidParams
from sdxl.picture_files import file_of

CHUNK = 32
"""the fewest pictures in a chunk: several full batches, so that chunks cost no speed"""
CALLS_A_CHUNK = 4
"""A chunk has several times the pictures in flight, because fewer are in flight at its end."""
FACTS = "evaluation.json"
ALIKE = ("psnr", "ssim", "distance")
"""scores of each picture beside the exact model's"""
MOST_DB = 100.0
"""the PSNR of equal pictures: finite, so that a mean is finite"""

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
    """The result of an evaluation."""

    pictures: int
    figures: Mapping[str, Figure]
    images_per_s: Spread | None
    """over chunks; None for stored pictures"""
    resamples: Mapping[str, Tensor]
    """the scores of resamples by figure, for intervals"""

    def as_dict(self) -> dict[str, Any]:
        figures = {n: {**asdict(f), "holds": f.holds} for n, f in self.figures.items()}
        speed = {"images/s": asdict(self.images_per_s)} if self.images_per_s else {}
        return {"pictures": self.pictures, "figures": figures, **speed}


@dataclass(frozen=True)
class Evaluation:
    """`exact`: the source of pictures to compare with; `save`: the folder for the pictures;
    `timed`: the clock."""

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
        """Pictures in a chunk. A resumed evaluation keeps its chunk."""
        with suppress(OSError, ValueError, KeyError):
            stored = json.loads((self.folder / FACTS).read_text(encoding="utf-8"))
            return max(1, int(stored["chunk"]))
        return max(CHUNK, CALLS_A_CHUNK * getattr(self.source, "at_once", 0))

    def _open(self) -> None:
        """Prepare the folders; raise if they hold another evaluation."""
        if self.save is not None:
            prepare_folder(self.save)
        facts = self.task.as_dict() | {"source": self.source.describe(), "chunk": self.chunk}
        facts |= {"exact": self.exact.describe() if self.exact else None}
        check_facts(self.folder, FACTS, facts, "evaluation")

    def _file(self, start: int) -> Path:
        return self.folder / f"chunk-{start:06}.npz"

    def _is_done(self, indices: range) -> bool:
        saved = [picture_file(self.save, i) for i in indices] if self.save is not None else []
        return all(path.exists() for path in (self._file(indices.start), *saved))

    def _score(self, indices: range, judges: Judges) -> None:
        pictures: list[Pixels] = []
        seconds = self.timed(lambda: pictures.extend(self.source.pictures(indices)))
        side = self.task.side
        for index, picture in zip(indices, pictures, strict=True):
            if picture.shape != (side, side, 3):
                shown = f"picture {index} of {picture.shape[1]}×{picture.shape[0]}"
                raise InvalidParams("images", shown, f"must be {side}×{side}")
        captions = [self.task.captions[i] for i in indices]
        rows: dict[str, Any] = {
            "features": judges.features(pictures).numpy(),
            "clip": judges.clip.scores(pictures, captions),
            "images_per_s": [len(indices) / seconds],
        }
        if self.exact is not None:
            others = self.exact.pictures(indices)
            pairs = list(zip(pictures, others, strict=True))
            rows["psnr"] = [min(psnr_db(a, b), MOST_DB) for a, b in pairs]
            rows["ssim"] = [ssim(a, b) for a, b in pairs]
            rows["distance"] = judges.clip.distances(pictures, others)
        if self.save is not None:
            save(self.save, indices, pictures)
        data = io.BytesIO()
        arrays: dict[str, Any] = {name: np.asarray(values) for name, values in rows.items()}
        np.savez(data, **arrays)
        write_atomic(self._file(indices.start), data.getvalue())

    def _summary(self, judges: Judges, rounds: int) -> Scores:
        rows = self.findings()
        features, count = rows["features"], len(rows["clip"])
        fid = FrechetDistance(judges.reference)
        means = {"CLIP": rows["clip"]} | {n: rows[n] for n in ALIKE if n in rows}
        resamples = {"FID": resample(lambda drawn: fid(features[drawn]), count, rounds)}
        resamples |= {n: resample(partial(_mean, each), count, rounds) for n, each in means.items()}
        values = {"FID": fid(features)} | {name: _mean(each) for name, each in means.items()}
        gates = {"FID": self.task.fid_gate, "CLIP": self.task.clip_gate}
        figures = {
            name: Figure(value, interval(value, resamples[name]), gates.get(name))
            for name, value in values.items()
        }
        is_stored = getattr(self.source, "is_stored", False)
        speed = None if is_stored else Spread.of(rows["images_per_s"].tolist())
        scores = Scores(count, figures, speed, resamples)
        write_json(self.folder / "scores.json", scores.as_dict())
        return scores

    def findings(self) -> Findings:
        """The scores of every picture, in order."""
        chunks = []
        for start in range(0, len(self.task.captions), self.chunk):
            with np.load(self._file(start)) as stored:
                chunks.append({name: torch.from_numpy(stored[name]) for name in stored.files})
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def run_with_progress(evaluation: Evaluation, rounds: int) -> Scores:
    """Run an evaluation; on a terminal a bar shows its progress."""
    from tqdm import tqdm

    total, hidden = len(evaluation.task.captions), not sys.stderr.isatty()
    with tqdm(total=total, unit="picture", file=sys.stderr, disable=hidden, leave=False) as bar:
        return evaluation.run(rounds, bar.update)


def ssim(picture: Pixels, other: Pixels) -> float:
    a, b = (torch.from_numpy(p).movedim(-1, 0)[None].float() for p in (picture, other))
    similarity = structural_similarity_index_measure(a, b, data_range=255.0)
    assert isinstance(similarity, torch.Tensor)
    return float(similarity)


def _mean(values: Tensor, rows: Tensor | slice = slice(None)) -> float:
    return float(values[rows].double().mean())


def save(folder: Path, indices: Sequence[int], pictures: Sequence[Pixels]) -> None:
    for index, picture in zip(indices, pictures, strict=True):
        write_atomic(picture_file(folder, index), file_of(Image.fromarray(picture)))


def picture_file(folder: Path, index: int) -> Path:
    return folder / f"{index:06}.png"
