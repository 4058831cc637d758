"""LoRAs and embeddings in the networks' layers: each row of a call adds its own low-rank products,
and negative token ids are vectors of embeddings.

The bank has two tensors for each layer: down [pages, rank, in], of a convolution
[pages, rank, taps, in], and up [pages, rank, out]. It has one for each text encoder: vectors. Hooks
add to the layers' results while a call says which pages its rows use; other calls run the layers
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdxl.specs import MOST_VECTORS, PAGE_RANK, VARIANTS, TensorSpec, layer_name, lora_name

Bank = Mapping[str, Tensor]
"""by the names of `bank_specs`"""
VECTORS = ".vectors"
"""the end of the names of embeddings' vectors in the bank, behind a text encoder's"""
TOKENS = "embeddings.token_embedding"
"""the end of the name of a text encoder's table of tokens"""
TRANSFORMERS = ".attentions."
"""in the names of the UNet's layers that the variant `lora` adapts"""
OF_PROMPT = (".attn2.to_k", ".attn2.to_v")
"""ends of names of layers that only `unet_prompt` runs"""


@dataclass(frozen=True)
class _Rows:
    """What the current call adds."""

    bank: Bank
    pages: Tensor
    """[rows, pages]"""
    scales: Tensor
    """[rows, pages × rank]"""


_rows: ContextVar[_Rows | None] = ContextVar("rows with LoRAs", default=None)


@contextmanager
def adapted(bank: Bank, pages: Tensor, scales: Tensor) -> Iterator[None]:
    """The layers in `bank` add these pages, [rows, pages], with these scales while the block
    runs."""
    dtype = next(iter(bank.values())).dtype
    every = scales.to(dtype)[:, :, None].expand(-1, -1, PAGE_RANK).flatten(1)
    token = _rows.set(_Rows(bank, pages, every))
    try:
        yield
    finally:
        _rows.reset(token)


def adapt(part: str, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name a part's layers and put the hooks on them; return their weights' shapes by name."""
    shapes = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            own = layer_name(part, name)
            shapes[own] = tuple(layer.weight.shape)
            put_hook(layer, (own,))
        elif name.endswith(TOKENS):
            own = part + VECTORS
            shapes[own] = (MOST_VECTORS, layer.embedding_dim)
            name_layer(layer, (own,))
            layer.forward = partial(_embed, layer, layer.forward)
    return shapes


def _embed(layer: nn.Module, plain: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Look up ids in the table, but negative ones among the vectors."""
    rows = _rows.get()
    if rows is None:
        return plain(ids)
    (name,) = names_of(layer)
    vectors = rows.bank[name][(-1 - ids).clamp(min=0)]
    return torch.where((ids < 0)[..., None], vectors, plain(ids.clamp(min=0)))


def put_hook(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Name a layer, or the layers that it joins, and let LoRAs add to its results."""
    name_layer(layer, names)
    layer.register_forward_hook(_add)


def name_layer(layer: Any, names: tuple[str, ...]) -> None:
    layer.bank_names = names


def names_of(layer: Any) -> tuple[str, ...]:
    """Return a layer's names in a bank."""
    return getattr(layer, "bank_names", ())


def bank_specs(shapes: Mapping[str, Sequence[int]], dtype: str) -> tuple[TensorSpec, ...]:
    """Describe the bank of layers with weights of these shapes, and of embeddings' vectors."""

    def pair(name: str, outputs: int, inputs: int, *kernel: int) -> tuple[TensorSpec, ...]:
        if name.endswith(VECTORS):
            return (TensorSpec(name, dtype, (outputs, inputs)),)
        taps = (math.prod(kernel),) if kernel else ()
        down = TensorSpec(f"{name}.down", dtype, ("bank", PAGE_RANK, *taps, inputs))
        return down, TensorSpec(f"{name}.up", dtype, ("bank", PAGE_RANK, outputs))

    return tuple(spec for name, shape in shapes.items() for spec in pair(name, *shape))


def shifts(width: int) -> Tensor:
    """The weights of a convolution that sums the maps of a kernel's taps, each shifted to its
    place: a group of taps for each rank."""
    taps = torch.eye(width * width).view(1, width * width, width, width)
    return taps.repeat(PAGE_RANK, 1, 1, 1)


def is_adapted(graph: str, layer: str) -> bool:
    """Whether a network of VARIANTS adapts one of its layers."""
    is_lora = lora_name(graph) == VARIANTS["lora"]["unet_deep"]
    return not is_lora or TRANSFORMERS in layer


def bank_of(graph: str, network: nn.Module, bank: Bank) -> Bank:
    """Return what a network of VARIANTS reads of the bank."""
    inside = dict.fromkeys(name for each in network.modules() for name in names_of(each))
    is_prompt = graph.startswith("unet_prompt")
    names = [n for n in inside if is_adapted(graph, n) and (is_prompt or not n.endswith(OF_PROMPT))]
    tensors = (spec.name for name in names for spec in bank_specs({name: (0, 0)}, ""))
    return {name: bank[name] for name in tensors}


def addition(layer: Any, x: Tensor) -> Tensor | None:
    """Return what the current call's LoRAs add to a layer's result for x; None if nothing."""
    rows = _rows.get()
    if rows is None or not is_adapting(layer):
        return None
    stride = getattr(layer, "stride", (1, 1))
    parts = [_product(x, rows, name, stride) for name in names_of(layer)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def is_adapting(layer: Any) -> bool:
    """Whether the current call's LoRAs add to a layer's result."""
    rows = _rows.get()
    return rows is not None and any(f"{name}.down" in rows.bank for name in names_of(layer))


def factors_of(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return what the current call's LoRAs add to a linear layer, for kernels: the bank's factors,
    the rows' pages, and the strengths of their ranks; None if nothing."""
    rows = _rows.get()
    if rows is None or f"{name}.down" not in rows.bank:
        return None
    return rows.bank[f"{name}.down"], rows.bank[f"{name}.up"], rows.pages, rows.scales


def _product(x: Tensor, rows: _Rows, name: str, stride: tuple[int, int]) -> Tensor:
    down, up = (rows.bank[f"{name}.{side}"][rows.pages].flatten(1, 2) for side in ("down", "up"))
    if down.dim() == 4:
        return _convolved(x, down, up, rows.scales, stride)
    tokens = (x if x.dim() == 3 else x[:, None]).to(down.dtype)
    ranks = torch.matmul(tokens, down.mT) * rows.scales[:, None]
    added = torch.matmul(ranks, up)
    return added if x.dim() == 3 else added[:, 0]


def plus_loras(result: Tensor, layer: Any, x: Tensor) -> Tensor:
    """Return a layer's result for x with what the current call's LoRAs add."""
    added = addition(layer, x)
    return result if added is None else result + added


def _add(layer: nn.Module, inputs: Sequence[Tensor], result: Tensor) -> Tensor:
    return plus_loras(result, layer, inputs[0])


def _convolved(
    x: Tensor, down: Tensor, up: Tensor, scales: Tensor, stride: tuple[int, int]
) -> Tensor:
    """`down` [rows, rank, taps, in] is a convolution of each row's own: a product for each tap,
    then one convolution that is the same for all rows."""
    taps, width = down.shape[2], math.isqrt(down.shape[2])
    maps = torch.matmul(down.flatten(1, 2), x.flatten(2))
    maps = maps.view(-1, PAGE_RANK * taps, *x.shape[2:])
    weight = _shifts(width, maps.dtype, maps.device)
    summed = F.conv2d(maps, weight, None, stride, width // 2, groups=PAGE_RANK)
    ranks = summed.view(len(x), -1, summed.shape[2] * summed.shape[3]) * scales[:, :, None]
    return torch.matmul(up.mT, ranks).unflatten(2, summed.shape[2:])


@cache
def _shifts(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return shifts(width).to(device, dtype)
