"""How well the embedded language model expands: `python -m training.llm.check --count 1000`.

Prompts come from scenes that were never trained on. An expansion is right if it parses as a full
caption and keeps everything that its prompt stated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sdxl.mini.scenes import Scene, caption
from serve.llm.asks import Ask, Message, Sampling
from serve.llm.decoding import Decoding, Generation
from serve.llm.names import MINI
from serve.llm.prompts import Prompts
from training.llm.grammar import parse
from training.llm.short_prompts import WantedScene, change, full_scene, phrase, wanted_of
from training.llm.train import TEMPERATURE

MOST_TOKENS = 48


@dataclass(frozen=True)
class Trial:
    """A prompt, and the conditions for its expansion."""

    messages: tuple[Message, ...]
    wanted: WantedScene | None = None
    scene: Scene | None = None

    def fault(self, text: str) -> str | None:
        found = parse(text)
        if found is None:
            return f"no caption: {text!r}"
        is_kept = self.wanted.is_kept_by(found) if self.wanted else found == self.scene
        return None if is_kept else f"not kept: {text!r}"


def trials(count: int, seed: int = 21) -> Iterator[Trial]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        wanted = wanted_of(full_scene(rng, held_out=True), rng)
        yield Trial((Message("user", phrase(wanted, rng)),), wanted=wanted)


def changes(count: int, seed: int = 22) -> Iterator[Trial]:
    """Make second turns that ask to change the scene of the first."""
    rng = np.random.default_rng(seed)
    while count:
        scene = full_scene(rng, held_out=True)
        if changed := change(scene, rng):
            count -= 1
            said = phrase(wanted_of(scene, rng), rng)
            turns = (("user", said), ("assistant", caption(scene)), ("user", changed[0]))
            yield Trial(tuple(Message(*turn) for turn in turns), scene=changed[1])


def expand(
    model: Any, prompts: Prompts, asked: Sequence[Trial], temperature: float, first_seed: int = 0
) -> list[str]:
    end = model.generation_config.eos_token_id
    decoding = Decoding(model, 16, 512, [end])
    made = []
    for seed, trial in enumerate(asked, first_seed):
        ids = prompts.ids(Ask(trial.messages))
        sampling = Sampling(temperature=temperature, seed=seed)
        made.append((len(ids), Generation(ids, sampling, MOST_TOKENS)))
        decoding.submit(made[-1][1])
    while not decoding.is_idle:
        decoding.step()
    decode = prompts.tokenizer.decode
    return [decode(g.ids[length:], skip_special_tokens=True) for length, g in made]


def faults(
    model: Any, prompts: Prompts, asked: Sequence[Trial], temperature: float
) -> list[tuple[str, str]]:
    """Return each request with what is wrong with its answer."""
    texts = expand(model, prompts, asked, temperature)
    found = ((t.messages[-1].content, t.fault(x)) for t, x in zip(asked, texts, strict=True))
    return [(said, fault) for said, fault in found if fault is not None]


def main(argv: Sequence[str] | None = None) -> int:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--model", default=str(MINI))
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts = Prompts(options.model)
    for name, drawn in (("prompts", trials), ("changes", changes)):
        asked = list(drawn(options.count))
        for temperature in (0.0, TEMPERATURE, 1.0):
            wrong = faults(model, prompts, asked, temperature)
            print(f"{name}, temperature {temperature}: {1 - len(wrong) / len(asked):.2%} right")
            for said, fault in wrong[:8]:
                print(f"    {said!r}: {fault}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
