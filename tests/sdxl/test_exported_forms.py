"""Operations that graphs compute in another form than PyTorch give the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sdxl.networks.attention import attend
from sdxl.networks.vae import Doubled


def both_forms(
    monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Tensor]
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        plain = compute()
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
        return plain, compute()


@pytest.mark.parametrize(("height", "width"), [(4, 4), (5, 3), (1, 2)])
def test_doubling_before_or_after_the_convolution_is_the_same(
    monkeypatch: pytest.MonkeyPatch, height: int, width: int
) -> None:
    torch.manual_seed(height)
    doubled = Doubled(nn.Conv2d(3, 5, 3, padding=1))
    pixels = torch.randn(2, 3, height, width)
    plain, exported = both_forms(monkeypatch, lambda: doubled(pixels))
    assert plain.shape == (2, 5, 2 * height, 2 * width)
    torch.testing.assert_close(exported, plain, rtol=0, atol=1e-5)


def test_attention_as_one_node_equals_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, n, 12) for n in (7, 5, 5))
    plain, exported = both_forms(monkeypatch, lambda: attend(query, key, value, heads=3))
    torch.testing.assert_close(exported, plain, rtol=0, atol=1e-5)
