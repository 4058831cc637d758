"""A folder of ONNX graphs and their weights. `sdxl export` writes it and backends read it.

Only this module knows the format of `export.json`. Opening a folder checks that every file exists
with its digest, and that the graphs have the tensors of specs.py. It knows no ONNX and no runtime.
"""

from __future__ import annotations

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
TRIES = 10
"""More than a few: each export that links to the same weights changes their ctime."""

WEIGHT, SCALE = ".weight", ".weight_scale"
INPUT_SCALE, SMOOTHING = ".input_scale", ".input_smoothing"
"""Ends of the names of a quantised layer's tensors in the file of changed tensors. `weight_scale`
has a number for each output channel, `input_scale` one number. `input_smoothing` has a number for
each input channel, if SmoothQuant moved part of the input's range into the weight."""

IN_TORCH = "torch"
"""the key of a parity's findings about PyTorch's 8-bit layers"""


class ExportError(RuntimeError):
    """An export cannot be used. The message names the folder, what is wrong and what is needed."""


@dataclass(frozen=True)
class DataFile:
    """A file of weights beside the graphs."""

    sha256: str
    bytes: int
    source: str | None = None
    """path below the checkpoint's folder, if this is a link to or a copy of a checkpoint's file"""


@dataclass(frozen=True)
class Graph:
    """One ONNX file, the files of its weights, and its tensors."""

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
    """how 8-bit scales were measured"""
    parity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> ExportFolder:
        """Read an export, check its graphs' digests and the sizes of its weights. With `verify`,
        check the weights' digests too."""
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
        """Whether the export was compared with the model. An export that failed is not
        published."""
        return bool(self.parity.get("findings"))

    @property
    def unchecked_in_torch(self) -> str | None:
        """Why PyTorch's 8-bit layers may differ from the model; None if they passed the check.
        PyTorch has more 8-bit layers than the graphs."""
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
        return self.content(self.graphs[name].file, self.graphs[name].sha256)

    def check_files(self) -> None:
        """Compare every file's digest with the description."""
        needed = {graph.file: graph.sha256 for graph in self.graphs.values()}
        needed |= {name: data.sha256 for name, data in self.data.items()}
        paths = [self.file(name) for name in needed]
        with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
            digests = list(threads.map(sha256_of, paths))
        for path, digest, expected in zip(paths, digests, needed.values(), strict=True):
            self.check_digest(path, digest, expected)

    def load_checked(self, load: Callable[[], T]) -> T:
        """Return the result of `load`; check the files' digests while it runs.

        A runtime opens the files by name, so they must be the same files before and after. Any
        change shows in the ctime, even if content and other times were restored."""
        for _ in range(TRIES):
            before = settled_stamps(self._read_files)
            with ThreadPoolExecutor(1) as thread:
                check = thread.submit(self.check_files)
                result = load()
                check.result()
            if stamps(self._read_files) == before:
                return result
        raise ExportError(f"{self.folder}: changes while it is read; stop what writes there")

    @property
    def _read_files(self) -> list[Path]:
        """The files that a runtime reads, and the folder, which changes if a file is replaced."""
        names = [*(graph.file for graph in self.graphs.values()), *self.data]
        return [self.folder, *map(self.file, names)]


def changed_file(part: str) -> str:
    """Return the name of the file of tensors that differ from the checkpoint's."""
    return f"{part}.changed.safetensors"


def further_file(part: str) -> str:
    """Return the name of the file of layers that only PyTorch computes in 8 bits. Older exports
    lack the file."""
    return f"{part}.further.safetensors"


def _graph(name: str, value: dict[str, Any]) -> Graph:
    spec = spec_from_dict(name, value)
    return check_fields(Graph(value["file"], value["sha256"], tuple(value["data"]), spec))
