"""The work of one call of a network: the arithmetic and bytes of every kernel, PyTorch's and ours,
recorded on the meta device.

A tensor that a kernel reads or writes counts once, because repeated reads hit the cache.
estimated_time.py turns the work into milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from engines.pytorch.launches import Launch, noted

Unit = Literal["product", "convolution", "attention", "memory"]
GROUPS = {
    "feed-forward": r"\.ff\.",
    "query, key, value": r"\.to_[qkv]\.|\.(joint|pair)\.",
    "to_out": r"\.to_out\.",
    "1×1 convolutions, proj": r"shortcut|\.proj_(in|out)\.|post_quant",
    "3×3 convolutions": r"conv",
}
"""patterns of weights' names by group of layers; the first match counts"""
ATTENTION, MEMORY, LORAS = "attention", "passes over memory", "ranks of LoRAs"
ALLOCATING = ("aten.empty", "aten.new_empty", "aten._unsafe_view")
OUR_PRODUCTS = ("_product", "_tma_product", "_gated_product")
GATED, RANKS = "_gated_product", "_ranks"
GATED_OPERATIONS = {torch.int8: 13, torch.float8_e4m3fn: 8}
"""extra instructions of each gated value, counted in Triton's code for sm_90
(tests/engines/test_kernels_compile.py). One is ex2.approx, which runs at an eighth of the others'
rate, so 8 is the minimum."""
OUR_ATTENTIONS = {"_attention": "tokens", "_text_attention": "keys"}
"""our kernels' names, and the parameter that counts the keys"""
ATTEND = torch.ops.aten.scaled_dot_product_attention.default
CONVOLVE = torch.ops.aten.convolution.default
BIAS = 2
"""its index among a convolution's arguments"""


@dataclass(frozen=True)
class KernelWork:
    """The work of one kernel. `is_ours`: not a library's; `bits`: the factors' width; `depth`:
    products in each sum; `results`: rows and columns of sums."""

    group: str
    unit: Unit
    is_ours: bool
    bits: int
    flops: float
    bytes: float
    depth: int = 0
    results: tuple[int, int] = (0, 0)
    tokens: int = 0
    """keys of one sequence"""
    head: int = 0
    """channels of a head"""
    operations: float = 0
    """instructions per lane after the sums; assumed not to overlap with them"""


@dataclass
class Recorder(TorchDispatchMode):
    """Records PyTorch's operators while it is active."""

    weights: dict[int, tuple[Tensor, str]]
    works: list[KernelWork] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not ATTEND and func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = attention_output(*args[:2]) if func is ATTEND else func(*args, **(kwargs or {}))
        if func is CONVOLVE and any(is_channels_last(each) for each in args[:2]):
            # cuDNN keeps channels-last. The meta device does not, so copies would follow.
            out = out.contiguous(memory_format=torch.channels_last)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if is_view(func):
            names = [self.weights[id(t)][1] for t in tensors if id(t) in self.weights]
            parts = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
            self.weights |= {id(part): (part, name) for name in names for part in parts}
        elif not str(func).startswith(ALLOCATING):
            results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            work = work_of_operator(func, args, kwargs or {}, out, results, self.weights)
            self.works.append(work)
            if func is CONVOLVE and args[BIAS] is not None:
                # PyTorch adds the bias in a separate pass.
                moved = 2 * moved_bytes(results)
                self.works.append(KernelWork(MEMORY, "memory", False, 16, 0, moved))
        return out


def attention_output(query: Tensor, key: Tensor) -> Tensor:
    """An attention's output in the layout of GPU kernels: the heads of a token are contiguous."""
    return torch.empty_like(query.transpose(1, 2).contiguous()).transpose(1, 2)


def is_channels_last(value: Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)


def is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def work_of_operator(
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    out: Any,
    results: list[Tensor],
    weights: Mapping[int, tuple[Tensor, str]],
) -> KernelWork:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    moved = moved_bytes([*tensors, *results])
    if func is ATTEND:
        query, key = args[:2]
        flops = 4.0 * query.numel() * key.shape[-2]
        bits = 8 * query.element_size()
        heads = {"tokens": key.shape[-2], "head": key.shape[-1]}
        return KernelWork(ATTENTION, "attention", False, bits, flops, moved, **heads)
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return KernelWork(MEMORY, "memory", False, 16, 0, moved)
    flops = float(count(*args, **kwargs, out_val=out))
    bits = 8 * min(t.element_size() for t in tensors)
    name = next((weights[id(t)][1] for t in tensors if id(t) in weights), "")
    result, is_convolution = results[0], "conv" in str(func)
    columns = result.shape[1 if is_convolution else -1]
    depth = round(flops / 2 / result.numel())
    shape = result.numel() // columns, columns
    unit: Unit = "convolution" if is_convolution else "product"
    # A product of two activations belongs to an attention.
    group = group_of(name) if name else ATTENTION
    return KernelWork(group, unit, False, bits, flops, moved, depth, shape)


def work_of_launch(launch: Launch, weights: Mapping[int, tuple[Tensor, str]]) -> KernelWork:
    arguments = launch.by_name
    moved = moved_bytes(launch.tensors) - unread_bytes(launch, arguments)
    if launch.name in OUR_ATTENTIONS:
        count, query = arguments[OUR_ATTENTIONS[launch.name]], arguments["query"]
        bits = 8 * tensor_of(query).element_size()
        flops = 4.0 * arguments["out"].numel() * count
        heads = {"tokens": count, "head": launch.constants["HEAD"]}
        return KernelWork(ATTENTION, "attention", True, bits, flops, moved, **heads)
    if launch.name == RANKS:
        ranks, depth = arguments["out"], arguments["channels"]
        shape = ranks.numel() // ranks.shape[-1], ranks.shape[-1]
        flops = 2.0 * depth * ranks.numel()
        return KernelWork(LORAS, "product", True, 16, flops, moved, depth, shape)
    if launch.name not in OUR_PRODUCTS:
        return KernelWork(MEMORY, "memory", True, 16, 0, moved)
    taps = int(launch.constants.get("TAPS", 1))
    # The weight also has the gates' channels, or the channels of an upsampled map's four quarters.
    columns = arguments["out_channels"] * (2 if launch.name == GATED else 4 if taps == 4 else 1)
    if launch.constants.get("IS_TRANSPOSED"):
        columns = arguments["out"].numel() // arguments["count"]
    depth, shape = taps * arguments["channels"], (arguments["count"], columns)
    if arguments["ranks"] is not None:
        # The LoRAs' products have 16 bits and take twice the time.
        depth += 2 * arguments["ranks"].shape[-1]
    name = next(weights[id(t)][1] for t in launch.tensors if id(t) in weights)
    unit: Unit = "product" if taps == 1 else "convolution"
    work = KernelWork(group_of(name), unit, True, 8, 2.0 * depth * prod(shape), moved, depth, shape)
    if launch.name != GATED:
        return work
    out: Tensor = arguments["out"]
    return replace(work, operations=out.numel() * GATED_OPERATIONS[out.dtype])


def unread_bytes(launch: Launch, arguments: Mapping[str, Any]) -> float:
    """The bytes of the LoRAs' bank that are not on the call's pages."""
    if launch.name != RANKS and arguments.get("ranks") is None:
        return 0.0
    bank = arguments["down" if launch.name == RANKS else "up"]
    return float(stored_bytes(bank) - arguments["pages"].numel() * stored_bytes(bank[0]))


def tensor_of(argument: Any) -> Any:
    """The tensor of an argument or of its descriptor."""
    return getattr(argument, "base", argument)


def moved_bytes(tensors: list[Tensor]) -> float:
    """The bytes of all tensors, each counted once; an expanded dimension counts once."""
    once = {id(t): t for t in tensors}
    return float(sum(stored_bytes(t) for t in once.values()))


def stored_bytes(x: Tensor) -> int:
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return prod(sizes) * x.element_size()


def group_of(name: str) -> str:
    return next((group for group, names in GROUPS.items() if re.search(names, name)), MEMORY)


def work_of(network: nn.Module, call: Callable[[], object]) -> tuple[KernelWork, ...]:
    """The work of `call`, which runs the network once."""
    return tuple(work for _, work in named_work_of(network, call))


def named_work_of(
    network: nn.Module, call: Callable[[], object]
) -> Iterator[tuple[str, KernelWork]]:
    """Yield kernels' names and work: others with an empty name, then ours, in order of launch."""
    named = (*network.named_parameters(), *network.named_buffers())
    weights = {id(t): (t, f".{name}") for name, t in named if name.endswith("weight")}
    with torch.inference_mode(), noted() as launches, Recorder(weights) as recorder:
        call()
    yield from (("", each) for each in recorder.works)
    yield from ((each.name, work_of_launch(each, weights)) for each in launches)
