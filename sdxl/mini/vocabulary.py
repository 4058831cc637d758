"""Builds the byte-complete BPE vocabulary that both of the model's tokenizers share.

It holds all 256 byte symbols, alone and ending a word, so any text encodes without an unknown
token; then merges that make each word of the captions one token.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from sdxl.mini.scenes import COLOURS, COUNTS, PLACES, RELATIONS, SHAPES, SIZES

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
MAX_LENGTH = 77


def byte_symbols() -> list[str]:
    """CLIP's printable stand-ins for the 256 bytes, "!" first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]


def words() -> list[str]:
    """Every word a caption can hold, in a fixed order."""
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
    """Words that no caption holds, so that they mean nothing to the model."""
    found = re.findall(r"[^\W\d_]+", prompt.lower())
    return tuple(dict.fromkeys(word for word in found if word not in set(words())))


def _apply(symbols: list[str], merges: list[tuple[str, str]]) -> list[str]:
    for left, right in merges:
        i = 0
        while i < len(symbols) - 1:
            if (symbols[i], symbols[i + 1]) == (left, right):
                symbols[i : i + 2] = [left + right]
            i += 1
    return symbols


def build_merges() -> list[tuple[str, str]]:
    """Merges in order of rank. A later one never changes how an earlier word comes together."""
    merges: list[tuple[str, str]] = []
    for word in words():
        symbols = _apply([*word[:-1], word[-1] + "</w>"], merges)
        while len(symbols) > 1:
            merges.append((symbols[0], symbols[1]))
            symbols[:2] = ["".join(symbols[:2])]
    return merges


def build_vocabulary() -> dict[str, int]:
    alone = byte_symbols()
    merged = ["".join(pair) for pair in build_merges()]
    tokens = [*alone, *(symbol + "</w>" for symbol in alone), *merged, BOS, EOS]
    return {token: index for index, token in enumerate(tokens)}


def write_tokenizer(folder: Path, pad: str) -> None:
    """A `CLIPTokenizer` folder. SDXL's first tokenizer pads with EOS, its second with "!"."""
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
