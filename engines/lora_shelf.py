"""LoRAs of requests in a bank of limited size: loaded when a request asks for them, kept while it
runs, and dropped for others when the bank is full, the least recently used first.

The bank is the backend's: tensors at fixed addresses that calls read (sdxl/networks/low_rank.py).
"""

from __future__ import annotations

import math
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor

from engines.lora_weights import LoraError, LowRank, read_lora
from sdxl.adapters import Adapters, NoRoom, Pages, Use
from sdxl.catalogue import AdapterFile
from sdxl.cost import smoothed
from sdxl.engine import torch_dtype
from sdxl.flight import PLAIN, Variant
from sdxl.networks.low_rank import TRANSFORMERS, Bank
from sdxl.params import InvalidParams
from sdxl.specs import MOST_PAGES, PAGE_COUNTS, PAGE_RANK, TensorSpec

BANK_BYTES = 2**30
"""of one model's LoRAs at a time, on a CPU"""
GPU_SHARE = 0.1
"""of a GPU's memory for them"""
START_S = 2.0
"""seconds to prepare the networks with LoRAs"""
FIRST_BYTES_S = 1 / 2**29
"""seconds to load a byte, until it is measured"""
UNET = "unet."
TEXT_LAYER = re.compile(r"(?P<before>text_encoder\..*layers\.)(?P<number>\d+)(?P<after>\..*)")


def new_bank(specs: Iterable[TensorSpec], device: torch.device) -> Bank:
    """Allocate a bank of these tensors, whose pages add nothing. Page 0 stays so."""
    tensors = {spec.name: spec for spec in specs}.values()
    page_bytes = sum(math.prod(t.shape({"bank": 1})) * torch_dtype(t).itemsize for t in tensors)
    pages = min(1 + max(_bank_bytes(device) // page_bytes, PAGE_COUNTS[-1]), MOST_PAGES)
    made = {
        t.name: torch.zeros(t.shape({"bank": pages}), dtype=torch_dtype(t), device=device)
        for t in tensors
    }
    names = [name.removesuffix(".down") for name in made if name.endswith(".down")]
    return {name: (made[f"{name}.down"], made[f"{name}.up"]) for name in names}


def _bank_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return BANK_BYTES
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)


def shapes_of(bank: Bank) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that LoRAs may adapt: those of the bank, and of the first
    text encoder's last layer, which no graph runs."""
    shapes = {name: weight_shape(*pair) for name, pair in bank.items()}
    layers = [match for name in shapes if (match := TEXT_LAYER.fullmatch(name))]
    last = 1 + max((int(match["number"]) for match in layers), default=-1)
    unused = {
        f"{match['before']}{last}{match['after']}": shapes[match.group()]
        for match in layers
        if match["number"] == "0"
    }
    return shapes | unused


def weight_shape(down: Tensor, up: Tensor) -> tuple[int, ...]:
    """Return the shape of the weight of a layer with this bank."""
    side = math.isqrt(down.shape[2]) if down.dim() == 4 else 0
    return (up.shape[2], down.shape[-1], *[side] * 2) if side else (up.shape[2], down.shape[-1])


def named(bank: Bank) -> dict[str, Tensor]:
    """Return a bank's tensors by the names of a graph's inputs."""
    return {
        f"{name}.{side}": tensor
        for name, pair in bank.items()
        for side, tensor in zip(("down", "up"), pair, strict=True)
    }


@dataclass(eq=False)
class _Loaded:
    """A LoRA in the bank."""

    pages: tuple[int, ...]
    has_text: bool
    variant: str
    """of the UNet; empty if only text encoders are adapted"""
    leases: int = 0


USUAL = _Loaded((1, 2), has_text=True, variant="lora")
"""A LoRA that is not loaded counts as this: rank 32 of the transformers."""


@dataclass
class LoraShelf:
    """Implements sdxl.adapters.AdapterShelf."""

    new_bank: Callable[[], Bank]
    """prepares the networks with LoRAs; called when the first LoRA is loaded"""
    steps: Mapping[str, Tensor] = field(default_factory=dict)
    """of the inputs of 8-bit layers, by which their banks are divided"""
    byte_s: float = FIRST_BYTES_S
    loads: int = 0
    _loaded: OrderedDict[AdapterFile, _Loaded] = field(default_factory=OrderedDict)
    """by the file as it was, the least recently used first; a digest would take a second"""
    _free: list[int] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @cached_property
    def bank(self) -> Bank:
        bank = self.new_bank()
        first, _ = next(iter(bank.values()))
        self._free = list(range(len(first) - 1, 0, -1))
        return bank

    def delay_s(self, uses: Sequence[Use]) -> float:
        missing = {file: file.bytes for file, *_ in uses if file not in self._loaded}
        start_s = 0.0 if "bank" in vars(self) else START_S
        return bool(uses) * start_s + self.byte_s * sum(missing.values())

    def variant(self, uses: Sequence[Use]) -> Variant:
        loaded = [self._loaded.get(file, USUAL) for file, *_ in uses]
        pages = sum(len(each.pages) for each in loaded if each.variant)
        count = next((each for each in (0, *PAGE_COUNTS) if each >= pages), PAGE_COUNTS[-1])
        return reduce(Variant.joined, (Variant(each.variant, count) for each in loaded), PLAIN)

    def lease(self, uses: Sequence[Use]) -> Adapters:
        with self._lock:
            leases: list[_Lease] = []
            for file, _, _ in uses:
                leases.append(_Lease(self, self._get(file)))
                _check_ranks(leases)
            return _adapters(leases, uses)

    def _get(self, file: AdapterFile) -> _Loaded:
        if file not in self._loaded:
            began = time.perf_counter()
            self._loaded[file] = self._load(file)
            took = time.perf_counter() - began
            self.byte_s = smoothed(self.byte_s if self.loads else None, took / max(file.bytes, 1))
            self.loads += 1
        self._loaded.move_to_end(file)
        return self._loaded[file]

    def _load(self, file: AdapterFile) -> _Loaded:
        try:
            layers = read_lora(file.path, shapes_of(self.bank))
        except LoraError as error:
            raise InvalidParams("loras", None, f"names {file.name!r}, which {error}") from error
        ranks = max(len(each.down) for each in layers.values())
        pages = self._take(-(-ranks // PAGE_RANK), file.name)
        with torch.inference_mode():
            for index, page in enumerate(pages):
                self._write(page, layers, slice(index * PAGE_RANK, (index + 1) * PAGE_RANK))
        unet = [name for name in layers if name.startswith(UNET)]
        variant = "locon" if any(TRANSFORMERS not in name for name in unet) else "lora"
        return _Loaded(pages, len(unet) < len(layers), variant if unet else "")

    def _write(self, page: int, layers: Mapping[str, LowRank], ranks: slice) -> None:
        for name, (downs, ups) in self.bank.items():
            down, up = downs[page].zero_(), ups[page].zero_()
            if name in layers:
                rows, columns = layers[name].down[ranks], layers[name].up[:, ranks]
                if name in self.steps:
                    rows = rows / self.steps[name].to(rows)
                # A convolution's inputs come before its taps in a weight.
                kernel = rows.unflatten(1, (-1, down.shape[1])).mT if down.dim() == 3 else rows
                down[: len(rows)] = kernel.to(down.dtype)
                up[: len(rows)] = columns.t().to(up.dtype)

    def _take(self, count: int, name: str) -> tuple[int, ...]:
        """Take free pages; drop unused LoRAs for them."""
        for file, loaded in list(self._loaded.items()):
            if len(self._free) >= count:
                break
            if not loaded.leases:
                self._free += self._loaded.pop(file).pages
        if len(self._free) < count:
            raise NoRoom(f"other requests' LoRAs leave no room for {name!r}; try again")
        return tuple(self._free.pop() for _ in range(count))


class _Lease:
    """Keeps a LoRA in the bank while it lives."""

    def __init__(self, shelf: LoraShelf, loaded: _Loaded) -> None:
        self.loaded = loaded
        loaded.leases += 1
        weakref.finalize(self, _release, shelf, loaded)


def _release(shelf: LoraShelf, loaded: _Loaded) -> None:
    with shelf._lock:
        loaded.leases -= 1


def _check_ranks(leases: Sequence[_Lease]) -> None:
    """So a request alone always finds room in the bank."""
    pages = sum(len(each.loaded.pages) for each in leases)
    if pages > PAGE_COUNTS[-1]:
        needed = f"must have at most {PAGE_COUNTS[-1] * PAGE_RANK} ranks together"
        raise InvalidParams("loras", pages * PAGE_RANK, needed)


def _adapters(leases: Sequence[_Lease], uses: Sequence[Use]) -> Adapters:
    unet, text, name = [], [], ""
    for lease, (_, weight, text_weight) in zip(leases, uses, strict=True):
        loaded = lease.loaded
        if weight and loaded.variant:
            unet += [(page, weight) for page in loaded.pages]
            name = Variant(name).joined(Variant(loaded.variant)).name
        if text_weight and loaded.has_text:
            text += [(page, text_weight) for page in loaded.pages]
    in_unet = _pages(unet)
    return Adapters(in_unet, _pages(text), Variant(name, in_unet.count), leases)


def _pages(used: Sequence[tuple[int, float]]) -> Pages:
    return Pages(tuple(page for page, _ in used), tuple(scale for _, scale in used))
