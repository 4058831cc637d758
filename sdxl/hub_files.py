"""Selects a model's files from the listing of a hub repository: configs, tokenizers, and one
variant of each network's weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

VARIANTS = ("", ".fp16")
"""variants of weights in order of preference: float32, then float16"""
TEXTS = (".json", ".txt")
CONFIG_FOLDERS = ("scheduler", "tokenizer", "tokenizer_2")
TOP = ("model_index.json", "preview.json", "presets.json")
INDEX = ".safetensors.index"


def needed_files(names: Iterable[str], weights: Mapping[str, str]) -> list[str]:
    """Select the files; `weights` maps each network's folder to the stem of its weight files."""
    listed = sorted(names)
    needed = [name for name in listed if name in TOP or _is_text(name, weights)]
    for folder, stem in weights.items():
        needed += _one_variant(listed, f"{folder}/{stem}")
    return needed


def _is_text(name: str, weights: Mapping[str, str]) -> bool:
    folder, _, file = name.rpartition("/")
    is_needed = folder in CONFIG_FOLDERS or folder in weights
    return is_needed and file.endswith(TEXTS) and INDEX not in file


def _one_variant(names: list[str], path: str) -> list[str]:
    for variant in VARIANTS:
        single = f"{path}{variant}.safetensors"
        if single in names:
            return [single]
        index = f"{path}{INDEX}{variant}.json"
        shard = re.compile(rf"{re.escape(path + variant)}-\d+-of-\d+\.safetensors")
        if index in names:
            return [index, *(name for name in names if shard.fullmatch(name))]
    return []
