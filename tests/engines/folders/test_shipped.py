"""The embedded model's graphs and weights are joined in one folder by the first process."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engines.folders.export_folder import DataFile, ExportError, ExportFolder
from engines.folders.places import export_place
from engines.folders.shipped import open_mini
from tests.engines.tiny_export import DATA, write_export

SOURCE = "unet/model.safetensors"


@pytest.fixture
def shipped(tmp_path: Path) -> tuple[Path, Path]:
    """Graphs in one folder, as in the repository; their weights in a checkpoint elsewhere."""
    graphs, checkpoint = tmp_path / "graphs", tmp_path / "checkpoint"
    export = write_export(graphs)
    (checkpoint / SOURCE).parent.mkdir(parents=True)
    os.rename(graphs / DATA, checkpoint / SOURCE)
    data = export.data[DATA]
    replace(export, data={DATA: DataFile(data.sha256, data.bytes, SOURCE)}).write()
    return graphs, checkpoint


def place() -> Path:
    return export_place("tiny", "d" * 64, "fp32")


def test_the_first_use_makes_the_folder_and_the_second_finds_it(shipped: tuple[Path, Path]) -> None:
    made = open_mini(None, *shipped)
    assert made.folder == place()
    before = (place() / "export.json").stat().st_mtime_ns
    assert open_mini(None, *shipped) == made
    assert (place() / "export.json").stat().st_mtime_ns == before
    assert (place() / DATA).samefile(shipped[1] / SOURCE), "the weights are stored once"


def test_many_at_once_make_one(shipped: tuple[Path, Path]) -> None:
    found: list[ExportFolder] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_mini(None, *shipped))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({export.folder for export in found}) == 1
    assert sorted(os.listdir(place().parent)) == [f".{place().name}.lock", place().name]


def test_a_damaged_folder_is_made_again(shipped: tuple[Path, Path]) -> None:
    open_mini(None, *shipped)
    (place() / "clip_l.onnx").write_bytes(b"")
    open_mini(None, *shipped)
    ExportFolder.open(place())


def test_other_weights_than_the_graphs_were_made_for_are_named(shipped: tuple[Path, Path]) -> None:
    path = shipped[1] / SOURCE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ExportError, match=f"{DATA}: has sha256 .*, expected"):
        open_mini(None, *shipped)
    assert os.listdir(place().parent) == [f".{place().name}.lock"], "something is left half-made"
    with pytest.raises(
        ExportError, match="of the weights dddddddddddd, expected eeeeeeeeeeee; run"
    ):
        open_mini("e" * 64, *shipped)
