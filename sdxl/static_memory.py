"""Memory for the static tensors of a device's calls.

A tensor name's memory has room for the largest bucket at the model's own size; all axes and buckets
that fit share it. Larger calls use another memory of twice the size, and so on. So a tensor's
address depends only on its name and size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sdxl.engine import Engines, torch_dtype
from sdxl.specs import CHUNK, IMAGE_COUNTS, IMAGE_TOKENS, ROWS, TensorSpec, level_axes


@dataclass
class StaticMemory:
    engines: Engines
    contents: dict[int, object] = field(default_factory=dict)
    """by address: a key of the content that a caller has copied there"""
    _memory: dict[tuple[Hashable, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        side = self.engines.arch.sample_size
        images = {"images": IMAGE_COUNTS[0], "image_tokens": IMAGE_TOKENS[0]}
        sizes = {"latent_h": side, "latent_w": side, "tokens": CHUNK, **images}
        self._standard = {ROWS: self.engines.buckets[-1], **self.all_sizes(sizes)}

    def all_sizes(self, sizes: dict[str, int]) -> dict[str, int]:
        """Add the sizes of the UNet's lower levels."""
        return sizes | level_axes(sizes["latent_h"], sizes["latent_w"])

    def map(self, name: str, spec: TensorSpec, sizes: dict[str, int]) -> Tensor:
        """Return one of the UNet's maps, in the engines' memory layout."""
        dims, memory = spec.shape(sizes), self.flat(name, spec, sizes)
        if len(dims) == 4 and self.engines.memory_format is torch.channels_last:
            rows, channels, height, width = dims
            return memory.view(rows, height, width, channels).permute(0, 3, 1, 2)
        return memory.view(dims)

    def lines(self, name: str, sizes: dict[str, int]) -> Tensor:
        """Return a tensor of the loop's state, such as latents: float32, a line for each row."""
        dims = (ROWS, self.engines.arch.latent_channels, "latent_h", "latent_w")
        spec = TensorSpec(name, "float32", dims)
        return self.flat(name, spec, sizes).view(spec.shape(sizes))

    def stack(self, spec: TensorSpec, sizes: dict[str, int], count: int) -> Tensor:
        """Return `count` stacked tensors of a spec."""
        return self.flat(spec.name, spec, sizes, count).view(count, *spec.shape(sizes))

    def flat(self, name: str, spec: TensorSpec, sizes: dict[str, int], count: int = 1) -> Tensor:
        """Return the part of the name's memory that `count` tensors of a spec take."""
        size, wanted = (count * math.prod(spec.shape(each)) for each in (self._standard, sizes))
        while size < wanted:
            size *= 2
        if (name, size) not in self._memory:
            dtype, device = torch_dtype(spec), self.engines.device
            self._memory[name, size] = torch.empty(size, dtype=dtype, device=device)
        return self._memory[name, size][:wanted]
