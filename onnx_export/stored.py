"""The places of tensors in safetensors files. ONNX graphs refer to them, so that weights are stored
once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engines.folders.publishing import disk_errors
from sdxl.files import grant_usual

DTYPES = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "I8": ir.DataType.INT8,
}
MAYBE_PREFIX = "text_model."
"""a prefix of CLIP's tensor names that only some versions of transformers write"""


@dataclass(frozen=True)
class Stored:
    """One tensor's place."""

    file: str
    """the file's name beside the graph"""
    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int
    length: int

    def as_initialiser(self, name: str) -> ir.Value:
        shape = ir.Shape(self.shape)
        tensor = ir.ExternalTensor(
            self.file, self.offset, self.length, self.dtype, shape=shape, name=name
        )
        type_ = ir.TensorType(self.dtype)
        return ir.Value(name=name, type=type_, shape=shape, const_value=tensor)


def read_places(path: Path, file: str) -> dict[str, Stored]:
    """Read the places of tensors in a safetensors file, whose name beside the graph is `file`."""
    with path.open("rb") as opened:
        (header_length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(header_length))
    start = 8 + header_length
    places = {}
    for name, entry in header.items():
        if entry.get("dtype") in DTYPES:
            first, last = entry["data_offsets"]
            shape = tuple(entry["shape"])
            places[name] = Stored(file, DTYPES[entry["dtype"]], shape, start + first, last - first)
    return places


def unchanged_places(parameters: Mapping[str, Tensor], path: Path, file: str) -> dict[str, Stored]:
    """Return the places of the parameters that equal the file's tensors."""
    unchanged = {}
    places = read_places(path, file)
    with safe_open(path, framework="pt") as opened:
        for key, stored in places.items():
            bare = key.removeprefix(MAYBE_PREFIX)
            name = next((n for n in (key, bare, MAYBE_PREFIX + key) if n in parameters), None)
            if name is not None and _is_equal(parameters[name], opened.get_tensor(key)):
                unchanged[name] = stored
    return unchanged


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Stored]:
    """Write tensors to a file and return their places. Equal tensors give equal bytes. Equal
    scalars get one place, so that binding.py sees which layers quantise an input equally."""
    contiguous = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    with disk_errors(path):
        save_file(contiguous, path)
        grant_usual(path)
    places = read_places(path, path.name)
    first: dict[tuple[torch.dtype, float], Stored] = {}
    for name, tensor in contiguous.items():
        if tensor.dim() == 0:
            places[name] = first.setdefault((tensor.dtype, tensor.item()), places[name])
    return places


def _is_equal(tensor: Tensor, stored: Tensor) -> bool:
    return tensor.shape == stored.shape and torch.equal(tensor.cpu(), stored.to(tensor.dtype))
