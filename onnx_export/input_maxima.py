"""The largest absolute value that each of some layers was given, while it is watched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


@contextmanager
def watched(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """By name, of those that were called."""
    maxima: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(partial(_collect, maxima, name))
        for name, layer in layers.items()
    ]
    try:
        yield maxima
    finally:
        for hook in hooks:
            hook.remove()


def _collect(
    maxima: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    found = inputs[0].detach().abs().amax()
    maxima[name] = torch.maximum(maxima[name], found) if name in maxima else found
