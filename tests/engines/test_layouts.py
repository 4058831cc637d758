"""No map changes its memory order in a tick: a full-size loop as on a GPU, on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.pytorch.launches import noted
from eval.measuring.arithmetic import FULL_SIZE
from eval.speed.meta_networks import PRECISIONS, decoder, latents_of
from tests.engines.meta_launches import begun, engines_of

LATENT = {FULL_SIZE: 128, "mini": 20}
"""the latents' side; the embedded model's differs from every number of heads or tokens"""


class Layouts(TorchDispatchMode):
    """Counts operators whose input and output maps differ in memory order. Like cuDNN's,
    convolutions return channels-last if any input is channels-last."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.sides = {latent << up >> down for up in range(4) for down in range(3)}
        self.operators: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten.conv") and any(is_last(t) for t in args[:2]):
            out = torch.empty_like(out, memory_format=torch.channels_last)
        self.operators[name] += 1
        maps = [t for t in tree_leaves((args, kwargs, out)) if self.is_map(t)]
        # A view moves nothing, and may have sides in the place of channels.
        if not func.is_view and len({is_last(t) for t in maps}) > 1:
            self.mixed[f"{name} {tuple(maps[0].shape)}"] += 1
        return out

    def is_map(self, value: object) -> bool:
        """Latents and pictures do not count: their few channels cost nothing to reorder."""
        return (
            isinstance(value, Tensor)
            and value.dim() == 4
            and value.shape[1] > 4
            and value.shape[-1] == value.shape[-2]
            and value.shape[-1] in self.sides
        )


def is_last(value: Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)


def turned(layouts: Layouts) -> dict[str, int]:
    """The counts by operator, after a check that operators ran."""
    assert any("conv" in name for name in layouts.operators), layouts.operators
    return dict(layouts.mixed)


MODELS = ["mini", pytest.param(FULL_SIZE, marks=pytest.mark.long)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_map_is_turned_around_in_a_tick(precision: str, model: str) -> None:
    loop = begun(engines_of(precision, model), images=2, latent=LATENT[model])
    with noted() as launches:
        for _network in ("deep", "shallow"):
            with Layouts(LATENT[model]) as layouts:
                assert not loop.tick()
            assert not turned(layouts), turned(layouts)
    assert launches


@pytest.mark.parametrize("model", MODELS)
def test_no_map_is_turned_around_in_a_decoder(model: str) -> None:
    with torch.inference_mode(), noted(), Layouts(LATENT[model]) as layouts:
        decoder(model)(latents_of(2, LATENT[model]))
    assert not turned(layouts), turned(layouts)


def test_maps_in_another_order_are_seen() -> None:
    """The same loop with buffers in another order."""
    engines = replace(engines_of("fp16", "mini"), memory_format=torch.contiguous_format)
    loop = begun(engines, images=2, latent=LATENT["mini"])
    with noted(), Layouts(LATENT["mini"]) as layouts:
        loop.tick()
    assert turned(layouts)
