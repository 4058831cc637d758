"""A model's digest is computed once, and again after its files change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines.folders.digests import model_digest
from engines.folders.places import export_place, plans_place
from sdxl.checkpoint import MINI, NETWORK_FOLDERS, Checkpoint
from sdxl.places import home
from tests.engines.damages import flip_a_byte


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    for part in NETWORK_FOLDERS:
        shutil.copytree(MINI / part, tmp_path / "model" / part)
    shutil.copy(MINI / "model_index.json", tmp_path / "model")
    return Checkpoint("model", tmp_path / "model")


def test_a_digest_is_remembered(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model_digest(checkpoint)
    assert first == checkpoint.digest
    again = Checkpoint("model", checkpoint.folder)
    monkeypatch.setattr(Checkpoint, "digest", property(lambda self: pytest.fail("computed again")))
    assert model_digest(again) == first


def test_a_changed_configuration_has_another_digest(checkpoint: Checkpoint) -> None:
    first = model_digest(checkpoint)
    config = checkpoint.folder / "vae" / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    again = Checkpoint("model", checkpoint.folder)
    assert model_digest(again) == again.digest != first


def test_weights_that_were_changed_and_dated_back_have_another_digest(
    checkpoint: Checkpoint,
) -> None:
    first = model_digest(checkpoint)
    (path,) = checkpoint.weight_files("vae")
    flip_a_byte(path, is_dated_back=True)
    again = Checkpoint("model", checkpoint.folder)
    assert model_digest(again) == again.digest != first


@pytest.mark.parametrize("text", ["", "0" * 63, "x" * 64, "../../etc"])
def test_a_note_that_is_no_digest_is_not_believed(
    text: str, checkpoint: Checkpoint, own_home: Path
) -> None:
    first = model_digest(checkpoint)
    (note,) = (own_home / "digests").iterdir()
    note.write_text(text)
    assert model_digest(checkpoint) == first == note.read_text()


def test_a_home_that_cannot_be_written_does_not_matter(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SDXL_HOME", str(tmp_path / "file" / "home"))
    assert model_digest(checkpoint) == checkpoint.digest


def test_places_are_below_the_home_and_distinct(own_home: Path) -> None:
    assert home() == own_home
    places = {
        export_place("a/b c", "0" * 64, "fp16"),
        export_place("a/b c", "0" * 64, "fp16", "fresh_skips"),
        export_place("a/b c", "0" * 64, "int8"),
        export_place("a/b c", "1" * 64, "fp16"),
        plans_place("a/b c", "0" * 64, "fp16"),
    }
    assert len(places) == 5 and all(place.is_relative_to(own_home) for place in places)
    assert not own_home.exists()
