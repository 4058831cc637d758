"""The simulated requests: when they arrive, and what they ask for.

Sizes, plans, LoRAs and ControlNets are assumed; the popularity of files and models is Zipf's.
Random numbers come in arrays, so that a hundred million arrivals cost seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from eval.fleet.gpus import LORA, axes
from sdxl.controls import Window
from sdxl.deepcache import plan_of
from sdxl.flight import PLAIN, Flight
from sdxl.params import GenerationParams

DEADLINE_S = 20.0
"""the service's default"""
SIZES = {
    (1024, 1024): 0.5,
    (832, 1216): 0.2,
    (1216, 832): 0.15,
    (768, 768): 0.1,
    (1536, 1024): 0.05,
}
"""width and height, and the share of requests"""
PLANS = {(20, 2): 0.6, (30, 2): 0.15, (20, 1): 0.1, (40, 3): 0.1, (8, 1): 0.05}
"""steps and cache interval"""
LORAS, LORA_SHARE, LORA_LOAD_S = 1000, 0.4, 0.3
NETS, NET_SHARE, NET_LOAD_S = 20, 0.1, 5.0
"""the number of files, the share of requests that name one, and the seconds to load one: 0.2 and
2.5 GB at 0.5 GB/s (engines/bank_shelf.py)"""
LOADING_S = np.repeat([LORA_LOAD_S, NET_LOAD_S], [LORAS, NETS])
NONE = -1


def zipf(count: int) -> Any:
    """The share of each file, the most popular first."""
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


@dataclass(frozen=True)
class PictureKind:
    share: float
    flight: Flight


def kinds() -> list[PictureKind]:
    """Sizes × plans, without and with a LoRA, without and with a ControlNet."""
    made = []
    has_file = (False, True)
    for size, (steps, interval), lora, net in product(SIZES, PLANS, has_file, has_file):
        plan = plan_of(GenerationParams(steps=steps, cache_interval=interval))
        variant = (LORA if lora else PLAIN)._replace(is_controlled=net)
        windows = (Window("a net"),) if net else ()
        share = SIZES[size] * PLANS[steps, interval]
        share *= LORA_SHARE if lora else 1 - LORA_SHARE
        share *= NET_SHARE if net else 1 - NET_SHARE
        flight = Flight(-1, axes(*size), plan, variant=variant, windows=windows, rides=True)
        made.append(PictureKind(share, flight))
    return made


Level = Callable[[float], float]
"""the rate at a time, divided by the mean rate"""


def steady(at_s: float) -> float:
    return 1.0


def day(length_s: float) -> Level:
    """A day's curve in `length_s`; the night has a fifth of noon's rate."""
    return lambda at_s: 1 - 2 / 3 * math.cos(2 * math.pi * at_s / length_s)


def bursts() -> Level:
    """1.5 times the usual rate for 20 s, every three minutes on average."""
    length_s, every_s, height = 20.0, 180.0, 1.5
    begins = np.random.default_rng(5).exponential(every_s, 10_000).cumsum()
    share = 1 - math.exp(-length_s / every_s)
    usual = 1 / (1 + (height - 1) * share)

    def level(at_s: float) -> float:
        last = begins.searchsorted(at_s)
        is_burst = last > 0 and at_s - begins[last - 1] < length_s
        return usual * (height if is_burst else 1.0)

    return level


@dataclass(frozen=True)
class Traffic:
    """Requests of one model, one picture each."""

    rate: float
    level: Level
    kinds: list[PictureKind]

    @cached_property
    def _sums(self) -> Any:
        return np.cumsum([kind.share for kind in self.kinds])

    @cached_property
    def _files(self) -> Any:
        """Cumulative shares of LoRAs and of ControlNets, and which kinds have either."""
        flights = [kind.flight for kind in self.kinds]
        has_lora, has_net = (
            np.array([bool(each) for each in named])
            for named in ([f.variant.name for f in flights], [f.windows for f in flights])
        )
        return zipf(LORAS).cumsum(), zipf(NETS).cumsum(), has_lora, has_net

    def arrivals(self, rng: Any, begin_s: float, length_s: float) -> tuple[Any, Any, Any]:
        """Arrivals in this time, their kinds, and the file that decides each one's placement: its
        ControlNet, or else its LoRA."""
        rate = self.rate * self.level(begin_s + length_s / 2)
        count = rng.poisson(rate * length_s)
        at_s, drawn, named = rng.random((3, count))
        kind = (self._sums[:-1] / self._sums[-1]).searchsorted(drawn)
        loras, nets, has_lora, has_net = self._files
        file = np.where(has_lora[kind], loras[:-1].searchsorted(named), NONE)
        file = np.where(has_net[kind], LORAS + nets[:-1].searchsorted(named), file)
        return begin_s + length_s * np.sort(at_s), kind, file
