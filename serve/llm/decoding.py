"""Continuous batching over a transformers model: generations join and leave between any two tokens.

Each step is one model call. It makes a token for every running generation, or reads the prompts of
all that just joined, padded on the left. No threads, no clock, no text.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve.llm.kv_rows import KvRows
from serve.llm.text_orders import Reason, Sampling


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Keep the weights of the likeliest tokens that together reach `top_p`; zero the others."""
    ordered, order = weights.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered >= top_p] = 0
    return torch.zeros_like(weights).scatter_(0, order, ordered)


@dataclass(eq=False)
class Generation:
    ids: list[int]
    """the prompt and the tokens made so far"""
    sampling: Sampling
    max_tokens: int
    made: int = 0
    kept: int = 0
    """tokens whose keys and values are in the cache"""

    def __post_init__(self) -> None:
        # Its own generator, so that other rows do not change the text.
        self._generator = torch.Generator("cpu").manual_seed(self.sampling.seed)

    def draw(self, logits: Tensor) -> int:
        """Draw the next token from the logits of one row."""
        given = self.sampling.temperature
        weights = torch.softmax(logits.float() / (1.0 if given is None else given), -1)
        if self.sampling.top_p < 1:
            weights = _nucleus(weights, self.sampling.top_p)
        return int(torch.multinomial(weights, 1, generator=self._generator))


@dataclass(frozen=True)
class Made:
    """One token of a generation; the last one has a reason."""

    generation: Generation
    token: int
    reason: Reason | None


class Decoding:
    def __init__(self, model: Any, rows: int, context: int, ends: Iterable[int]) -> None:
        self.model, self.context, self.ends = model, context, frozenset(ends)
        self.cache = KvRows(model.config.num_hidden_layers, rows, context)
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        """in the order of their rows"""
        self._has_joined = False
        """whether prompts joined at the last step"""

    def submit(self, generation: Generation) -> None:
        self.waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """Cancel; a finished or unknown generation is no error."""
        if generation in self.waiting:
            self.waiting.remove(generation)
        elif generation in self.running:
            self._leave(generation)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def tokens_to_read(self) -> int:
        """Number of tokens of the prompts that join at the next step."""
        return sum(len(g.ids) for g in itertools.islice(self.waiting, self._room))

    @property
    def _room(self) -> int:
        """The rows for prompts that join at the next step. A step with joining prompts advances
        only these, so none join in two steps in a row while others run: answers of one token would
        keep the others waiting."""
        return 0 if self._has_joined and self.running else self.cache.rows - len(self.running)

    @property
    def kv_share(self) -> float:
        return sum(g.kept for g in self.running) / (self.cache.rows * self.context)

    @torch.inference_mode()
    def step(self) -> list[Made]:
        """Make a token for each generation. If the model raises, drop all running ones."""
        try:
            first = len(self.running)
            joined = self._join()
            self._has_joined = bool(joined)
            return self._advance(first, joined) if joined else self._advance(0, self.running)
        except Exception:
            self.running.clear()
            raise

    def _join(self) -> list[Generation]:
        joined = [self.waiting.popleft() for _ in range(min(self._room, len(self.waiting)))]
        self.running += joined
        return joined

    def _advance(self, first: int, rows: Sequence[Generation]) -> list[Made]:
        logits = self._logits(first, [g.ids[g.kept :] for g in rows], [g.kept for g in rows])
        likeliest = logits.argmax(-1).tolist()
        made = [
            self._take(g, best if g.sampling.is_greedy else g.draw(row))
            for g, best, row in zip(rows, likeliest, logits, strict=True)
        ]
        for each in made:
            if each.reason is not None:
                self._leave(each.generation)
        return made

    def _logits(self, first: int, new: Sequence[list[int]], kept: Sequence[int]) -> Tensor:
        """Return the logits of each row's last token [rows, vocabulary]."""
        longest = max(map(len, new))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in new])
        ends = torch.tensor([k + len(row) for k, row in zip(kept, new, strict=True)])
        positions = ends[:, None] - torch.arange(longest, 0, -1)
        # Left of a row's first new token there is padding.
        positions = positions.where(positions >= torch.tensor(kept)[:, None], -1)
        mask = self.cache.aim(first, positions)
        logits: Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions.clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def _take(self, generation: Generation, token: int) -> Made:
        generation.kept = len(generation.ids)
        generation.ids.append(token)
        generation.made += 1
        if token in self.ends:
            return Made(generation, token, "stop")
        is_last = generation.made >= generation.max_tokens
        return Made(generation, token, "length" if is_last else None)

    @torch.inference_mode()
    def _leave(self, generation: Generation) -> None:
        row = self.running.index(generation)
        last = self.running.pop()
        if last is not generation:
            self.running[row] = last
            self.cache.move(len(self.running), row)
