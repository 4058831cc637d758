"""A folder of ONNX graphs and the weights they point into: what export writes and backends read.

`export.json` is stated here and nowhere else. Opening a folder proves that it is whole: every name
stays inside it, every file is there with the digest that was written, and the graphs' tensors are
those of specs.py. It knows no ONNX and no runtime.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engines.folders.digests import settled_stamps, sha256_of, stamps
from engines.folders.json_fields import MALFORMED, check_fields, check_one_of
from engines.folders.listed_files import Listing
from engines.folders.model_folder import ModelFolder
from engines.folders.spec_json import outdated, spec_as_dict, spec_from_dict
from sdxl.specs import CUTS, Architecture, ModelSpec

FORMAT = 2
FILE = "export.json"
T = TypeVar("T")
HASHED_AT_ONCE = 4
TRIES = 3
"""Another export that links the same weights changes their time, too."""
PRECISIONS = ("fp32", "fp16", "int8", "fp8")

WEIGHT, SCALE = ".weight", ".weight_scale"
INPUT_SCALE, SMOOTHING = ".input_scale", ".input_smoothing"
"""What a quantised layer has in the file of changed tensors, under its name. `weight_scale`: one
number for each output channel; `input_scale`: one number; `input_smoothing`: one for each input
channel, where SmoothQuant moved part of the input's range into the weight."""

IN_TORCH = "torch"
"""in a parity: what PyTorch's own 8 bits were found to be"""


class ExportError(RuntimeError):
    """An export that cannot be used: which folder, what was found, what is needed."""


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
    """What export.json says."""

    DESCRIPTION = FILE

    graphs: Mapping[str, Graph]
    data: Mapping[str, DataFile]
    loras: tuple[Any, ...] = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """what 8-bit scales were found on"""
    parity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> ExportFolder:
        """Graphs are hashed, of the weights the sizes looked at; `verify`: all of it hashed."""
        export = cls.read(folder)
        export.check_specs()
        for graph in export.graphs.values():
            path = export._listing.file(graph.file)
            export._listing.check_digest(path, sha256_of(path), graph.sha256)
        for name, data in export.data.items():
            path = export._listing.file(name)
            export._listing.check_size(path, path.stat().st_size, data.bytes)
        if verify:
            export.check_files()
        return export

    @classmethod
    def read(cls, folder: Path) -> ExportFolder:
        """What export.json says; the files beside it are not looked at."""
        path = folder / FILE
        try:
            value = _listing(folder).described(FORMAT, "sdxl export")
            return check_fields(cls(folder=folder, **_parsed(value)))
        except (OSError, UnicodeDecodeError) as error:
            raise ExportError(f"{path}: not readable ({error})") from error
        except MALFORMED as error:
            cause = f"{type(error).__name__}: {error}"
            raise ExportError(f"{path}: not an export's description ({cause})") from error

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"arch": asdict(self.arch)}
        plain |= {
            name: getattr(self, name) for name in ("model", "model_digest", "precision", "cut")
        }
        plain |= {name: dict(getattr(self, name)) for name in ("calibration", "parity", "versions")}
        graphs = {name: _graph_as_dict(graph) for name, graph in self.graphs.items()}
        data = {name: asdict(file) for name, file in self.data.items()}
        return {"format": FORMAT, **plain, "graphs": graphs, "data": data, "loras": [*self.loras]}

    @property
    def is_checked(self) -> bool:
        """Whether it was held against the model; a folder that failed is not published."""
        return bool(self.parity.get("findings"))

    @property
    def unchecked_in_torch(self) -> str | None:
        """Of PyTorch's own 8 bits, which are more layers than the graphs': why they are not known
        to be the model; None where they were held against it."""
        found = self.parity.get(IN_TORCH)
        if not isinstance(found, Mapping) or not found.get("findings"):
            return "PyTorch's own 8 bits were not held against the model"
        return str(found.get("note") or "") or None

    @property
    def specs(self) -> dict[str, ModelSpec]:
        return {name: graph.spec for name, graph in self.graphs.items()}

    @property
    def numbers(self) -> tuple[Path, ...]:
        """The files of the UNet's 8-bit weights and scales."""
        if (name := changed_file("unet")) not in self.data:
            raise ExportError(f"{self.folder}: no {name} there; needed an int8 or fp8 export")
        names = [name, further_file("unet")]
        return tuple(self._listing.file(each) for each in names if each in self.data)

    def graph_bytes(self, name: str) -> bytes:
        """The graph itself, proven to be the one that was exported."""
        graph = self.graphs[name]
        path = self._listing.file(graph.file)
        content = path.read_bytes()
        self._listing.check_digest(path, hashlib.sha256(content).hexdigest(), graph.sha256)
        return content

    def check_files(self) -> None:
        """Every byte of them is as it was exported."""
        named = {graph.file: graph.sha256 for graph in self.graphs.values()}
        named |= {name: data.sha256 for name, data in self.data.items()}
        paths = [self._listing.file(name) for name in named]
        with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
            found = list(threads.map(sha256_of, paths))
        for path, digest, needed in zip(paths, found, named.values(), strict=True):
            self._listing.check_digest(path, digest, needed)

    def load_checked(self, load: Callable[[], T]) -> T:
        """What `load` makes of the files, which are hashed meanwhile. A runtime reads them by their
        names, so they must also be the same files before and after: a change in between shows in
        the time that the kernel keeps for it, even when it was undone and the rest set back."""
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
        """The folder too: another file under a name is a change of it."""
        names = [*(graph.file for graph in self.graphs.values()), *self.data]
        return [self.folder, *map(self._listing.file, names)]

    def check_specs(self) -> None:
        """The graphs have today's tensors: names, dims and types."""
        if wrong := outdated(self.specs, self.arch, self.cut):
            raise ExportError(f"{self.folder / FILE}: {wrong}; export again")

    @property
    def _listing(self) -> Listing:
        return _listing(self.folder)


def _listing(folder: Path) -> Listing:
    return Listing(folder / FILE, ExportError, "export again")


def changed_file(part: str) -> str:
    """The file beside the graphs with the tensors that the checkpoint's files do not hold so."""
    return f"{part}.changed.safetensors"


def further_file(part: str) -> str:
    """The file with the numbers of layers that graphs keep and PyTorch's backend does not; exports
    made before there were any lack it."""
    return f"{part}.further.safetensors"


def _parsed(value: dict[str, Any]) -> dict[str, Any]:
    check_one_of("cut", value["cut"], CUTS)
    check_one_of("precision", value["precision"], PRECISIONS)
    graphs = {name: _graph(name, graph) for name, graph in value.pop("graphs").items()}
    data = {name: check_fields(DataFile(**file)) for name, file in value.pop("data").items()}
    for graph in graphs.values():
        if missing := set(graph.data) - set(data):
            raise ValueError(f"{graph.file} points into {missing}, which `data` lacks")
    arch = Architecture.from_dict(value.pop("arch"))
    return {**value, "arch": arch, "graphs": graphs, "data": data, "loras": tuple(value["loras"])}


def _graph(name: str, value: dict[str, Any]) -> Graph:
    spec = spec_from_dict(name, value)
    return check_fields(Graph(value["file"], value["sha256"], tuple(value["data"]), spec))


def _graph_as_dict(graph: Graph) -> dict[str, Any]:
    facts = {"file": graph.file, "sha256": graph.sha256, "data": list(graph.data)}
    return facts | spec_as_dict(graph.spec)
