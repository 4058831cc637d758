"""LoRAs and embeddings in the networks' layers: each row of a call adds its own low-rank products,
and a negative token id selects a vector of an embedding.

The bank has two tensors for each layer, down [pages, rank, in] (of a convolution
[pages, rank, taps, in]) and up [pages, rank, out], and one for each text encoder, vectors. Hooks
add to the layers' results inside `adapted`, which says which pages the rows of a call use. Outside,
layers run alone.
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
"""tensors by the names in `bank_specs`"""
VECTORS = ".vectors"
"""name of embeddings' vectors in the bank, after a text encoder's name"""
TOKENS = "embeddings.token_embedding"
"""the end of the name of a text encoder's table of tokens"""
TRANSFORMERS = ".attentions."
"""part of the names of the UNet's layers that the variant `lora` adapts"""
PROMPT_LAYERS = (".attn2.to_k", ".attn2.to_v")
"""ends of the names of layers that only `unet_prompt` runs"""


@dataclass(frozen=True)
class _Rows:
    """The LoRAs of the current call's rows."""

    bank: Bank
    pages: Tensor
    """[rows, pages]"""
    scales: Tensor
    """[rows, pages × rank]"""


_rows: ContextVar[_Rows | None] = ContextVar("rows with LoRAs", default=None)


@contextmanager
def adapted(bank: Bank, pages: Tensor, scales: Tensor) -> Iterator[None]:
    """While the block runs, the layers in `bank` add these pages, [rows, pages], with these
    scales."""
    dtype = next(iter(bank.values())).dtype
    rank_scales = scales.to(dtype)[:, :, None].expand(-1, -1, PAGE_RANK).flatten(1)
    token = _rows.set(_Rows(bank, pages, rank_scales))
    try:
        yield
    finally:
        _rows.reset(token)


def adapt(part: str, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name a part's layers and register hooks on them; return their weights' shapes by name."""
    shapes = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bank_name = layer_name(part, name)
            shapes[bank_name] = tuple(layer.weight.shape)
            put_hook(layer, (bank_name,))
        elif name.endswith(TOKENS):
            bank_name = part + VECTORS
            shapes[bank_name] = (MOST_VECTORS, layer.embedding_dim)
            name_layer(layer, (bank_name,))
            layer.forward = partial(_embed, layer, layer.forward)
    return shapes


def _embed(layer: nn.Module, plain: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Look up ids in the table, but negative ids among the vectors."""
    rows = _rows.get()
    if rows is None:
        return plain(ids)
    (name,) = names_of(layer)
    vectors = rows.bank[name][(-1 - ids).clamp(min=0)]
    return torch.where((ids < 0)[..., None], vectors, plain(ids.clamp(min=0)))


def put_hook(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Let LoRAs add to a layer's results. A layer that joins several has all their names."""
    name_layer(layer, names)
    layer.register_forward_hook(lambda layer, inputs, result: plus_loras(result, layer, inputs[0]))


def name_layer(layer: Any, names: tuple[str, ...]) -> None:
    layer.bank_names = names


def names_of(layer: Any) -> tuple[str, ...]:
    """Return a layer's names in a bank."""
    return getattr(layer, "bank_names", ())


def bank_specs(shapes: Mapping[str, Sequence[int]], dtype: str) -> tuple[TensorSpec, ...]:
    """Describe the bank's tensors for layers with weights of these shapes, and for vectors of
    embeddings."""

    def describe(name: str, outputs: int, inputs: int, *kernel: int) -> tuple[TensorSpec, ...]:
        if name.endswith(VECTORS):
            return (TensorSpec(name, dtype, (outputs, inputs)),)
        taps = (math.prod(kernel),) if kernel else ()
        down = TensorSpec(f"{name}.down", dtype, ("bank", PAGE_RANK, *taps, inputs))
        return down, TensorSpec(f"{name}.up", dtype, ("bank", PAGE_RANK, outputs))

    return tuple(spec for name, shape in shapes.items() for spec in describe(name, *shape))


def shifts(width: int) -> Tensor:
    """Return the weights of a convolution that shifts the map of each of a kernel's taps and adds
    them up, for each rank."""
    taps = torch.eye(width * width).view(1, width * width, width, width)
    return taps.repeat(PAGE_RANK, 1, 1, 1)


def is_adapted(graph: str, layer: str) -> bool:
    """Return whether a network of VARIANTS adapts one of its layers."""
    is_lora = lora_name(graph) == VARIANTS["lora"]["unet_deep"]
    return not is_lora or TRANSFORMERS in layer


def bank_of(graph: str, network: nn.Module, bank: Bank) -> Bank:
    """Return the tensors of the bank that a network of VARIANTS reads."""
    layers = dict.fromkeys(name for each in network.modules() for name in names_of(each))
    skipped = () if graph.startswith("unet_prompt") else PROMPT_LAYERS
    names = [name for name in layers if is_adapted(graph, name) and not name.endswith(skipped)]
    return {spec.name: bank[spec.name] for spec in bank_specs(dict.fromkeys(names, (0, 0)), "")}


def addition(layer: Any, x: Tensor) -> Tensor | None:
    """Return what the current call's LoRAs add to a layer's result for x; None if nothing."""
    rows = _rows.get()
    if rows is None or not is_adapting(layer):
        return None
    stride = getattr(layer, "stride", (1, 1))
    parts = [_product(x, rows, name, stride) for name in names_of(layer)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def is_adapting(layer: Any) -> bool:
    """Return whether the current call's LoRAs add to a layer's result."""
    rows = _rows.get()
    return rows is not None and any(f"{name}.down" in rows.bank for name in names_of(layer))


def factors_of(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return the current call's LoRAs of a linear layer, for kernels: the bank's down and up, the
    rows' pages, and the scales of their ranks. None if there are none."""
    rows = _rows.get()
    if rows is None or f"{name}.down" not in rows.bank:
        return None
    return rows.bank[f"{name}.down"], rows.bank[f"{name}.up"], rows.pages, rows.scales


def _product(x: Tensor, rows: _Rows, name: str, stride: tuple[int, int]) -> Tensor:
    down, up = (rows.bank[f"{name}.{side}"][rows.pages].flatten(1, 2) for side in ("down", "up"))
    if down.dim() == 4:
        return _convolution(x, down, up, rows.scales, stride)
    tokens = (x if x.dim() == 3 else x[:, None]).to(down.dtype)
    ranks = torch.matmul(tokens, down.mT) * rows.scales[:, None]
    added = torch.matmul(ranks, up)
    return added if x.dim() == 3 else added[:, 0]


def plus_loras(result: Tensor, layer: Any, x: Tensor) -> Tensor:
    """Add what the current call's LoRAs add to a layer's result for x."""
    added = addition(layer, x)
    return result if added is None else result + added


def _convolution(
    x: Tensor, down: Tensor, up: Tensor, scales: Tensor, stride: tuple[int, int]
) -> Tensor:
    """Convolve each row with its own `down` [rows, rank, taps, in]: a product for each tap, then
    one convolution, the same for all rows."""
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
