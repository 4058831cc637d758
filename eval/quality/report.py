"""What an evaluation found, as a person reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from eval.measuring.bootstrap import CONFIDENCE
from eval.quality.evaluation import Figure, Scores
from eval.quality.task import QualityTask

UNITS = {"psnr": "PSNR, dB", "ssim": "SSIM", "distance": "feature distance"}


def table(task: QualityTask, scores: Scores) -> str:
    lines = [f"{task.name}: {scores.pictures} pictures", task.note, ""]
    lines += [line(UNITS.get(name, name), figure) for name, figure in scores.figures.items()]
    if scores.images_per_s is not None:
        lines.append(f"{'images/s':<26}{scores.images_per_s.median:10.2f}")
    return "\n".join(lines)


def line(name: str, figure: Figure) -> str:
    text = f"{name:<26}{figure.value:10.4f}  {CONFIDENCE:.0%}: {figure.interval.low:.4f} to "
    text += f"{figure.interval.high:.4f}"
    if figure.gate is None:
        return text
    verdict = "in" if figure.holds else "OUT OF"
    return f"{text}  {verdict} the range {figure.gate.low} to {figure.gate.high}"


def watched(total: int, run: Callable[[Callable[[int], Any]], Scores]) -> Scores:
    """Under a progress bar where a person is looking."""
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit="picture", file=sys.stderr, disable=hidden, leave=False) as bar:
        return run(bar.update)
