"""An export folder is whole, or opening it says what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.export_folder import ExportError, ExportFolder
from engines.onnxruntime_engine import OnnxRuntimeError, load_onnxruntime
from tests.engines.tiny_export import DATA, rewrite_locations, sign


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "export.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def test_what_is_written_is_what_is_read(tiny: ExportFolder) -> None:
    before = (tiny.folder / "export.json").read_bytes()
    found = ExportFolder.open(tiny.folder)
    assert found == tiny
    found.write()
    assert (tiny.folder / "export.json").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "export.json").unlink(), "no export.json there; needed a folder of"),
        (lambda d: (d / "export.json").write_text("{"), "not an export's description"),
        (lambda d: (d / "export.json").write_bytes(b"\xff"), "not readable"),
        (lambda d: edit(d, lambda v: v.update(format=1)), "has format 1, needed 2"),
        (
            lambda d: edit(d, lambda v: v.pop("arch")),
            "not an export's description .KeyError: 'arch'",
        ),
        (lambda d: edit(d, lambda v: v.update(new=1)), "not an export's description .*'new'"),
        (
            lambda d: edit(d, lambda v: v.update(precision="int4")),
            "precision 'int4', needed one of",
        ),
        (lambda d: edit(d, lambda v: v["graphs"].pop("clip_l")), "'clip_l' is missing"),
        (lambda d: (d / "clip_g.onnx").unlink(), "clip_g.onnx: not there"),
        (lambda d: cut_off(d / "clip_g.onnx"), "clip_g.onnx: has sha256 .*, needed"),
        (lambda d: flip_a_byte(d / "clip_g.onnx"), "clip_g.onnx: has sha256 .*, needed"),
        (lambda d: swap(d / "clip_g.onnx", d / "clip_l.onnx"), "clip_.*: has sha256 .*, needed"),
        (lambda d: (d / DATA).unlink(), f"{DATA}: not there"),
        (lambda d: cut_off(d / DATA), f"{DATA}: has .* bytes, needed"),
        (lambda d: flip_a_byte(d / DATA), f"{DATA}: has sha256 .*, needed"),
        (
            lambda d: edit(d, lambda v: v["data"].update({"../x": v["data"][DATA]})),
            "'../x' leaves the folder; needed a plain name",
        ),
        (
            lambda d: edit(d, lambda v: v["graphs"]["clip_l"].update(file="/etc/passwd")),
            "'/etc/passwd' leaves the folder",
        ),
        (
            lambda d: edit(d, lambda v: v["graphs"]["clip_l"].update(data=["other.bin"])),
            "points into .*other.bin.*, which `data` lacks",
        ),
    ],
)
def test_damage_is_named(
    tiny: ExportFolder, damage: Callable[[Path], object], message: str
) -> None:
    damage(tiny.folder)
    with pytest.raises(ExportError, match=message) as caught:
        ExportFolder.open(tiny.folder)
    assert str(tiny.folder) in str(caught.value)


def test_a_link_out_of_the_folder_is_refused(tiny: ExportFolder, tmp_path: Path) -> None:
    os.rename(tiny.folder / DATA, tmp_path / "elsewhere")
    (tiny.folder / DATA).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match=f"'{DATA}' leaves the folder"):
        ExportFolder.open(tiny.folder)


def test_an_export_with_other_tensors_than_todays_specs_is_refused(tiny: ExportFolder) -> None:
    def rename(value: dict[str, Any]) -> None:
        value["graphs"]["unet_deep"]["inputs"][0][0] = "latent"

    edit(tiny.folder, rename)
    with pytest.raises(ExportError, match="unet_deep has the inputs latent .*; needed sample .*"):
        ExportFolder.open(tiny.folder)


def test_weights_that_did_not_change_are_not_read_again(
    tiny: ExportFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines import digests

    ExportFolder.open(tiny.folder)
    read: list[str] = []

    def other(path: Path) -> str:
        read.append(path.name)
        return "?"

    monkeypatch.setattr(digests, "sha256_of", other)
    ExportFolder.open(tiny.folder)
    assert read == []
    with pytest.raises(ExportError, match="has sha256"):
        ExportFolder.open(tiny.folder, verify=True)
    assert read == [DATA]


def test_a_folder_that_cannot_be_written_opens(
    tiny: ExportFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines import digests
    from sdxl.files import OutputError

    def refuse(path: Path, data: bytes) -> None:
        raise OutputError(path, OSError("read-only"))

    monkeypatch.setattr(digests, "write_atomic", refuse)
    assert ExportFolder.open(tiny.folder) == tiny


@pytest.mark.parametrize(
    ("location", "message"),
    [("../secret", "escapes model directory"), ("gone.bin", "does not exist")],
)
def test_a_graph_that_points_elsewhere_is_not_loaded(
    tiny: ExportFolder, location: str, message: str
) -> None:
    (tiny.folder.parent / "secret").write_bytes(bytes(10_000))
    rewrite_locations(tiny.folder / "clip_l.onnx", location)
    sign(tiny.folder, "clip_l")
    with pytest.raises(OnnxRuntimeError, match=f"clip_l.onnx: .*{message}"):
        load_onnxruntime(ExportFolder.open(tiny.folder))


def test_a_graph_changed_after_the_folder_was_opened_is_not_parsed(tiny: ExportFolder) -> None:
    export = ExportFolder.open(tiny.folder)
    flip_a_byte(tiny.folder / "vae_decoder.onnx")
    with pytest.raises(ExportError, match="vae_decoder.onnx: has sha256"):
        load_onnxruntime(export)
