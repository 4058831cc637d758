"""Chooses the tile of a product: the fastest of those that fit the GPU.

Tiles are measured only while a service warms up. A product that was not measured uses the tile that
is usually fastest. Results are stored for each GPU, driver, PyTorch, Triton and version of the
kernels. `tiles_shipped` has results for some GPUs, so a first start there measures few products.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sdxl.files import write_atomic
from sdxl.places import home

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("tiles_shipped")
KIB = 1024
MOST_SUMS = 64
"""sums of a thread, in a gated product on a GPU with tensor memory"""
TENSOR_MEMORY = (10, 11)
"""major compute capabilities of data-centre Blackwells, whose tensor cores keep sums in tensor
memory"""
FP8, HALVES = "float8_e4m3fn", ("float16", "bfloat16")
Run = Callable[["Tile"], None]
Measure = Callable[[Callable[[], None]], float]
"""returns the seconds of one run"""


@dataclass(frozen=True)
class Tile:
    """`m` pixels or tokens by `n` output channels; `k` input channels at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @property
    def sums(self) -> int:
        """The sums of a thread."""
        return self.m * self.n // (32 * self.warps)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of loads in flight, 8-bit numbers of both factors."""
        return (self.m + self.n) * self.k * self.stages


USUAL = Tile(128, 128, 128, 8, 3)
"""the tile that is fastest most often, and fits every GPU"""
TILES = (
    USUAL,
    Tile(256, 128, 128, 8, 4),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 64, 128, 4, 4),
    Tile(64, 64, 128, 4, 4),
)
TILES_WITH_RESIDUAL = (USUAL, Tile(128, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4))
"""no larger tiles: they have no registers for the residual, and spill"""
GATED_TILES = (
    USUAL,
    Tile(256, 128, 128, 8, 3),
    Tile(128, 128, 128, 4, 3),
    Tile(128, 64, 128, 4, 4),
)
"""tiles of the feed-forward's first product with its GEGLU; half of `n` are values, half gates. A
multiprocessor runs two tiles of four warps: one multiplies while the other ends."""
HALF_TILES = (
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(256, 64, 64, 8, 4),
    Tile(128, 32, 64, 4, 4),
)
"""tiles of a product in 16 bits"""


@dataclass(frozen=True)
class TileProblem:
    """The properties of a product that decide its tile."""

    number: str
    taps: int
    channels: int
    out_channels: int
    count: int
    has_residual: bool
    is_gated: bool = False
    is_transposed: bool = False
    places: int = 0
    """size of a bordered slot, if the map is in slots"""

    @property
    def key(self) -> str:
        """The key of the measured tile. Sizes within a factor of four share a key, and so do all
        sizes above 2^16 rows."""
        size = min((self.count - 1).bit_length(), 17) // 2
        kind = f"{self.number} {self.taps} {self.channels} {self.out_channels}"
        names = ("residual", "gated", "turned", f"slots of {self.places}")
        values = (self.has_residual, self.is_gated, self.is_transposed, self.places)
        return " ".join([f"{kind} {size}", *itertools.compress(names, values)])


@dataclass
class Tiles:
    """The tiles of one GPU. Results are stored in `file`; without a file, in this process."""

    shared_bytes: int
    has_tensor_memory: bool = False
    file: Path | None = None
    chosen: dict[str, Tile] = field(default_factory=dict)
    is_measuring: bool = False
    shipped: Mapping[str, Tile] = field(default_factory=dict)
    """results that were measured on a GPU of this name before"""

    def __post_init__(self) -> None:
        if self.file is None:
            return
        try:
            self.chosen = table_of(self.file)
        except FileNotFoundError:
            # Nothing has been measured yet.
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s is no table of tiles (%s); they are measured anew", self.file, error)

    def choose(self, problem: TileProblem, run: Run, measure: Measure) -> Tile:
        known = self.chosen.get(problem.key) or self.shipped.get(problem.key)
        if known is not None:
            return known
        tiles = self.fitting(problem)
        if not self.is_measuring:
            return tiles[0]
        seconds = {tile: measure(lambda tile=tile: run(tile)) for tile in tiles}  # type: ignore[misc]
        self.chosen[problem.key] = best = min(tiles, key=seconds.__getitem__)
        self._store()
        return best

    def fitting(self, problem: TileProblem) -> tuple[Tile, ...]:
        """Return the tiles that fit the GPU, the one that is usually fastest first."""
        tiles: tuple[Tile, ...] = TILES_WITH_RESIDUAL if problem.has_residual else TILES
        if problem.number in HALVES:
            tiles = HALF_TILES
        elif problem.is_gated:
            tiles = GATED_TILES
        return tuple(tile for tile in tiles if self._fits(tile, problem))

    def _fits(self, tile: Tile, problem: TileProblem) -> bool:
        # FP8 sums from tensor memory spill (tests/engines/test_kernels_compile.py): sums of 256
        # lines, and of a gated product, which needs both halves at the same time.
        may_spill = self.has_tensor_memory and problem.number == FP8
        if may_spill and (tile.m > 128 or (problem.is_gated and tile.sums > MOST_SUMS)):
            return False
        width = 2 if problem.number in HALVES else 1
        is_whole = problem.places % tile.m == 0
        return is_whole and width * tile.shared_bytes <= self.shared_bytes

    def _store(self) -> None:
        if self.file is None:
            return
        stored = {key: astuple(tile) for key, tile in sorted(self.chosen.items())}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.file, json.dumps(stored, indent=1).encode())
        except OSError as error:
            log.warning("tiles are measured anew at the next start: %s", error)


def table_of(file: Path) -> dict[str, Tile]:
    stored = json.loads(file.read_text(encoding="utf-8"))
    return {key: Tile(*numbers) for key, numbers in stored.items()}


@contextmanager
def measuring(*owners: Any) -> Iterator[None]:
    """Measure unknown products while the block runs. It takes time, so no picture should wait."""
    for each in owners:
        each.is_measuring = True
    try:
        yield
    finally:
        for each in owners:
            each.is_measuring = False


@cache
def tiles_of(device: torch.device, kernels: str) -> Tiles:
    """Return the tiles of a GPU. `kernels` identifies the version of the kernels."""
    if device.type != "cuda":
        return Tiles(99 * KIB)
    gpu = torch.cuda.get_device_properties(device)
    versions = (gpu.name, driver_version(), torch.__version__, kernels)
    shared_bytes = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]
    file, has_tensor_memory = place_of(versions), gpu.major in TENSOR_MEMORY
    return Tiles(shared_bytes, has_tensor_memory, file, shipped=shipped_for(gpu.name))


def shipped_for(gpu: str) -> dict[str, Tile]:
    file = SHIPPED / f"{file_name_of(gpu)}.json"
    return table_of(file) if file.exists() else {}


def file_name_of(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def place_of(versions: tuple[str, ...]) -> Path:
    """Return the file of measured tiles. `versions` are the GPU's name, then everything else that a
    measurement depends on."""
    digest = hashlib.sha256("\n".join(versions).encode()).hexdigest()[:12]
    return home() / "tiles" / f"{file_name_of(versions[0])}-{digest}.json"


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the kernel module's version, or in a container without it the driver's CUDA
    version."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
