"""Builds the BPE vocabulary of both tokenizers of the embedded model.

It has all 256 byte symbols, alone and at the end of a word, so that any text encodes without an
unknown token, and merges that make each word of the captions one token.
"""

from __future__ import annotations

from pathlib import Path

from sdxl.mini.scenes import words
from sdxl.single_file import configs
from sdxl.single_file.configs import END_OF_WORD, clip_vocabulary


def _apply(symbols: list[str], merges: list[tuple[str, str]]) -> list[str]:
    for left, right in merges:
        i = 0
        while i < len(symbols) - 1:
            if (symbols[i], symbols[i + 1]) == (left, right):
                symbols[i : i + 2] = [left + right]
            i += 1
    return symbols


def build_merges() -> list[str]:
    """Return the merges in order of rank. A merge does not change the tokens of earlier words."""
    merges: list[tuple[str, str]] = []
    for word in words():
        symbols = _apply([*word[:-1], word[-1] + END_OF_WORD], merges)
        while len(symbols) > 1:
            merges.append((symbols[0], symbols[1]))
            symbols[:2] = ["".join(symbols[:2])]
    return [" ".join(pair) for pair in merges]


def build_vocabulary() -> dict[str, int]:
    return clip_vocabulary(build_merges())


def write_tokenizer(folder: Path, pad: str) -> None:
    configs.write_tokenizer(folder, pad, build_merges())
