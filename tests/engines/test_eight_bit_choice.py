"""PyTorch computes in 8 bits by an export's numbers, where it was itself held against the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.choice import EngineRequest, choose_engines
from engines.folders.export_folder import DataFile, ExportError, ExportFolder, changed_file
from engines.folders.places import export_place
from sdxl.digests import sha256_of
from tests.engines.tiny_export import DIGEST, write_export


def test_pytorch_in_8_bits_needs_an_exports_numbers(
    usual: EngineRequest, loaded: list[str]
) -> None:
    asked = EngineRequest(usual.model, usual.checkpoint, precision="fp8")
    with pytest.raises(ExportError, match="needed: sdxl export --model some/model --precision fp8"):
        choose_engines(asked, "torch")
    place = export_place("tiny", DIGEST, "fp8")
    in_torch(write_export(place), "")
    with pytest.raises(ExportError, match="no unet.changed.safetensors there"):
        choose_engines(asked, "torch")
    assert not loaded


def in_torch(export: ExportFolder, note: str) -> ExportFolder:
    """As if PyTorch's own 8 bits had been held against the model, too."""
    found = {"findings": [{"what": "in PyTorch: PSNR", "measured": 30.0}], "note": note}
    changed = replace(export, parity={**export.parity, "torch": found})
    changed.write()
    return changed


def test_pytorch_in_8_bits_is_refused_where_it_was_not_held_against_the_model(
    usual: EngineRequest, loaded: list[str]
) -> None:
    """That the graphs were says nothing of it: it has more layers in 8 bits than they."""
    asked = replace(usual, precision="int8")
    export = write_export(export_place("tiny", DIGEST, "int8"))
    numbers = export.folder / changed_file("unet")
    numbers.write_bytes(b"")
    data = {**export.data, numbers.name: DataFile(sha256_of(numbers), 0)}
    export = replace(export, precision="int8", data=data)
    export.write()
    refused = "8 bits were not held against the model; needed: sdxl export --model .*--unchecked"
    with pytest.raises(ExportError, match=refused):
        choose_engines(asked, "torch")
    in_torch(export, "in PyTorch: PSNR measured 9")
    with pytest.raises(ExportError, match="in PyTorch: PSNR measured 9; needed: .*--unchecked"):
        choose_engines(asked, "torch")
    choose_engines(replace(asked, takes_unchecked=True), "torch")
    in_torch(export, "")
    choose_engines(asked, "torch")
    choose_engines(asked, "onnxruntime")
    assert loaded == ["torch", "torch"]
