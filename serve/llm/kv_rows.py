"""A cache for transformers' models: keys and values of many generations in one tensor, a row each.

The first rows are in use: when a generation leaves, the last one moves into its row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class _Layer(CacheLayerMixin):
    """One layer's keys and values. `KvRows.aim` sets what a call reads and writes."""

    is_sliding = False

    def __init__(self, rows: KvRows) -> None:
        super().__init__()
        self._rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate at the first call, when the number and size of the heads are known."""
        heads, size = key_states.shape[1], key_states.shape[3]
        shape = (self._rows.rows, self._rows.context + 1, heads, size)
        self.keys = key_states.new_zeros(shape)
        self.values = value_states.new_zeros((*shape[:3], value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        aim = self._rows
        self.keys[aim.index, aim.positions] = key_states.transpose(1, 2)
        self.values[aim.index, aim.positions] = value_states.transpose(1, 2)
        first, last = aim.span
        return tuple(
            kept[first:last, : aim.longest].transpose(1, 2) for kept in (self.keys, self.values)
        )

    def get_seq_length(self) -> int:
        return self._rows.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.longest, 0

    def get_max_length(self) -> int:
        return self._rows.context


class KvRows(Cache):
    def __init__(self, layers: int, rows: int, context: int) -> None:
        self.rows, self.context = rows, context
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    def aim(self, first: int, positions: Tensor) -> Tensor:
        """Let the next call write at these positions [rows, tokens] of the rows from `first` on; a
        negative position is not stored. Return the call's attention mask."""
        count = len(positions)
        self.span = first, first + count
        self.index = torch.arange(first, first + count)[:, None]
        self.longest = int(positions.max()) + 1
        # Padding is written to an extra position that is never read.
        self.positions = positions.where(positions >= 0, self.context)
        seen = torch.arange(self.longest) <= positions.clamp(min=0)[:, :, None]
        return seen[:, None]

    def move(self, source: int, target: int) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[target] = layer.keys[source]
                layer.values[target] = layer.values[source]
