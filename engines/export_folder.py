"""A folder of ONNX graphs and the weights they point into: what export writes and backends read.

`export.json` is stated here and nowhere else. Opening a folder proves that it is whole: every name
stays inside it, every file is there with the digest that was written, and the graphs' tensors are
those of specs.py. It knows neither ONNX nor any runtime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.digests import Digests, sha256_of
from engines.listed_files import Listing
from engines.spec_json import outdated, spec_as_dict, spec_from_dict
from sdxl.files import write_atomic
from sdxl.specs import CUTS, Architecture, Cut, ModelSpec

FORMAT = 2
FILE = "export.json"
PRECISIONS = ("fp32", "fp16", "int8", "fp8")

WEIGHT, SCALE = ".weight", ".weight_scale"
INPUT_SCALE, SMOOTHING = ".input_scale", ".input_smoothing"
"""What a quantised layer has in the file of changed tensors, under its name. `weight_scale`: one
number for each output channel; `input_scale`: one number; `input_smoothing`: one for each input
channel, where SmoothQuant moved part of the input's range into the weight."""


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
class ExportFolder:
    """What export.json says, and where it lies."""

    folder: Path
    model: str
    model_digest: str
    precision: str
    cut: Cut
    arch: Architecture
    graphs: Mapping[str, Graph]
    data: Mapping[str, DataFile]
    loras: tuple[Any, ...] = ()
    parity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> ExportFolder:
        """Graphs are hashed every time, weights where they changed since; `verify`: all of it."""
        export = cls.read(folder)
        export.check_specs()
        digests = Digests(folder)
        for graph in export.graphs.values():
            path = export._listing.file(graph.file)
            export._listing.check_digest(path, sha256_of(path), graph.sha256)
        for name, data in export.data.items():
            path = export._listing.file(name)
            export._listing.check_size(path, path.stat().st_size, data.bytes)
            export._listing.check_digest(path, digests.of(name, is_fresh=verify), data.sha256)
        return export

    @classmethod
    def read(cls, folder: Path) -> ExportFolder:
        """What export.json says; the files beside it are not looked at."""
        path = folder / FILE
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ExportError(
                f"{folder}: no {FILE} there; needed a folder of `sdxl export`"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ExportError(f"{path}: not readable ({error})") from error
        try:
            value = json.loads(text)
            if (found := value.pop("format")) != FORMAT:
                raise ExportError(f"{path}: has format {found!r}, needed {FORMAT}; export again")
            return cls(folder=folder, **_parsed(value))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise ExportError(f"{path}: not an export's description ({cause})") from error

    def write(self, folder: Path | None = None) -> None:
        """export.json, here or in another folder; the same bytes for the same facts."""
        text = json.dumps(self.as_dict(), indent=1, sort_keys=True, ensure_ascii=False)
        write_atomic((folder or self.folder) / FILE, (text + "\n").encode())

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"arch": asdict(self.arch)}
        plain |= {
            name: getattr(self, name) for name in ("model", "model_digest", "precision", "cut")
        }
        plain |= {"parity": dict(self.parity), "versions": dict(self.versions)}
        graphs = {name: _graph_as_dict(graph) for name, graph in self.graphs.items()}
        data = {name: asdict(file) for name, file in self.data.items()}
        return {"format": FORMAT, **plain, "graphs": graphs, "data": data, "loras": [*self.loras]}

    @property
    def specs(self) -> dict[str, ModelSpec]:
        return {name: graph.spec for name, graph in self.graphs.items()}

    @property
    def numbers(self) -> Path:
        """The file of the UNet's 8-bit weights and scales."""
        if (name := changed_file("unet")) not in self.data:
            raise ExportError(f"{self.folder}: no {name} there; needed an int8 or fp8 export")
        return self._listing.file(name)

    def graph_bytes(self, name: str) -> bytes:
        """The graph itself, proven to be the one that was exported."""
        graph = self.graphs[name]
        path = self._listing.file(graph.file)
        content = path.read_bytes()
        self._listing.check_digest(path, hashlib.sha256(content).hexdigest(), graph.sha256)
        return content

    def check_specs(self) -> None:
        """The graphs have today's tensors: names, dims and types."""
        if wrong := outdated(self.specs, self.arch, self.cut):
            raise ExportError(f"{self.folder / FILE}: {wrong}; export again")

    @property
    def _listing(self) -> Listing:
        return Listing(self.folder / FILE, ExportError, "export again")


def changed_file(part: str) -> str:
    """The file beside the graphs with the tensors that the checkpoint's files do not hold so."""
    return f"{part}.changed.safetensors"


def _parsed(value: dict[str, Any]) -> dict[str, Any]:
    if value["cut"] not in CUTS:
        raise ValueError(f"cut {value['cut']!r}, needed one of {', '.join(CUTS)}")
    if value["precision"] not in PRECISIONS:
        raise ValueError(f"precision {value['precision']!r}, needed one of {', '.join(PRECISIONS)}")
    graphs = {name: _graph(name, graph) for name, graph in value.pop("graphs").items()}
    data = {name: DataFile(**file) for name, file in value.pop("data").items()}
    for graph in graphs.values():
        if missing := set(graph.data) - set(data):
            raise ValueError(f"{graph.file} points into {missing}, which `data` lacks")
    arch = Architecture.from_dict(value.pop("arch"))
    return {**value, "arch": arch, "graphs": graphs, "data": data, "loras": tuple(value["loras"])}


def _graph(name: str, value: dict[str, Any]) -> Graph:
    spec = spec_from_dict(name, value)
    return Graph(value["file"], value["sha256"], tuple(value["data"]), spec)


def _graph_as_dict(graph: Graph) -> dict[str, Any]:
    facts = {"file": graph.file, "sha256": graph.sha256, "data": list(graph.data)}
    return facts | spec_as_dict(graph.spec)
