"""The quality gate: the scores of int8 at interval 2 on a small fixed set, compared with recorded
scores. After an intended change of weights or recipe, record the scores again: `python -m
tests.onnx_export.quality_gate tests/onnx_export/quality_band.json`.

The set is too small to rate the model. It is the same in every run, so a change shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engines.folders.export_folder import ExportFolder
from engines.folders.shipped import open_mini
from engines.onnxruntime_engine import load_onnxruntime
from eval.quality.evaluation import Evaluation, Scores
from eval.quality.sources import Painted
from eval.quality.sweep import export_unchecked
from eval.quality.task import Judges, embedded_task, mini_judges
from sdxl.checkpoint import find
from sdxl.engine import Engines
from sdxl.files import write_json
from sdxl.pipeline import Pipeline

PICTURES, DRAWN = 32, 300
FAST_INTERVAL = 2
CALIBRATION_PROMPTS = 4
WIDTH = {"FID": 0.03, "CLIP": 0.005}
"""half the width of the band, as a share, because processors round differently"""


Measured = dict[str, dict[str, float]]
"""the exact model's scores, and those of int8 at interval 2 (fast) as shares of the exact"""


@dataclass(frozen=True)
class Band:
    """The recorded scores, and the digest of their weights."""

    weights: str
    recorded: Measured

    def outside(self, current: Measured) -> list[str]:
        """Return a line for each score outside the band."""
        wrong = []
        for what, scores in self.recorded.items():
            for name, value in scores.items():
                measured = current[what][name]
                low, high = value * (1 - WIDTH[name]), value * (1 + WIDTH[name])
                if not low <= measured <= high:
                    wrong.append(
                        f"{what} {name}: measured {measured:.4f}, recorded {value:.4f}, "
                        f"allowed {low:.4f} to {high:.4f}"
                    )
        return wrong

    @classmethod
    def read(cls, path: Path) -> Band:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def measure(int8: ExportFolder) -> Measured:
    """Measure the shipped fp32 graphs at interval 1, and this export at interval 2."""
    judges = mini_judges(DRAWN)
    exact = _score(load_onnxruntime(open_mini()), 1, judges)
    fast = _score(load_onnxruntime(int8), FAST_INTERVAL, judges)
    scores = {name: exact.figures[name].value for name in WIDTH}
    shares = {name: fast.figures[name].value / scores[name] for name in WIDTH}
    return {"exact": scores, "fast": shares}


def _score(engines: Engines, interval: int, judges: Judges) -> Scores:
    task = embedded_task({"cache_interval": interval}, PICTURES)
    task = replace(task, load=lambda: judges)
    source = Painted(Pipeline(find("mini"), engines), task.requests)
    with tempfile.TemporaryDirectory() as folder:
        return Evaluation(task, source, Path(folder)).run(rounds=1)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.onnx_export.quality_gate", description="Record the band."
    )
    parser.add_argument("path", type=Path, help="tests/onnx_export/quality_band.json")
    path = parser.parse_args(argv).path
    with tempfile.TemporaryDirectory() as folder:
        # Few prompts, like the tests' exports.
        out = Path(folder) / "int8"
        int8 = export_unchecked(find("mini"), "int8", out, calibration_prompts=CALIBRATION_PROMPTS)
        band = Band(find("mini").digest, measure(int8))
    write_json(path, asdict(band))
    print(path.read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
