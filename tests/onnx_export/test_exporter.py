"""Folders appear whole or not at all, weights are stored once, and only changed graphs are made."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from engines.folders.export_folder import ExportFolder
from engines.folders.publishing import Busy, locked
from onnx_export import exporter
from onnx_export.export_spec import ExportSpec
from onnx_export.exporter import export
from sdxl.checkpoint import NETWORK_FOLDERS, Checkpoint
from sdxl.files import OutputError
from tests.onnx_export.exports import PROMPTS, Lines, checked, export_tiny

UNETS = ("unet_prompt", "unet_deep", "unet_shallow")


def copy_of(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    shutil.copytree(checkpoint.folder, folder)
    return Checkpoint(folder.name, folder)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.long
def test_graphs_of_the_other_cut_compute_what_torch_does(tiny: Checkpoint, out: Path) -> None:
    checked(export_tiny(tiny, out, cut="fresh_skips"), tiny)


def test_weights_stay_in_the_checkpoints_own_files(
    tiny: Checkpoint, tiny_export: ExportFolder
) -> None:
    assert set(tiny_export.data) == {f"{part}.safetensors" for part in NETWORK_FOLDERS}
    for name, data in tiny_export.data.items():
        assert data.source is not None, f"{name} is not the checkpoint's"
        assert (tiny_export.folder / name).samefile(tiny.folder / data.source)
    deep, shallow = (tiny_export.graphs[name] for name in ("unet_deep", "unet_shallow"))
    assert deep.data == shallow.data == ("unet.safetensors",)


def test_a_graph_points_at_the_bytes_of_its_weights(tiny_export: ExportFolder) -> None:
    path = tiny_export.folder / "unet.safetensors"
    content, stored = path.read_bytes(), load_file(path)
    model = ir.load(tiny_export.folder / "unet_shallow.onnx")
    places = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert len(places) > 20
    for name, place in places.items():
        assert place.offset is not None and place.length is not None
        found = content[place.offset : place.offset + place.length]
        assert found == stored[name].numpy().tobytes(), name


def test_graphs_hold_no_weights(tiny_export: ExportFolder) -> None:
    for name, graph in tiny_export.graphs.items():
        model = ir.load(tiny_export.folder / graph.file)
        inside = sum(
            value.const_value.nbytes
            for value in model.graph.initializers.values()
            if value.const_value is not None
            and not isinstance(value.const_value, ir.ExternalTensor)
        )
        assert inside < 20_000, f"{name}: {inside} bytes of constants, at most 20000"


def test_weights_stored_as_float32_are_halved_in_the_graph(tiny: Checkpoint, out: Path) -> None:
    """The embedded model's text encoders are stored in float32."""
    mixed = copy_of(tiny, out.with_name("mixed"))
    path = mixed.folder / "text_encoder" / "model.safetensors"
    whole = {name: tensor.float() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(whole, path, {"format": "pt"})
    folder = export_tiny(mixed, out, "fp16")
    # The VAE's weights are scaled.
    needed = {*(f"{part}.safetensors" for part in NETWORK_FOLDERS), "vae.changed.safetensors"}
    assert set(folder.data) == needed
    graph = ir.load(folder.folder / "clip_l.onnx").graph
    weight = next(v for n, v in graph.initializers.items() if n.endswith("q_proj.weight"))
    assert weight.dtype == ir.DataType.FLOAT
    assert [node.op_type for node in weight.consumers()] == ["Cast"]


def test_an_unchanged_export_is_left_alone_unless_forced(tiny: Checkpoint, out: Path) -> None:
    export_tiny(tiny, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.[os]*")}
    assert len(before) == 7 + 4
    lines: Lines = []
    export_tiny(tiny, out, lines=lines)
    assert lines[0] == f"{out}: nothing has changed"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    export_tiny(tiny, out, lines=lines, is_forced=True)
    assert sum("nodes" in line for line in lines) == 7


def test_only_what_changed_is_exported_again(tiny: Checkpoint, tmp_path: Path) -> None:
    trained = copy_of(tiny, tmp_path / "trained")
    export_tiny(trained, tmp_path / "export")
    path = trained.folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["decoder.conv_in.bias"] += 1
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    lines: Lines = []
    again = Checkpoint(trained.name, trained.folder)
    folder = export_tiny(again, tmp_path / "export", lines=lines)
    made = [line.split()[0] for line in lines if "nodes" in line]
    kept = [line.split()[0] for line in lines if "unchanged" in line]
    assert (made, kept) == (["vae_decoder", "vae_encoder"], ["clip_l", "clip_g", *sorted(UNETS)])
    assert folder.model_digest == again.digest
    checked(ExportFolder.open(tmp_path / "export", verify=True), again)


def test_the_same_model_gives_the_same_bytes(
    tiny: Checkpoint, tiny_export: ExportFolder, out: Path
) -> None:
    again = export_tiny(tiny, out)
    assert again.as_dict() == tiny_export.as_dict()


def refusing(*_: object) -> dict[str, Any]:
    raise RuntimeError("not the model")


def refused_export(order: ExportSpec) -> Lines:
    lines: Lines = []
    with pytest.raises(RuntimeError, match="not the model"):
        export(order, refusing, lines.append)
    return lines


def test_a_failed_check_publishes_nothing_and_the_same_export_continues(
    tiny: Checkpoint, out: Path
) -> None:
    order = ExportSpec(tiny, "fp32", out)
    lines = refused_export(order)
    assert sorted(path.name for path in out.parent.iterdir()) == [".export.lock", ".export.making"]
    assert "--unchecked" in lines[-1] and str(out.with_name(".export.making")) in lines[-1]
    assert sum("nodes" in line for line in lines) == 7
    again = refused_export(order)
    assert "only the check is left" in again[0] and not any("nodes" in line for line in again)
    published = export(order, lambda *_: {"findings": [{"holds": True}]}, lambda _: None)
    assert ExportFolder.open(out, verify=True).as_dict() == published.as_dict()
    assert published.is_checked
    assert not out.with_name(".export.making").exists()


def test_an_export_that_failed_can_be_published_unchecked(tiny: Checkpoint, out: Path) -> None:
    refused_export(ExportSpec(tiny, "int8", out, prompts=PROMPTS))
    lines: Lines = []
    assert not export_tiny(tiny, out, "int8", lines=lines).is_checked
    assert not any("calibrated" in line for line in lines)
    assert ExportFolder.open(out, verify=True).calibration["prompts"] == len(PROMPTS)


@pytest.mark.parametrize("change", ["other prompts", "forced", "damaged"])
def test_a_kept_export_is_not_used_for_another_one(
    change: str, tiny: Checkpoint, out: Path
) -> None:
    refused_export(ExportSpec(tiny, "int8", out, prompts=PROMPTS[:1]))
    if change == "damaged":
        (out.with_name(".export.making") / "unet_deep.onnx").write_bytes(b"")
    lines: Lines = []
    prompts = PROMPTS[1:2] if change == "other prompts" else PROMPTS[:1]
    export_tiny(tiny, out, "int8", lines=lines, prompts=prompts, is_forced=change == "forced")
    assert any("calibrated 1 of 1 prompts" in line for line in lines)


def test_a_calibration_prints_its_progress(tiny: Checkpoint, out: Path) -> None:
    lines: Lines = []
    export_tiny(tiny, out, "int8", lines=lines)
    progress = [line for line in lines if " of 3 prompts" in line]
    assert re.fullmatch(r"calibrated 2 of 3 prompts, about \d\d:\d\d left", progress[0])
    assert progress[1:] == ["calibrated 3 of 3 prompts"]


def test_a_failed_export_leaves_the_old_one(
    tiny: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = export_tiny(tiny, out).as_dict()
    monkeypatch.setattr(exporter, "write_atomic", full_disk)
    with pytest.raises(OutputError, match="No space left on device"):
        export_tiny(tiny, out, is_forced=True)
    assert ExportFolder.open(out, verify=True).as_dict() == before


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("target", ["onnx_export.exporter.write_atomic", "os.link"])
def test_a_full_disk_leaves_nothing(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(target, full_disk)
    with pytest.raises(OutputError, match=r"out must be .*No space left on device"):
        export_tiny(tiny, tmp_path / "export")
    assert files(tmp_path) == [".export.lock"]


def test_a_folder_with_other_files_is_not_replaced(tiny: Checkpoint, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="must be a new or empty folder, or an export"):
        export_tiny(tiny, out)
    assert files(out.parent) == ["export", "export/thesis.txt"]


def test_an_unchecked_export_is_checked_when_asked_again(tiny: Checkpoint, out: Path) -> None:
    assert not export_tiny(tiny, out).is_checked
    assert "without a check" in ExportFolder.open(out).parity["note"]
    findings = [{"what": "x", "measured": 0.0, "required": 1.0, "is_least": False}]
    export(ExportSpec(tiny, "fp32", out), lambda *_: {"findings": findings}, lambda _: None)
    assert ExportFolder.open(out).is_checked


def test_two_exports_to_one_place_at_once_are_refused(tiny: Checkpoint, out: Path) -> None:
    with locked(out, waits=False), pytest.raises(Busy, match="being made by process"):
        export_tiny(tiny, out)


def test_shards_are_taken_as_they_are(tiny: Checkpoint, tmp_path: Path) -> None:
    sharded = copy_of(tiny, tmp_path / "sharded")
    folder, stem = sharded.folder / "unet", "diffusion_pytorch_model"
    tensors = load_file(folder / f"{stem}.safetensors")
    (folder / f"{stem}.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"{stem}-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    exported = export_tiny(sharded, tmp_path / "export")
    assert exported.graphs["unet_deep"].data == ("unet.0.safetensors", "unet.1.safetensors")
    checked(exported, tiny)
