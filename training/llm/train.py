"""Trains the embedded language model from nothing: `python -m training.llm.train --out DIR`.

A conversation is a prompt and its caption, sometimes followed by a request to change the scene and
the changed caption. Several conversations share a training row. Only captions are learned.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sdxl.mini.scenes import caption
from serve.llm.names import MINI
from training.fitting import Schedule, fit
from training.llm.short_prompts import change, full_scene, phrase, wanted_of
from training.llm.tokens import ASSISTANT, CONTEXT, END, USER, write_tokenizer

SCHEDULES = (
    Schedule(steps=1000, peak_rate=3e-3, seed=12, average=0.99),
    Schedule(steps=900, peak_rate=2e-3, seed=13, average=0.99),
)
"""two cycles; the second begins with the averaged weights of the first"""
TEMPERATURE = 0.3
ROWS, LENGTH = 12, 96
CHANGED, PLAIN = 0.2, 0.05
UNLEARNED = -100


def new_model(vocabulary: int, end: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        # About one over the square root of the width. With the library's 0.02, attention stays
        # uniform for thousands of steps, and colours are not copied.
        initializer_range=0.1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    return LlamaForCausalLM(config)


@dataclass
class TrainingRow:
    """Conversations in one row. Each begins at position 0 and attends only to itself."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, ids: list[int], labels: list[int]) -> None:
        self.ids += ids
        self.labels += labels
        self.positions += range(len(ids))

    def pad(self) -> None:
        missing = LENGTH - len(self.ids)
        self.add([0] * missing, [UNLEARNED] * missing)


class TrainingRows:
    """Draws the training rows of each step."""

    def __init__(self, tokenizer: Any) -> None:
        self._encode = tokenizer.backend_tokenizer.encode_batch

    def batch(self, rng: np.random.Generator) -> dict[str, Tensor]:
        rows = [TrainingRow()]
        while True:
            ids, labels = self._conversation(rng)
            if len(rows[-1].ids) + len(ids) > LENGTH:
                rows[-1].pad()
                if len(rows) == ROWS:
                    return _tensors(rows)
                rows.append(TrainingRow())
            rows[-1].add(ids[:LENGTH], labels[:LENGTH])

    def _conversation(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        texts = conversation(rng)
        for i, encoded in enumerate(self._encode(texts)):
            ids += encoded.ids
            is_learned = len(texts) == 1 or i % 2
            labels += encoded.ids if is_learned else [UNLEARNED] * len(encoded.ids)
        # The first token would be predicted from the previous conversation.
        return ids, [UNLEARNED, *labels[1:]]


def _tensors(rows: Sequence[TrainingRow]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([row.ids for row in rows]),
        "labels": torch.tensor([row.labels for row in rows]),
        "position_ids": torch.tensor([row.positions for row in rows]),
    }


def conversation(rng: np.random.Generator) -> list[str]:
    """Return texts to read and texts to learn, alternately; or a caption to learn."""
    scene = full_scene(rng)
    if rng.random() < PLAIN:
        return [caption(scene) + END]
    turns = [*_turn(phrase(wanted_of(scene, rng), rng), caption(scene))]
    while rng.random() < CHANGED and (changed := change(scene, rng)):
        request, scene = changed
        turns += _turn(request, caption(scene))
    return turns


def _turn(request: str, answer: str) -> tuple[str, str]:
    return USER + request + END + ASSISTANT, answer + END


def train(out: Path, work: Path, schedules: Sequence[Schedule] = SCHEDULES) -> None:
    tokenizer = write_tokenizer(out)
    model = new_model(len(tokenizer), tokenizer.eos_token_id)
    rows = TrainingRows(tokenizer)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        # Without a cache, transformers starts a new sequence where positions begin again.
        loss: Tensor = model(**rows.batch(rng), use_cache=False).loss
        return loss

    for number, schedule in enumerate(schedules, 1):
        fit(model, loss_of, schedule, work / f"cycle{number}.pt")
    model.generation_config.update(do_sample=True, temperature=TEMPERATURE)
    model.half().save_pretrained(out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MINI)
    parser.add_argument("--work", type=Path, default=Path("out/mini_llm"))
    options = parser.parse_args(argv)
    train(options.out, options.work)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
