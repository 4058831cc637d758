"""How fast a system is, before LoadGen is told what to expect. It does not know what makes the
pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.measuring.timing import wall_s
from sdxl.params import GenerationParams

WAVES = 2
"""times as many pictures as are under way at once: of one wave the end, with less and less under
way, would be too large a part"""
Make = Callable[[Sequence[GenerationParams]], object]


@dataclass(frozen=True)
class Expected:
    latency_s: float
    """of a picture alone"""
    rate: float
    """pictures a second, with as many under way as the system takes"""


def probe(make: Make, requests: Sequence[GenerationParams], at_once: int) -> Expected:
    """Also warms up, which is not measured."""
    make(requests[:1])
    latency_s = wall_s(lambda: make(requests[:1]))
    many = list(itertools.islice(itertools.cycle(requests), WAVES * at_once))
    return Expected(latency_s, len(many) / wall_s(lambda: make(many)))
