"""The number of rows of a call on a processor, by the size of the model's pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.cpu import rows_on_cpu
from sdxl.checkpoint import find
from sdxl.engine import Engines


@pytest.mark.parametrize(
    ("latent_side", "expected"),
    [(16, (1, 2, 4, 8, 16)), (64, (1, 2, 4, 8)), (128, (1, 2)), (512, (1, 2))],
)
def test_large_pictures_take_few_rows(latent_side: int, expected: tuple[int, ...]) -> None:
    arch = replace(find("mini").arch, sample_size=latent_side)
    assert rows_on_cpu(arch, Engines.buckets) == expected
