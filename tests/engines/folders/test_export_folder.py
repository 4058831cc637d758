"""Opening an export folder names what is damaged or missing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.folders.export_folder import ExportError, ExportFolder
from engines.onnxruntime_engine import OnnxRuntimeError, load_onnxruntime
from tests.engines.damages import editor, flip_a_byte
from tests.engines.tiny_export import DATA, rewrite_locations, sign

edit = editor("export.json")


def test_what_is_written_is_what_is_read(tiny: ExportFolder) -> None:
    before = (tiny.folder / "export.json").read_bytes()
    found = ExportFolder.open(tiny.folder)
    assert found == tiny
    found.write()
    assert (tiny.folder / "export.json").read_bytes() == before


def test_an_export_from_before_there_were_edits_is_whole(tiny: ExportFolder) -> None:
    """The export lacks the image encoder, and still serves pictures from text."""
    edit(tiny.folder, lambda v: v["graphs"].pop("vae_encoder"))
    engines = load_onnxruntime(ExportFolder.open(tiny.folder, verify=True))
    assert "vae_encoder" not in engines.by_name
    assert "vae_decoder" in engines.by_name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "export.json").unlink(), "no export.json there; expected a folder of"),
        (lambda d: (d / "export.json").write_text("{"), "not an export's description"),
        (lambda d: (d / "export.json").write_bytes(b"\xff"), "description .UnicodeDecodeError"),
        (lambda d: (d / "export.json").unlink() or (d / "export.json").mkdir(), "not readable"),
        (lambda d: edit(d, lambda v: v.update(format=1)), "has format 1, expected 2"),
        (
            lambda d: edit(d, lambda v: v.pop("arch")),
            "not an export's description .KeyError: 'arch'",
        ),
        (lambda d: edit(d, lambda v: v.update(new=1)), "not an export's description .*'new'"),
        (
            lambda d: edit(d, lambda v: v.update(precision="int4")),
            "precision 'int4', expected one of",
        ),
        (lambda d: edit(d, lambda v: v["graphs"].pop("clip_l")), "'clip_l' is missing"),
        (lambda d: (d / "clip_g.onnx").unlink(), "clip_g.onnx: not there"),
        (lambda d: flip_a_byte(d / "clip_g.onnx"), "clip_g.onnx: has sha256 .*, expected"),
        (lambda d: (d / DATA).unlink(), f"{DATA}: not there"),
        (lambda d: os.truncate(d / DATA, 9), f"{DATA}: has .* bytes, expected"),
        (lambda d: flip_a_byte(d / DATA), f"{DATA}: has sha256 .*, expected"),
        (
            lambda d: edit(d, lambda v: v["data"].update({"../x": v["data"][DATA]})),
            "'../x' leaves the folder; expected a plain name",
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
        ExportFolder.open(tiny.folder, verify=True)
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
    with pytest.raises(ExportError, match="unet_deep has the inputs latent .*; expected sample .*"):
        ExportFolder.open(tiny.folder)


def test_weights_that_were_changed_and_dated_back_are_not_loaded(tiny: ExportFolder) -> None:
    load_onnxruntime(ExportFolder.open(tiny.folder))
    flip_a_byte(tiny.folder / DATA, is_dated_back=True)
    with pytest.raises(ExportError, match=f"{DATA}: has sha256 .*, expected"):
        load_onnxruntime(ExportFolder.open(tiny.folder))


def test_weights_that_are_changed_only_while_they_are_loaded_are_not_used(
    tiny: ExportFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashed file is the exported one, but the runtime has read another content before."""
    path, is_back, check = tiny.folder / DATA, threading.Event(), ExportFolder.check_files

    def check_late(export: ExportFolder) -> None:
        assert is_back.wait(30)
        is_back.clear()
        check(export)

    def in_place() -> str:
        for _ in range(2):
            flip_a_byte(path, is_dated_back=True)
        is_back.set()
        return "zeros"

    def by_name() -> str:
        path.rename(path.with_name("aside"))
        path.write_bytes(bytes(tiny.data[DATA].bytes))
        os.replace(path.with_name("aside"), path)
        is_back.set()
        return "zeros"

    monkeypatch.setattr(ExportFolder, "check_files", check_late)
    for change in (in_place, by_name):
        with pytest.raises(ExportError, match="changes while it is read"):
            tiny.load_checked(change)


def test_a_link_made_meanwhile_is_no_reason_to_fail(tiny: ExportFolder) -> None:
    def link() -> str:
        if not (target := tiny.folder.parent / "link").exists():
            os.link(tiny.folder / DATA, target)
        return "loaded"

    assert tiny.load_checked(link) == "loaded"


def test_nothing_is_written_into_a_folder_that_is_opened(tiny: ExportFolder) -> None:
    before = sorted(os.listdir(tiny.folder))
    load_onnxruntime(ExportFolder.open(tiny.folder))
    assert sorted(os.listdir(tiny.folder)) == before


@pytest.mark.parametrize(
    ("location", "message"),
    [("../secret", "escapes model directory"), ("gone.bin", "does not exist")],
)
def test_a_graph_that_points_elsewhere_is_not_loaded(
    tiny: ExportFolder, location: str, message: str
) -> None:
    (tiny.folder.parent / "secret").write_bytes(bytes(10_000))
    rewrite_locations(tiny.folder / "clip_l.onnx", location)
    sign(tiny.folder, "clip_l.onnx")
    with pytest.raises(OnnxRuntimeError, match=f"clip_l.onnx: .*{message}"):
        load_onnxruntime(ExportFolder.open(tiny.folder))


def test_a_graph_changed_after_the_folder_was_opened_is_not_parsed(tiny: ExportFolder) -> None:
    export = ExportFolder.open(tiny.folder)
    flip_a_byte(tiny.folder / "vae_decoder.onnx")
    with pytest.raises(ExportError, match="vae_decoder.onnx: has sha256"):
        load_onnxruntime(export)
