"""SDXL's embeddings are read in both layouts; other embeddings are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engines.embeddings import read_embedding
from engines.lora_weights import LoraError

WIDTHS = (768, 1280)


def vectors(count: int = 2, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    clip_l, clip_g = (torch.randn(count, w, generator=generator).to(dtype) for w in WIDTHS)
    return clip_l, clip_g


def one_file(folder: Path, clip_l: Tensor, clip_g: Tensor) -> Path:
    path = folder / "neon.safetensors"
    save_file({"clip_l": clip_l, "clip_g": clip_g}, path)
    return path


def two_files(folder: Path, clip_l: Tensor, clip_g: Tensor) -> Path:
    path = folder / "learned_embeds.safetensors"
    save_file({"<neon>": clip_l}, path)
    save_file({"<neon>": clip_g}, folder / "learned_embeds_2.safetensors")
    return path


@pytest.mark.parametrize("layout", [one_file, two_files])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 75])
def test_vectors_are_read_as_they_are(
    layout: Any, count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = vectors(count, dtype)
    found = read_embedding(layout(tmp_path, *stored), WIDTHS)
    for ours, theirs in zip((found.clip_l, found.clip_g), stored, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs.float())


def test_a_single_vector_may_lack_the_dimension_of_the_count(tmp_path: Path) -> None:
    clip_l, clip_g = vectors(1)
    found = read_embedding(two_files(tmp_path, clip_l[0], clip_g[0]), WIDTHS)
    assert torch.equal(found.clip_g, clip_g.float())


L, G = vectors()
WRONG = {
    "of SD 1.5": ({"emb_params": L}, r"has the keys \['emb_params'\]; expected clip_g and clip_l"),
    "empty": ({}, r"has the keys \[\]"),
    "with more": ({"clip_l": L, "clip_g": G, "t5": G}, "has the keys"),
    "swapped": (
        {"clip_l": G, "clip_g": L},
        r"is for another model: clip_l has shape \(2, 1280\), expected \(1 to 75, 768\)",
    ),
    "unequal": ({"clip_l": L, "clip_g": G[:1]}, "has 2 vectors for CLIP-L and 1 for CLIP-G"),
    "76 vectors": ({"clip_l": torch.ones(76, 768), "clip_g": G}, r"shape \(76, 768\)"),
    "no vectors": ({"clip_l": L[:0], "clip_g": G[:0]}, r"shape \(0, 768\)"),
    "of three dimensions": ({"clip_l": L[None], "clip_g": G}, r"shape \(1, 2, 768\)"),
    "a number": ({"clip_l": L[0, 0], "clip_g": G}, r"shape \(\), expected"),
    "NaN": ({"clip_l": L, "clip_g": G * torch.nan}, "has numbers in clip_g that are not finite"),
    "whole numbers": ({"clip_l": L.to(torch.int8), "clip_g": G}, "has clip_l in I8; expected F32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    tensors, message = WRONG[case]
    path = tmp_path / "neon.safetensors"
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path)
    with pytest.raises(LoraError, match=message) as caught:
        read_embedding(path, WIDTHS)
    assert "\n" not in str(caught.value)


def test_a_pair_of_files_is_needed_whole(tmp_path: Path) -> None:
    path = two_files(tmp_path, L, G)
    save_file({"<a>": L, "<b>": L.clone()}, path)
    with pytest.raises(LoraError, match=r"has the keys .*; expected one tensor"):
        read_embedding(path, WIDTHS)
    save_file({"<a>": L}, path)
    (tmp_path / "learned_embeds_2.safetensors").unlink()
    with pytest.raises(LoraError, match="No such file or directory: learned_embeds_2.safetensors"):
        read_embedding(path, WIDTHS)
