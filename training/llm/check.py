"""Measures the embedded language model's expansions: `python -m training.llm.check --count 1000`.

Prompts come from scenes that training never used. An expansion is right if it parses as a full
caption and keeps everything that its prompt stated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sdxl.mini.scenes import Scene, caption
from serve.llm.decoding import Decoding, Generation
from serve.llm.names import MINI
from serve.llm.prompts import Prompts
from serve.llm.text_orders import Message, Sampling, TextOrder
from training.llm.grammar import parse
from training.llm.short_prompts import WantedScene, change, full_scene, phrase, wanted_of
from training.llm.train import TEMPERATURE

MOST_TOKENS = 48


@dataclass(frozen=True)
class Trial:
    """A prompt, and the facts that its expansion must keep."""

    messages: tuple[Message, ...]
    wanted: WantedScene | None = None
    scene: Scene | None = None

    def fault(self, text: str) -> str | None:
        scene = parse(text)
        if scene is None:
            return f"no caption: {text!r}"
        is_kept = self.wanted.is_kept_by(scene) if self.wanted else scene == self.scene
        return None if is_kept else f"not kept: {text!r}"


def trials(count: int) -> Iterator[Trial]:
    rng = np.random.default_rng(21)
    for _ in range(count):
        wanted = wanted_of(full_scene(rng, held_out=True), rng)
        yield Trial((Message("user", phrase(wanted, rng)),), wanted=wanted)


def changes(count: int) -> Iterator[Trial]:
    """Yield chats whose second turn asks to change the first turn's scene."""
    rng = np.random.default_rng(22)
    while count:
        scene = full_scene(rng, held_out=True)
        if changed := change(scene, rng):
            count -= 1
            prompt = phrase(wanted_of(scene, rng), rng)
            turns = (("user", prompt), ("assistant", caption(scene)), ("user", changed[0]))
            yield Trial(tuple(Message(*turn) for turn in turns), scene=changed[1])


def expand(model: Any, prompts: Prompts, cases: Sequence[Trial], temperature: float) -> list[str]:
    end = model.generation_config.eos_token_id
    decoding = Decoding(model, 16, 512, [end])
    generations = []
    for seed, trial in enumerate(cases):
        ids = prompts.ids(TextOrder(trial.messages))
        sampling = Sampling(temperature=temperature, seed=seed)
        generations.append((len(ids), Generation(ids, sampling, MOST_TOKENS)))
        decoding.submit(generations[-1][1])
    while not decoding.is_idle:
        decoding.step()
    decode = prompts.tokenizer.decode
    return [decode(g.ids[length:], skip_special_tokens=True) for length, g in generations]


def faults(
    model: Any, prompts: Prompts, cases: Sequence[Trial], temperature: float
) -> list[tuple[str, str]]:
    """Return each request whose expansion is wrong, with the fault."""
    texts = expand(model, prompts, cases, temperature)
    results = ((t.messages[-1].content, t.fault(x)) for t, x in zip(cases, texts, strict=True))
    return [(prompt, fault) for prompt, fault in results if fault is not None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--model", default=str(MINI))
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts = Prompts(options.model)
    for name, draw in (("prompts", trials), ("changes", changes)):
        cases = list(draw(options.count))
        for temperature in (0.0, TEMPERATURE, 1.0):
            wrong = faults(model, prompts, cases, temperature)
            print(f"{name}, temperature {temperature}: {1 - len(wrong) / len(cases):.2%} right")
            for prompt, fault in wrong[:8]:
                print(f"    {prompt!r}: {fault}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
