"""LoRAs and embeddings of requests, in a bank of limited size. A file is loaded when a request asks
for it and kept while the request runs. A full bank drops the least recently used file.

The bank belongs to the backend: tensors at fixed addresses that calls read (engines/low_rank.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from engines.embeddings import Embedding, read_embedding
from engines.file_loading import START_S, LoadingShelf, ShelvedFile, load_bytes, refuse_unreadable
from engines.lora_weights import MAX_RANK, LowRank, read_lora
from engines.low_rank import TRANSFORMERS, VECTORS, Bank
from sdxl.adapters import Adapters, NoRoom, Pages, Use
from sdxl.catalogue import AdapterFile, Kind
from sdxl.engine import torch_dtype
from sdxl.flight import PLAIN, Variant
from sdxl.params import InvalidParams
from sdxl.specs import MOST_PAGES, MOST_VECTORS, PAGE_COUNTS, PAGE_RANK, TensorSpec

BANK_BYTES = 9 * 2**27
"""bytes of a model's bank on a CPU; a LoRA for SDXL of the highest rank needs them in 16 bits"""
LEAST_PAGES = MAX_RANK // PAGE_RANK
"""A bank holds at least one LoRA of the highest rank."""
GPU_SHARE = 0.1
"""the bank's share of a GPU's memory"""
UNET = "unet."
TEXT_PARTS = ("text_encoder", "text_encoder_2")
TEXT_LAYER = re.compile(r"(?P<before>text_encoder\..*layers\.)(?P<number>\d+)(?P<after>\..*)")


def new_bank(specs: Iterable[TensorSpec], device: torch.device) -> Bank:
    """Allocate a bank of these tensors. Its pages are zeros; page 0 stays so."""
    tensors = {spec.name: spec for spec in specs}.values()
    paged = [t for t in tensors if t.free_axes]
    page_bytes = sum(math.prod(t.shape({"bank": 1})) * torch_dtype(t).itemsize for t in paged)
    room = BANK_BYTES
    if device.type == "cuda":
        room = int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    pages = min(max(room // page_bytes, 1 + LEAST_PAGES), MOST_PAGES)
    return {
        t.name: torch.zeros(t.shape({"bank": pages}), dtype=torch_dtype(t), device=device)
        for t in tensors
    }


def _count_pages(bank: Bank) -> int:
    """Return the number of pages that LoRAs can take: all but page 0."""
    return next(len(tensor) for name, tensor in bank.items() if name.endswith(".down")) - 1


def _layer_tensors(bank: Bank) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each layer's `down` and `up`."""
    names = [name.removesuffix(".down") for name in bank if name.endswith(".down")]
    return {name: (bank[f"{name}.down"], bank[f"{name}.up"]) for name in names}


def shapes_of(bank: Bank) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that LoRAs may adapt: the bank's layers, and the first text
    encoder's last layer, which no graph runs."""
    shapes = {name: _weight_shape(*pair) for name, pair in _layer_tensors(bank).items()}
    layers = [match for name in shapes if (match := TEXT_LAYER.fullmatch(name))]
    last = 1 + max((int(match["number"]) for match in layers), default=-1)
    unused = {
        f"{match['before']}{last}{match['after']}": shapes[match.group()]
        for match in layers
        if match["number"] == "0"
    }
    return shapes | unused


def _weight_shape(down: Tensor, up: Tensor) -> tuple[int, ...]:
    """Return the shape of a layer's weight from the layer's tensors in the bank."""
    side = math.isqrt(down.shape[2]) if down.dim() == 4 else 0
    return (up.shape[2], down.shape[-1], *[side] * 2) if side else (up.shape[2], down.shape[-1])


@dataclass(eq=False)
class _Loaded(ShelvedFile):
    """A file in the bank."""

    slots: tuple[int, ...]
    """a LoRA's pages; an embedding's vectors"""
    has_text: bool = True
    variant: str = ""
    """the UNet's variant; empty if only text encoders are adapted"""


USUAL = _Loaded((1, 2), variant="lora")
"""what a LoRA counts as until it is loaded: rank 32 of the transformers"""


@dataclass
class _Slots:
    """The bank's numbered slots, and the files in them, the least recently used first."""

    free: list[int] = field(default_factory=list)
    loaded: OrderedDict[AdapterFile, _Loaded] = field(default_factory=OrderedDict)

    def take(self, count: int, file: AdapterFile) -> tuple[int, ...]:
        """Take free slots. Drop unused files if there are too few."""
        for other, loaded in list(self.loaded.items()):
            if len(self.free) >= count:
                break
            if not loaded.leases:
                self.free += self.loaded.pop(other).slots
        if len(self.free) < count:
            raise NoRoom(f"other requests leave no room for {file.name!r}; try again")
        return tuple(self.free.pop() for _ in range(count))


@dataclass
class BankShelf(LoadingShelf):
    """Implements sdxl.adapters.AdapterShelf."""

    new_bank: Callable[[], Bank]
    """prepares the networks with LoRAs; called when the first file is loaded"""
    steps: Mapping[str, Tensor] = field(default_factory=dict)
    """input steps of 8-bit layers; their banks are divided by them"""
    _slots: Mapping[Kind, _Slots] = field(
        default_factory=lambda: {"lora": _Slots(), "embedding": _Slots()}
    )

    @cached_property
    def bank(self) -> Bank:
        bank = self.new_bank()
        self._slots["lora"].free = list(range(_count_pages(bank), 0, -1))
        self._slots["embedding"].free = list(range(MOST_VECTORS - 1, -1, -1))
        return bank

    @property
    def most_pages(self) -> int:
        """The most pages of one request: a call and the bank limit them."""
        return min(PAGE_COUNTS[-1], _count_pages(self.bank))

    def delay_s(self, uses: Sequence[Use]) -> float:
        missing = {f: load_bytes(f) for f, *_ in uses if f not in self._slots[f.kind].loaded}
        start_s = 0.0 if "bank" in vars(self) else START_S
        return bool(uses) * start_s + self.byte_s * sum(missing.values())

    def variant(self, uses: Sequence[Use]) -> Variant:
        loras = self._slots["lora"].loaded
        loaded = [loras.get(file, USUAL) for file, *_ in uses if file.kind == "lora"]
        pages = sum(len(each.slots) for each in loaded if each.variant)
        count = next((count for count in (0, *PAGE_COUNTS) if count >= pages), PAGE_COUNTS[-1])
        return reduce(Variant.joined, (Variant(each.variant, count) for each in loaded), PLAIN)

    def lease(self, uses: Sequence[Use]) -> Adapters:
        with self._lock:
            leases: list[_Lease] = []
            for file, _, _ in uses:
                leases.append(_Lease(file, self._get(file)))
                self._hold(leases[-1].loaded, leases[-1])
                _check_room(leases, self.most_pages)
            return _adapters(leases, uses)

    def _get(self, file: AdapterFile) -> _Loaded:
        # Prepares the networks, which START_S counts, before the clock starts.
        _, loaded = self.bank, self._slots[file.kind].loaded
        if file not in loaded:
            with self._timed(file):
                loaded[file] = self._load(file)
        loaded.move_to_end(file)
        return loaded[file]

    def _load(self, file: AdapterFile) -> _Loaded:
        # Read completely before slots are taken: an error after that would lose them.
        with refuse_unreadable(file):
            content, digests = self._read(file), file.digests
        with torch.inference_mode():
            if isinstance(content, Embedding):
                return replace(self._put_embedding(file, content), digests=digests)
            return replace(self._put_lora(file, content), digests=digests)

    def _read(self, file: AdapterFile) -> Embedding | dict[str, LowRank]:
        if file.kind == "lora":
            return read_lora(file.path, shapes_of(self.bank))
        first, second = (self.bank[part + VECTORS].shape[1] for part in TEXT_PARTS)
        return read_embedding(file.path, (first, second))

    def _put_embedding(self, file: AdapterFile, embedding: Embedding) -> _Loaded:
        slots = self._slots["embedding"].take(len(embedding.clip_l), file)
        for part, vectors in zip(TEXT_PARTS, (embedding.clip_l, embedding.clip_g), strict=True):
            bank = self.bank[part + VECTORS]
            bank[list(slots)] = vectors.to(bank)
        return _Loaded(slots)

    def _put_lora(self, file: AdapterFile, layers: Mapping[str, LowRank]) -> _Loaded:
        rank = max(len(each.down) for each in layers.values())
        pages = self._slots["lora"].take(-(-rank // PAGE_RANK), file)
        for index, page in enumerate(pages):
            self._write(page, layers, slice(index * PAGE_RANK, (index + 1) * PAGE_RANK))
        unet = [name for name in layers if name.startswith(UNET)]
        variant = "locon" if any(TRANSFORMERS not in name for name in unet) else "lora"
        return _Loaded(pages, len(unet) < len(layers), variant if unet else "")

    def _write(self, page: int, layers: Mapping[str, LowRank], ranks: slice) -> None:
        for name, (downs, ups) in _layer_tensors(self.bank).items():
            down, up = downs[page].zero_(), ups[page].zero_()
            if name in layers:
                rows, columns = layers[name].down[ranks], layers[name].up[:, ranks]
                if name in self.steps:
                    rows = rows / self.steps[name].to(rows)
                # In a convolution's weight, inputs come before taps; in the bank, after them.
                kernel = rows.unflatten(1, (-1, down.shape[1])).mT if down.dim() == 3 else rows
                down[: len(rows)] = kernel.to(down.dtype)
                up[: len(rows)] = columns.t().to(up.dtype)


@dataclass(eq=False)
class _Lease:
    """Keeps a file in the bank while this object exists."""

    file: AdapterFile
    loaded: _Loaded


def _check_room(leases: Sequence[_Lease], most_pages: int) -> None:
    """Refuse a request that needs more than the empty bank has."""
    slots = Counter[Kind]()
    for each in leases:
        slots[each.file.kind] += len(each.loaded.slots)
    if slots["lora"] > most_pages:
        needed = f"must have at most {most_pages * PAGE_RANK} ranks together"
        raise InvalidParams("loras", slots["lora"] * PAGE_RANK, needed)
    if slots["embedding"] > MOST_VECTORS:
        needed = f"must name embeddings of at most {MOST_VECTORS} vectors together"
        raise InvalidParams("prompt", slots["embedding"], needed)


def _adapters(leases: Sequence[_Lease], uses: Sequence[Use]) -> Adapters:
    unet, text, name = [], [], ""
    vectors: list[int] = []
    for lease, (file, weight, text_weight) in zip(leases, uses, strict=True):
        loaded = lease.loaded
        if file.kind == "embedding":
            vectors += loaded.slots
            continue
        if weight and loaded.variant:
            unet += [(page, weight) for page in loaded.slots]
            name = Variant(name).joined(Variant(loaded.variant)).name
        if text_weight and loaded.has_text:
            text += [(page, text_weight) for page in loaded.slots]
    in_unet = _pages(unet)
    files = tuple((each.file, each.loaded.digests) for each in leases)
    variant = Variant(name, in_unet.count)
    return Adapters(in_unet, _pages(text), variant, tuple(vectors), files, leases=leases)


def _pages(used: Sequence[tuple[int, float]]) -> Pages:
    return Pages(tuple(page for page, _ in used), tuple(scale for _, scale in used))
