"""The model's tokenizer, with a chat template: byte-level BPE, which encodes any text.

Its merges come from the training prompts, so every word of the grammar is one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sdxl.mini.scenes import caption
from training.llm.short_prompts import change, full_scene, phrase, wanted_of

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
VOCABULARY = 576
CONTEXT = 512
SEED, PAIRS = 11, 4000
# System messages explain the task to other models; this one needs none. Of a long chat, the last
# five messages are enough.
TEMPLATE = (
    "{% set turns = messages | rejectattr('role', 'equalto', 'system') | list %}"
    "{% for message in turns[-5:] %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path) -> Any:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_texts(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def _texts() -> Iterator[str]:
    rng = np.random.default_rng(SEED)
    for _ in range(PAIRS):
        scene = full_scene(rng)
        yield caption(scene)
        yield phrase(wanted_of(scene, rng), rng)
        if changed := change(scene, rng):
            yield changed[0]
