"""A folder of ONNX graphs and the weights they point into: what export writes and backends read.

`export.json` is described here alone. Opening a folder checks that it is whole: every file is there
with its digest, and the graphs' tensors are those of specs.py. It knows no ONNX and no runtime.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engines.folders.manifest import PRECISIONS as PRECISIONS
from engines.folders.manifest import ModelFolder, check_fields, spec_as_dict, spec_from_dict
from sdxl.digests import settled_stamps, sha256_of, stamps
from sdxl.specs import ModelSpec

FILE = "export.json"
T = TypeVar("T")
HASHED_AT_ONCE = 4
TRIES = 3
"""Another export that links the same weights changes their ctime."""

WEIGHT, SCALE = ".weight", ".weight_scale"
INPUT_SCALE, SMOOTHING = ".input_scale", ".input_smoothing"
"""A quantised layer's tensors in the file of changed tensors, after its name. `weight_scale`: a
number for each output channel; `input_scale`: one number; `input_smoothing`: one for each input
channel, if SmoothQuant moved part of the input's range into the weight."""

IN_TORCH = "torch"
"""in a parity: the findings about PyTorch's own 8 bits"""


class ExportError(RuntimeError):
    """An export that cannot be used: its folder, what is wrong, what is needed."""


@dataclass(frozen=True)
class DataFile:
    """A file of weights beside the graphs."""

    sha256: str
    bytes: int
    source: str | None = None
    """the checkpoint's file it is a link to or a copy of, below the checkpoint's folder"""


@dataclass(frozen=True)
class Graph:
    """One ONNX file, the data files that it points into, and its tensors."""

    file: str
    sha256: str
    data: tuple[str, ...]
    spec: ModelSpec


@dataclass(frozen=True)
class ExportFolder(ModelFolder):
    """An export, as export.json describes it."""

    FILE, FORMAT, COMMAND = FILE, 2, "sdxl export"
    KIND, REMEDY, ERROR = "an export's description", "export again", ExportError

    graphs: Mapping[str, Graph]
    data: Mapping[str, DataFile]
    loras: tuple[Any, ...] = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """what 8-bit scales were found on"""
    parity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> ExportFolder:
        """Read an export, hash its graphs and check the sizes of its weights; `verify` hashes the
        weights too."""
        export = cls.read(folder)
        export.check_specs(cls.REMEDY)
        for graph in export.graphs.values():
            path = export.file(graph.file)
            export.check_digest(path, sha256_of(path), graph.sha256)
        for name, data in export.data.items():
            path = export.file(name)
            export.check_size(path, path.stat().st_size, data.bytes)
        if verify:
            export.check_files()
        return export

    @classmethod
    def parse(cls, value: dict[str, Any]) -> dict[str, Any]:
        graphs = {name: _graph(name, graph) for name, graph in value.pop("graphs").items()}
        data = {name: check_fields(DataFile(**file)) for name, file in value.pop("data").items()}
        for graph in graphs.values():
            if missing := set(graph.data) - set(data):
                raise ValueError(f"{graph.file} points into {missing}, which `data` lacks")
        return {**value, "graphs": graphs, "data": data, "loras": tuple(value["loras"])}

    def as_dict(self) -> dict[str, Any]:
        graphs = {
            name: {"file": graph.file, "sha256": graph.sha256, "data": list(graph.data)}
            | spec_as_dict(graph.spec)
            for name, graph in self.graphs.items()
        }
        data = {name: asdict(file) for name, file in self.data.items()}
        return {**super().as_dict(), "graphs": graphs, "data": data, "loras": [*self.loras]}

    @property
    def is_checked(self) -> bool:
        """Whether it was compared with the model; an export that failed is not published."""
        return bool(self.parity.get("findings"))

    @property
    def unchecked_in_torch(self) -> str | None:
        """Why PyTorch's own 8 bits, which are more layers than the graphs', may differ from the
        model; None if they passed the check."""
        parity = self.parity.get(IN_TORCH)
        if not isinstance(parity, Mapping) or not parity.get("findings"):
            return "PyTorch's own 8 bits were not compared with the model"
        return str(parity.get("note") or "") or None

    @property
    def specs(self) -> dict[str, ModelSpec]:
        return {name: graph.spec for name, graph in self.graphs.items()}

    @property
    def numbers(self) -> tuple[Path, ...]:
        """The files of the UNet's 8-bit weights and scales."""
        if (name := changed_file("unet")) not in self.data:
            raise ExportError(f"{self.folder}: no {name} there; expected an int8 or fp8 export")
        names = [name, further_file("unet")]
        return tuple(self.file(each) for each in names if each in self.data)

    def graph_bytes(self, name: str) -> bytes:
        """Read a graph and check its digest."""
        graph = self.graphs[name]
        path = self.file(graph.file)
        content = path.read_bytes()
        self.check_digest(path, hashlib.sha256(content).hexdigest(), graph.sha256)
        return content

    def check_files(self) -> None:
        """Hash every file and compare with what was exported."""
        needed = {graph.file: graph.sha256 for graph in self.graphs.values()}
        needed |= {name: data.sha256 for name, data in self.data.items()}
        paths = [self.file(name) for name in needed]
        with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
            digests = list(threads.map(sha256_of, paths))
        for path, digest, expected in zip(paths, digests, needed.values(), strict=True):
            self.check_digest(path, digest, expected)

    def load_checked(self, load: Callable[[], T]) -> T:
        """Return what `load` makes of the files, which are hashed meanwhile.

        A runtime opens them by name, so they must be the same files before and after. A change in
        between shows in their ctime, even if the content and the other times were restored."""
        for _ in range(TRIES):
            before = settled_stamps(self._read_files)
            with ThreadPoolExecutor(1) as thread:
                checked = thread.submit(self.check_files)
                made = load()
                checked.result()
            if stamps(self._read_files) == before:
                return made
        raise ExportError(f"{self.folder}: changes while it is read; stop what writes there")

    @property
    def _read_files(self) -> list[Path]:
        """The files that a runtime reads, and the folder: a file replaced by name changes it."""
        names = [*(graph.file for graph in self.graphs.values()), *self.data]
        return [self.folder, *map(self.file, names)]


def changed_file(part: str) -> str:
    """The file of the tensors that differ from the checkpoint's files."""
    return f"{part}.changed.safetensors"


def further_file(part: str) -> str:
    """The file of the layers that only PyTorch's backend computes in 8 bits; older exports lack
    it."""
    return f"{part}.further.safetensors"


def _graph(name: str, value: dict[str, Any]) -> Graph:
    spec = spec_from_dict(name, value)
    return check_fields(Graph(value["file"], value["sha256"], tuple(value["data"]), spec))
