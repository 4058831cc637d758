"""The speed of one replica of a large fleet, measured with ticks.py: the work of each kind of
picture, and the pace of a number of pictures in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.fleet.gpus import SimulatedGpu
from eval.fleet.ticks import TickReplica
from eval.fleet.traffic import NONE, PictureKind

PICTURES = 300


@dataclass(frozen=True)
class Pace:
    """Work is counted in mean pictures."""

    work: Any
    """by kind of picture"""
    picture_s: Any
    """seconds per unit of work, by the number of pictures in flight"""
    usual: int
    """pictures in flight; `most` if many wait"""
    most: int

    @property
    def rate(self) -> float:
        """The capacity in pictures a second, with the usual number in flight."""
        return float(self.usual / self.picture_s[self.usual])

    @classmethod
    def measured(cls, gpu: SimulatedGpu, kinds: list[PictureKind]) -> Pace:
        usual, most = gpu.limits.rows // 2, gpu.limits.most_rows // 2
        rng, shares = np.random.default_rng(3), np.array([kind.share for kind in kinds])
        drawn = rng.choice(len(kinds), PICTURES, p=shares / shares.sum())
        took_s = closed_loop(gpu, [kinds[i] for i in drawn], usual)[1]
        work = fit_times(kinds, drawn, took_s)
        work /= shares @ work / shares.sum()
        counts = sorted({1, 2, 3, usual, most})
        times = [
            count * closed_loop(gpu, [kinds[i] for i in drawn], count)[0] / work[drawn].sum()
            for count in counts
        ]
        between = np.interp(np.arange(1, most + 1), counts, times)
        return cls(work, np.r_[np.inf, between], usual, most)


def closed_loop(
    gpu: SimulatedGpu, kinds: list[PictureKind], images: int
) -> tuple[float, list[float]]:
    """Run pictures with `images` in flight. Return the total seconds and each picture's."""
    replica, now = TickReplica(gpu), 0.0
    began_s, took_s = dict[int, float](), [0.0] * len(kinds)

    def begin(id_: int) -> None:
        began_s[id_] = now
        replica.admit(kinds[id_].flight.changed(id=id_, client=str(id_)), NONE, now)

    waiting = iter(range(len(kinds)))
    for _, id_ in zip(range(images), waiting, strict=False):
        begin(id_)
    while began_s:
        now, ended = replica.tick(now)
        for id_, _ in ended:
            took_s[id_] = now - began_s.pop(id_)
            if (next_id := next(waiting, None)) is not None:
                begin(next_id)
    return now, took_s


def fit_times(kinds: list[PictureKind], drawn: Any, took_s: list[float]) -> Any:
    """The time of each kind: the product of the costs of its size, plan, LoRA and ControlNet."""
    flights = [kind.flight for kind in kinds]
    named = [
        (f"{f.axes}", f"{f.plan}", f"lora {f.variant.name}", f"nets {len(f.windows)}")
        for f in flights
    ]
    names = sorted({name for each in named for name in each})
    table = np.array([[name in each for name in names] for each in named], float)
    solved = np.linalg.lstsq(table[drawn], np.log(took_s), rcond=None)[0]
    return np.exp(table @ solved)
