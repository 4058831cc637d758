"""The common part of export.json and manifest.json: the model, its networks' tensors, and the files
beside them.

The JSON is not trusted: its types are checked before use, and a file that it names must be in the
folder, unchanged. It does not know the files' content.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, TypeVar

from sdxl.files import write_json
from sdxl.specs import (
    CUTS,
    OPTIONAL,
    Architecture,
    Cut,
    ModelSpec,
    TensorSpec,
    brief,
    network_specs,
    variants_of,
    with_loras,
)

PRECISIONS = ("fp32", "fp16", "int8", "fp8")
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""exceptions that parsing an invalid file may raise"""
TYPES: Mapping[Any, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, NoneType),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "Mapping[str, Any]": (dict,),
}
MAX_NAME = 255
"""bytes"""
SIDES = ("inputs", "outputs")
BANK = "bank"
DTYPES = ("float32", "float16", "bfloat16")
"""types of activations"""

T = TypeVar("T")


@dataclass(frozen=True)
class ModelFolder(ABC):
    """A folder of files made from one model, as its JSON file describes it."""

    FILE: ClassVar[str]
    FORMAT: ClassVar[int]
    KIND: ClassVar[str]
    COMMAND: ClassVar[str]
    REMEDY: ClassVar[str]
    ERROR: ClassVar[type[RuntimeError]]

    folder: Path
    model: str
    model_digest: str
    precision: str
    cut: Cut
    arch: Architecture

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Parse the JSON file. The files beside it are not read."""
        path = folder / cls.FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if (version := value.pop("format")) != cls.FORMAT:
                cls._fail(path, f"has format {version!r}, expected {cls.FORMAT}")
            check_one_of("cut", value["cut"], CUTS)
            check_one_of("precision", value["precision"], PRECISIONS)
            arch = Architecture.from_dict(value.pop("arch"))
            return check_fields(cls(folder=folder, arch=arch, **cls.parse(value)))
        except FileNotFoundError:
            needed = f"expected a folder of `{cls.COMMAND}`"
            raise cls.ERROR(f"{folder}: no {cls.FILE} there; {needed}") from None
        except OSError as error:
            raise cls.ERROR(f"{path}: not readable ({error})") from error
        except MALFORMED as error:
            cause = f"{type(error).__name__}: {error}"
            raise cls.ERROR(f"{path}: not {cls.KIND} ({cause}); {cls.REMEDY}") from error

    @classmethod
    @abstractmethod
    def parse(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields of this kind of folder; return all fields."""

    def as_dict(self) -> dict[str, Any]:
        rest = {name: value for name, value in vars(self).items() if name != "folder"}
        return {"format": self.FORMAT, **rest, "arch": asdict(self.arch)}

    def write(self, folder: Path | None = None) -> None:
        """Write the JSON file, here or into another folder. Equal values give equal bytes."""
        path = (folder or self.folder) / self.FILE
        write_json(path, self.as_dict(), sort_keys=True, ensure_ascii=False)

    @property
    @abstractmethod
    def specs(self) -> dict[str, ModelSpec]: ...

    def check_specs(self, remedy: str) -> None:
        """Check that the files have the tensors of today's networks."""
        if difference := _difference(self.specs, self.arch, self.cut):
            raise self.ERROR(f"{self.folder / self.FILE}: {difference}; {remedy}")

    def file(self, name: str) -> Path:
        """Return the path of a file that the JSON file names."""
        path, origin = self.folder / name, self.folder / self.FILE
        if not _is_plain(name) or path.resolve().parent != self.folder.resolve():
            raise self.ERROR(f"{origin}: {brief(name)} leaves the folder; expected a plain name")
        if not path.is_file():
            self._fail(path, f"not there; required by {self.FILE}", ", ")
        return path

    def content(self, name: str, sha256: str) -> bytes:
        """Read a file and check its digest."""
        path = self.file(name)
        content = path.read_bytes()
        self.check_digest(path, hashlib.sha256(content).hexdigest(), sha256)
        return content

    def check_size(self, path: Path, size: int, needed: int) -> None:
        if size != needed:
            self._fail(path, f"has {size} bytes, expected {needed}")

    def check_digest(self, path: Path, digest: str, needed: str) -> None:
        if digest != needed:
            self._fail(path, f"has sha256 {digest[:12]}…, expected {needed[:12]}… of {self.FILE}")

    @classmethod
    def _fail(cls, path: Path, message: str, link: str = "; ") -> None:
        raise cls.ERROR(f"{path}: {message}{link}{cls.REMEDY}")


def check_fields(record: T) -> T:
    """Return the dataclass; raise TypeError unless its plain fields have their declared types."""
    for field in fields(record):  # type: ignore[arg-type]
        value, needed = getattr(record, field.name), TYPES.get(field.type)
        if needed is not None and type(value) not in needed:
            raise TypeError(f"{field.name} is {brief(value)}, expected {field.type}")
    return record


def check_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        shown = str(allowed) if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise ValueError(f"{name} {brief(value)}, expected one of {shown}")


def spec_as_dict(spec: ModelSpec) -> dict[str, list[list[Any]]]:
    sides = (*SIDES, BANK) if spec.bank else SIDES
    return {side: [[t.name, t.dtype, *t.dims] for t in getattr(spec, side)] for side in sides}


def spec_from_dict(name: str, value: Mapping[str, Any]) -> ModelSpec:
    inputs, outputs, bank = (
        tuple(
            TensorSpec(tensor, dtype, tuple(dims)) for tensor, dtype, *dims in value.get(side, ())
        )
        for side in (*SIDES, BANK)
    )
    return ModelSpec(name, inputs, outputs, bank)


def _difference(specs: Mapping[str, ModelSpec], arch: Architecture, cut: Cut) -> str | None:
    """Describe how these tensors differ from the tensors of today's networks; None if they are
    equal."""
    if arch.is_refiner:
        return "`arch` is a refiner's, expected a model's"
    for name in _all_specs(arch, "float32", cut):
        if name not in specs:
            if "+" in name or (name in OPTIONAL and not arch.masked_channels):
                continue
            return f"{name!r} is missing"
        spec = specs[name]
        if not (spec.inputs and spec.outputs):
            return f"{name!r} has no inputs or no outputs"
        if (dtype := spec.outputs[0].dtype) not in DTYPES:
            return f"{name!r} has outputs of {brief(dtype)}, expected one of {', '.join(DTYPES)}"
        needed = _all_specs(arch, dtype, cut)[name]
        for side in SIDES:
            tensors, expected = getattr(spec, side), getattr(needed, side)
            if tensors != expected:
                return f"{name} has the {side} {_listed(tensors)}; expected {_listed(expected)}"
    return None


def _all_specs(arch: Architecture, dtype: str, cut: Cut) -> dict[str, ModelSpec]:
    specs = network_specs(arch, dtype, cut)
    specs = specs | with_loras(specs)
    return specs | variants_of(specs, arch)


def _listed(tensors: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{t.name} {t.dtype}[{', '.join(map(str, t.dims))}]" for t in tensors)


def _is_plain(name: str) -> bool:
    """Return whether a name is a file's on any file system: no folder, no NUL, valid Unicode."""
    is_one = Path(name).name == name and "\0" not in name
    return is_one and len(name.encode(errors="replace")) <= MAX_NAME and name.isprintable()
