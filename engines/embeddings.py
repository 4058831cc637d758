"""Reads embeddings (textual inversion) of SDXL: vectors that stand for tokens of a prompt.

Shapes and types are checked in a file's header before any vector is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engines.lora_weights import LoraError, check_finite, open_tensors
from sdxl.catalogue import LEARNED_FILE, LEARNED_FILE_2
from sdxl.prompt import BODY
from sdxl.single_file.recognition import FLOATS

KEYS = ["clip_g", "clip_l"]
"""keys of the two encoders' vectors in one file; diffusers writes a file for each encoder"""


@dataclass(frozen=True)
class Embedding:
    """Vectors in float32, the same number for each text encoder."""

    clip_l: Tensor
    clip_g: Tensor


def read_embedding(path: Path, widths: tuple[int, int]) -> Embedding:
    """Read the vectors for text encoders of these widths; raise LoraError if they do not fit."""
    if path.name == LEARNED_FILE:
        clip_l, clip_g = _read(path, widths[0]), _read(path.with_name(LEARNED_FILE_2), widths[1])
    else:
        clip_l, clip_g = _read(path, widths[0], "clip_l"), _read(path, widths[1], "clip_g")
    if len(clip_l) != len(clip_g):
        raise LoraError(f"has {len(clip_l)} vectors for CLIP-L and {len(clip_g)} for CLIP-G")
    return Embedding(clip_l, clip_g)


def _read(path: Path, width: int, key: str = "") -> Tensor:
    """Read one encoder's vectors; without a key, the file's only tensor."""
    with open_tensors(path) as file:
        keys = sorted(file.keys())
        if keys != KEYS if key else len(keys) != 1:
            expected = " and ".join(KEYS) if key else "one tensor"
            raise LoraError(f"has the keys {str(keys)[:100]}; expected {expected}")
        name = key or keys[0]
        stored = file.get_slice(name)
        shape = tuple(stored.get_shape())
        count = shape[0] if len(shape) == 2 else 1
        if len(shape) not in (1, 2) or shape[-1] != width or not 1 <= count <= BODY:
            expected = f"(1 to {BODY}, {width})"
            raise LoraError(f"is for another model: {name} has shape {shape}, expected {expected}")
        if stored.get_dtype() not in FLOATS:
            raise LoraError(f"has {name} in {stored.get_dtype()}; expected {', '.join(FLOATS)}")
        vectors: Tensor = file.get_tensor(name).float().reshape(-1, width)
    check_finite(name, vectors)
    return vectors
