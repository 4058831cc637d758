"""A small byte-complete CLIP vocabulary, stored as SDXL stores its two tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import engines
from sdxl.pipeline import Pipeline

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
WORDS = ("cat", "dog", "red", "the", "on")


def byte_symbols() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]


def write_tokenizer(folder: Path, pad: str) -> Path:
    """vocab.json, merges.txt and the two small configs, "!" being id 0 as in SDXL."""
    merges = []
    for word in WORDS:
        symbols = [*word[:-1], word[-1] + "</w>"]
        while len(symbols) > 1:
            merges.append((symbols[0], symbols[1]))
            symbols[:2] = ["".join(symbols[:2])]
    alone = byte_symbols()
    tokens = [*alone, *(s + "</w>" for s in alone), *map("".join, merges), BOS, EOS]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    special: dict[str, object] = {
        "bos_token": {"content": BOS, **flags},
        "eos_token": {"content": EOS, **flags},
        "unk_token": {"content": EOS, **flags},
        "pad_token": pad,
    }
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": pad}
    folder.mkdir(parents=True)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """`tokenizer` pads with EOS, `tokenizer_2` with "!"."""
    root = tmp_path_factory.mktemp("tokenizers")
    return write_tokenizer(root / "tokenizer", EOS), write_tokenizer(root / "tokenizer_2", "!")


@pytest.fixture(scope="module")
def model(folder: Path) -> Pipeline:
    """Of the checkpoint in a module's own `folder`."""
    return engines.load(str(folder), "torch")
