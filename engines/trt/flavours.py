"""The differences between the two TensorRTs, as data. Everything else is one code path.

`tensorrt` is the data-centre library. It builds on the GPU for which it builds. `tensorrt-rtx`
compiles for a list of architectures without a GPU, and finishes on the GPU at load.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from engines.folders.targets import Target
from sdxl.params import InvalidParams


class BackendFailed(RuntimeError):
    """An installed backend cannot load or run a network."""


class BackendMissing(RuntimeError):
    """A library or GPU that a backend needs is missing."""


@dataclass(frozen=True)
class Flavour:
    """One TensorRT."""

    name: str
    module: str
    architectures: tuple[str, ...] = ()
    """the targets; empty for the local GPU"""

    @property
    def times_kernels(self) -> bool:
        """Whether it chooses kernels by timing them on the local GPU, for which it builds. Then the
        times can be stored, and a profile for one exact shape is faster. If kernels are specialised
        at run time, such a profile only takes time to compile."""
        return not self.architectures

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def load(self) -> Any:
        """Import the library's module."""
        if not self.is_installed:
            raise BackendMissing(f"{self.name} is not installed; run pip install {self.name}")
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise BackendMissing(f"{self.name} does not load: {error}") from error

    @property
    def version(self) -> str:
        return str(self.load().__version__)


TENSORRT = Flavour("tensorrt", "tensorrt")
TENSORRT_RTX = Flavour(
    "tensorrt-rtx", "tensorrt_rtx", ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
)
FLAVOURS = {flavour.name: flavour for flavour in (TENSORRT, TENSORRT_RTX)}
"""the fastest first"""


def flavour_named(name: str) -> Flavour:
    if name not in FLAVOURS:
        raise InvalidParams.unknown("backend", name, FLAVOURS)
    return FLAVOURS[name]


def check_buildable(flavour: Flavour, target: Target, local: Target | None) -> None:
    """Refuse at once a build that would fail after minutes, or build for the wrong GPU."""
    if flavour.times_kernels and local != target:
        found = f"a {local.name}" if local else "no NVIDIA GPU"
        raise BackendMissing(
            f"{flavour.name} builds on the GPU it builds for: found {found} here, "
            f"expected a {target.name}"
        )
    if flavour.architectures and target.sm not in flavour.architectures and local != target:
        raise BackendMissing(
            f"{flavour.name} builds for {', '.join(flavour.architectures)}; "
            f"{target.name} is {target.sm}; use --backend tensorrt on a {target.name}"
        )
