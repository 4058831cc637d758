"""From logits to the next token, by a request's own generator: its neighbours change nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from serve.llm.asks import Sampling


class Sampler:
    def __init__(self, sampling: Sampling) -> None:
        given = sampling.temperature
        self.temperature, self.top_p = 1.0 if given is None else given, sampling.top_p
        self.is_greedy = sampling.is_greedy
        self._generator = torch.Generator("cpu").manual_seed(sampling.seed)

    def draw(self, logits: Tensor) -> int:
        """`logits` are of one row."""
        weights = torch.softmax(logits.float() / self.temperature, -1)
        if self.top_p < 1:
            weights = _nucleus(weights, self.top_p)
        return int(torch.multinomial(weights, 1, generator=self._generator))


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """The fewest tokens that together weigh `top_p`, the likeliest always among them."""
    ordered, order = weights.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered >= top_p] = 0
    return torch.zeros_like(weights).scatter_(0, order, ordered)
