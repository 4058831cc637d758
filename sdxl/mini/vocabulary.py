"""Builds the BPE vocabulary of both tokenizers of the embedded model.

It has all 256 byte symbols, alone and at the end of a word, so that any text encodes without an
unknown token, and merges that make each word of the captions one token.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from sdxl.mini.scenes import COLOURS, COUNTS, PLACES, RELATIONS, SHAPES, SIZES
from sdxl.single_file.configs import END, START, clip_vocabulary

BOS, EOS = START, END
MAX_LENGTH = 77


def words() -> list[str]:
    """Return every word of captions, in a fixed order."""
    text = [
        *COLOURS,
        *SHAPES,
        *(f"{s}{'es' if s == 'cross' else 's'}" for s in SHAPES),
        *SIZES,
        *PLACES,
        *RELATIONS,
        *COUNTS.values(),
        "an and big to the background",
    ]
    return list(dict.fromkeys(" ".join(text).split()))


def unknown_words(prompt: str) -> tuple[str, ...]:
    """Return the words that no caption has, so that the model does not know them."""
    known = set(words())
    typed = re.findall(r"[^\W\d_]+", prompt.lower())
    return tuple(dict.fromkeys(word for word in typed if word not in known))


def _apply(symbols: list[str], merges: list[tuple[str, str]]) -> list[str]:
    for left, right in merges:
        i = 0
        while i < len(symbols) - 1:
            if (symbols[i], symbols[i + 1]) == (left, right):
                symbols[i : i + 2] = [left + right]
            i += 1
    return symbols


def build_merges() -> list[tuple[str, str]]:
    """Return the merges in order of rank. A merge does not change the tokens of earlier words."""
    merges: list[tuple[str, str]] = []
    for word in words():
        symbols = _apply([*word[:-1], word[-1] + "</w>"], merges)
        while len(symbols) > 1:
            merges.append((symbols[0], symbols[1]))
            symbols[:2] = ["".join(symbols[:2])]
    return merges


def build_vocabulary() -> dict[str, int]:
    return clip_vocabulary([" ".join(pair) for pair in build_merges()])


def write_tokenizer(folder: Path, pad: str) -> None:
    """Write a folder for CLIPTokenizer. SDXL's tokenizers pad with EOS and with "!"."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in build_merges()), ""])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": pad}
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": MAX_LENGTH,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        **special,
    }
    for name, content in (
        ("vocab.json", build_vocabulary()),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
    ):
        text = json.dumps(content, ensure_ascii=False, indent=None if name[0] == "v" else 2)
        (folder / name).write_text(text + "\n", encoding="utf-8")
