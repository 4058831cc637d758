"""Settings of a sweep with their speed and quality, and the Pareto front among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from eval.measuring.bootstrap import Interval, interval
from eval.measuring.markdown import table_lines
from eval.measuring.timing import Spread
from eval.quality.evaluation import Figure
from eval.quality.protocol import CLIP_TOLERANCE, FID_TOLERANCE
from sdxl.params import GenerationParams
from sdxl.specs import Cut

USUAL = GenerationParams()
COLUMNS = (
    *("setting", "images/s", "FID", "change", "CLIP", "change", "gates"),
    *("PSNR, dB", "SSIM", "distance"),
)


@dataclass(frozen=True)
class QualitySetting:
    """One setting; the defaults are the exact model."""

    precision: str = "fp32"
    cache_interval: int = 1
    scheduler: str = USUAL.scheduler
    steps: int = USUAL.steps
    cut: Cut = "reference"
    guided_until: float = 1.0
    """the share of the steps that is guided, from the first step"""
    deep_steps: tuple[int, ...] | None = None
    """replaces the interval"""

    @property
    def slug(self) -> str:
        parts = [self.precision, f"interval{self.cache_interval}", self.scheduler, str(self.steps)]
        if self.deep_steps is not None:
            parts[1] = f"deep{'_'.join(map(str, self.deep_steps))}"
        share = [] if self.guided_until == 1 else [f"guided{self.guided_until:g}"]
        return "-".join((*parts, *share, *([] if self.cut == "reference" else [self.cut])))

    def __str__(self) -> str:
        reuse = f"interval {self.cache_interval}"
        if self.deep_steps is not None:
            reuse = f"deep {','.join(map(str, self.deep_steps))}"
        share = "" if self.guided_until == 1 else f", guided to {self.guided_until:g}"
        cut = "" if self.cut == "reference" else f", {self.cut}"
        return f"{self.precision}, {reuse}, {self.scheduler} {self.steps}{share}{cut}"

    def apply_to(self, request: GenerationParams) -> GenerationParams:
        return replace(
            request,
            cache_interval=self.cache_interval,
            scheduler=self.scheduler,
            steps=self.steps,
            deep_steps=self.deep_steps,
            guidance_interval=None if self.guided_until == 1 else (0.0, self.guided_until),
        )


@dataclass(frozen=True)
class Tried:
    setting: QualitySetting
    figures: Mapping[str, Figure]
    images_per_s: Spread
    resamples: Mapping[str, Tensor]

    def as_dict(self) -> dict[str, Any]:
        figures = {name: asdict(figure) for name, figure in self.figures.items()}
        speed = asdict(self.images_per_s)
        return {"setting": asdict(self.setting), "figures": figures, "images/s": speed}

    @property
    def speed(self) -> float:
        return self.images_per_s.median


class Change(NamedTuple):
    """Changes of the scores, as shares of the exact model's."""

    fid: float
    clip: float

    @property
    def loss(self) -> float:
        """The worse change divided by its gate: MLPerf allows 1 at most; below 0 is a gain."""
        return max(self.fid / FID_TOLERANCE, -self.clip / CLIP_TOLERANCE)

    @property
    def is_within(self) -> bool:
        return abs(self.fid) <= FID_TOLERANCE and abs(self.clip) <= CLIP_TOLERANCE


def relative_change(name: str, tried: Tried, exact: Tried) -> float:
    return tried.figures[name].value / exact.figures[name].value - 1


def change(tried: Tried, exact: Tried) -> Change:
    return Change(relative_change("FID", tried, exact), relative_change("CLIP", tried, exact))


def change_interval(name: str, tried: Tried, exact: Tried) -> Interval:
    """Both sets are resampled together, so the captions' influence cancels."""
    value = relative_change(name, tried, exact)
    return interval(value, tried.resamples[name] / exact.resamples[name] - 1)


def front(tried: Sequence[Tried]) -> list[Tried]:
    """The settings that no other beats in speed and loss, fastest first. `tried[0]` is exact."""
    losses = {each.setting: change(each, tried[0]).loss for each in tried}
    best: list[Tried] = []
    for each in sorted(tried, key=lambda t: (-t.speed, losses[t.setting])):
        if not best or losses[each.setting] < losses[best[-1].setting]:
            best.append(each)
    return best


def table(tried: Sequence[Tried]) -> str:
    """Markdown; the first row is the exact model, and a star marks the front."""
    best = front(tried)
    ordered = [tried[0], *sorted(tried[1:], key=lambda t: -t.speed)]
    rows = (_cells(each, tried[0], "★ " if each in best else "") for each in ordered)
    return "\n".join(table_lines(COLUMNS, rows))


def _cells(tried: Tried, exact: Tried, mark: str) -> list[str]:
    figures, changes = tried.figures, change(tried, exact)
    fid, clip = (change_interval(name, tried, exact) for name in ("FID", "CLIP"))
    alike = [
        f"{figures[name].value:.{digits}f}" if name in figures else ""
        for name, digits in (("psnr", 1), ("ssim", 3), ("distance", 4))
    ]
    return [
        f"{mark}{tried.setting}",
        f"{tried.images_per_s:.2f}",
        f"{figures['FID'].value:.4f}",
        f"{changes.fid:+.1%} ({fid.low:+.1%} to {fid.high:+.1%})",
        f"{figures['CLIP'].value:.3f}",
        f"{changes.clip:+.2%} ({clip.low:+.2%} to {clip.high:+.2%})",
        "in" if changes.is_within else "out",
        *alike,
    ]
