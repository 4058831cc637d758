"""DeepCache without its two networks: diffusers' own UNet runs in full at every call, and at
shallow steps its inner tensors are replaced by those of the last deep step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def substituted(unet: Any) -> Iterator[None]:
    """Inside the block the UNet must be called once a step. Every second call is deep, from the
    first on."""
    kept: dict[str, Tensor] = {}
    calls = 0

    def count(_module: Any, _inputs: Any) -> None:
        nonlocal calls
        calls += 1

    def swap(name: str) -> Any:
        def chosen(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            if calls % 2 == 1:
                kept[name] = output
            return kept[name]

        return chosen

    places = {"up": unet.up_blocks[1]}
    places |= {f"skip{i}": r for i, r in enumerate(unet.down_blocks[0].resnets)}
    handles = [unet.register_forward_pre_hook(count)]
    handles += [each.register_forward_hook(swap(name)) for name, each in places.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
