"""Rows of a job that name ControlNets and their maps, or have a refiner."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import engines
from sdxl.catalogue import Catalogue
from sdxl.controls import Control
from sdxl.images import read_parameters, to_pixels
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.provenance import Provenance
from serve.batch import command
from serve.batch.batch_spec import HAS_DEAD, BatchFailed
from serve.batch.job import FILE
from serve.batch.renderers import LocalRenderer
from serve.batch.running import run
from serve.front.api import create_app
from serve.orders import ImageOrder
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.sdxl.control_nets import random_control
from tests.sdxl.refiners import write_refiner
from tests.sdxl.test_source import plain, saved
from tests.serve.batch.drawers import (
    Editor,
    dead_letters,
    jsonl,
    ledger_of,
    make,
    order_of,
    parquet,
    pictures,
)
from tests.serve.batch.test_rows import line
from tests.serve.servers import listening_to
from tests.serve.test_controls import assert_same
from tests.serve.test_edits import data_url, picture_in, pixels

MAP, PHOTO = saved(Image.effect_noise((128, 128), 50).convert("RGB")), saved(plain(64, 64))
DIGEST, URL = hashlib.sha256(MAP).hexdigest(), data_url(MAP)
SIZE: dict[str, Any] = {"width": 128, "height": 128}
EDGES = Control("edges", DIGEST, 0.8, preprocess="canny")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "a.png").write_bytes(MAP)
    (tmp_path / "photo.png").write_bytes(PHOTO)
    (tmp_path / "text.png").write_text("not a picture")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def orders_of(source: Path, *flags: str) -> list[ImageOrder]:
    drawer = Editor()
    assert make(source, source.parent / "out", *flags, load=lambda: drawer) == 0
    assert command.main(["--verify", str(source.parent / "out")]) == 0
    return sorted(drawer.orders, key=lambda order: order.params.prompt)


def csv(folder: Path, text: str) -> Path:
    path = folder / "rows.csv"
    path.write_text(text)
    return path


FIELDS = {"name": "edges", "strength": 0.8, "preprocess": "canny"}
LISTED = [{**FIELDS, "image": "maps/a.png"}]
ONE = {"control": "edges:canny", "control_image": "maps/a.png", "control_strength": 0.8}
QUOTED = json.dumps(LISTED).replace('"', '""')


@pytest.mark.parametrize(
    ("rows", "flags"),
    [
        (LISTED, ()),
        (["edges=maps/a.png:0.8:canny"], ()),
        ([{**FIELDS, "image": URL}], ()),
        (ONE, ()),
        ({"control_image": "maps/a.png"}, ("--control", "edges:0.8:canny")),
        ({}, ("--control", "edges=maps/a.png:0.8:canny")),
        ("prompt,control,control_image,control_strength\na,edges:canny,maps/a.png,0.8\n", ()),
        (f'prompt,controls\na,"{QUOTED}"\n', ()),
        ('prompt,controls\na,"edges=maps/a.png:0.8:canny"\n', ()),
        (line("a", controls=[{**FIELDS, "image": URL}]), ()),
        ("parquet", ()),
    ],
)
def test_every_form_of_a_row_gives_the_same_control(
    rows: Any, flags: tuple[str, ...], folder: Path
) -> None:
    if rows == "parquet":
        second = {"prompt": "b", "controls": [{"name": "edges", "image": "photo.png"}]}
        source = parquet(folder, [{"prompt": "a", "controls": LISTED}, second])
    elif isinstance(rows, str):
        source = csv(folder, rows)
    elif isinstance(rows, list):
        source = jsonl(folder, [{"prompt": "a", "controls": rows}])
    else:
        source = jsonl(folder, [rows if "body" in rows else {"prompt": "a", **rows}])
    order, *_ = orders_of(source, *flags)
    assert (order.params.controls, order.maps) == ((EDGES,), {DIGEST: MAP})
    stored = ledger_of(folder / "out")[0]["params"]["controls"][0]
    assert (stored["name"], stored["image"]) == ("edges", DIGEST)


def test_an_edit_s_control_without_a_map_uses_its_image(folder: Path) -> None:
    rows = [
        {"prompt": "a", "image": "photo.png", "control": "edges"},
        {"prompt": "b", "image": "photo.png", "controls": LISTED},
    ]
    first, second = orders_of(jsonl(folder, rows))
    assert first.source is not None and first.params.controls == (Control("edges"),)
    assert second.source is not None and second.maps == {DIGEST: MAP} and not first.maps


def test_rows_with_wrong_maps_are_dead_letters(folder: Path) -> None:
    inner = folder / "job"
    inner.mkdir()
    (inner / "text.png").write_text("not a picture")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"control": "edges", "control_image": "none.png"}, "controls must be a readable file"),
        ({"control": "edges", "control_image": "text.png"}, "must be a PNG, JPEG or WEBP"),
        ({"control": "edges", "control_image": "../photo.png"}, "below the input's folder"),
        ({"control": "edges"}, "controls with 'edges': needs the picture of its map"),
        ({"control_image": "photo.png"}, "control_image needs control"),
        ({"control": "edges", "controls": LISTED}, "cannot be set beside controls"),
        ({"controls": [{"name": "edges", "image": [1]}]}, "must be a path or a data URL"),
        ({"controls": {"name": "edges"}}, "controls must be a list of NAME=FILE"),
        ({"control": "edges", "control_image": URL, "control_strength": 3}, "from 0 to 2"),
        (line("a", controls=[{"name": "edges", "image": "text.png"}]), "must be a data URL"),
        (line("b", controls=["edges"]), "needs the picture of its map"),
    ]
    rows = [row if "body" in row else {"prompt": str(i), **row} for i, (row, _) in enumerate(wrong)]
    source = jsonl(inner, [*rows, {"prompt": "good", "control": "edges", "control_image": URL}])
    assert make(source, folder / "out", load=Editor) == HAS_DEAD
    assert len(pictures(folder / "out")) == 1
    letters = dead_letters(folder / "out")
    for letter, (row, words) in zip(letters, wrong, strict=True):
        assert words in letter["error"], row


def test_a_changed_map_of_a_flag_is_another_job(folder: Path) -> None:
    source, flags = jsonl(folder, [{"prompt": "a"}]), ("--control", "edges=maps/a.png")
    orders_of(source, *flags)
    (folder / "maps").rename(folder / "moved")
    moved = ("--control", "edges=moved/a.png")
    assert make(source, folder / "out", *moved, load=Editor) == 0
    (folder / "moved" / "a.png").write_bytes(PHOTO)
    with pytest.raises(InvalidParams, match="parameters must be .*to resume the job there"):
        make(source, folder / "out", *moved, load=Editor)


def test_a_job_makes_the_library_s_pictures(folder: Path, mini: Pipeline) -> None:
    """A map of other proportions, or an unknown name, costs one row."""
    (folder / "wide.png").write_bytes(saved(plain(128, 64)))
    random_control(1).save_pretrained(folder / "nets" / "edges")
    model = replace(mini, catalogue=Catalogue(control_folders=[folder / "nets"]))
    fields: dict[str, Any] = {"prompt": "a ring", "steps": 3, "seed": 7, **SIZE}
    rows = [
        {**fields, "control": "edges", "control_image": "maps/a.png", "id": "a"},
        {**fields, "control": "edges", "control_image": "wide.png"},
        {**fields, "control": "edgez", "control_image": "maps/a.png"},
    ]
    source, out = jsonl(folder, rows), folder / "out"

    assert make(source, out, load=lambda: LocalRenderer(model, Provenance())) == HAS_DEAD
    (file,) = pictures(out).values()
    control = Control("edges", DIGEST)
    params = GenerationParams(**{**fields, "controls": (control,)})
    (result,) = model.generate([WithPictures(params, maps={DIGEST: MAP})])
    assert result.image is not None
    distance = np.abs(pixels(file).astype(int) - to_pixels(result.image)).max()
    assert distance <= 2, f"differs by {distance} of 255"
    stored = read_parameters(file)
    assert stored["controls"][0]["image"] == DIGEST and "edges" in stored["control_files"]
    errors = [letter["error"] for letter in dead_letters(out)]
    assert "its map is 128x64, the picture 128x128" in errors[0]
    assert "controls must name ControlNets of the model, such as edges" in errors[1]


def test_a_changed_file_that_rows_name_stops_the_resumed_job(folder: Path) -> None:
    source = jsonl(folder, [{"prompt": "a <lora:ink>"}, {"prompt": "b <lora:none>"}])
    (folder / "loras").mkdir()
    (folder / "loras" / "ink.safetensors").write_bytes(b"first")
    flags = ("--loras", "loras")
    orders_of(source, *flags)
    (folder / "loras" / "other.safetensors").write_bytes(b"new")
    assert make(source, folder / "out", *flags, load=Editor) == 0
    (folder / "loras" / "ink.safetensors").write_bytes(b"second")
    with pytest.raises(BatchFailed, match="LoRA 'ink' has changed since the job began with it"):
        make(source, folder / "out", *flags, load=Editor)


def test_a_job_through_a_service_has_its_pictures(folder: Path, controlled: Worker) -> None:
    (folder / "wide.png").write_bytes(saved(plain(128, 64)))
    fields = {"prompt": "a ring", "seed": 7, "width": 128, "height": 128, "control": "edges"}
    rows = [{**fields, "control_image": name} for name in ("maps/a.png", "wide.png")]
    source, out = jsonl(folder, rows), folder / "out"
    with listening_to(create_app([controlled], ServeSettings())) as url:
        flags = ("--through", url, "--steps", "3", "--control", "edges:0.5")
        assert run(order_of(source, out, *flags)) == HAS_DEAD
        body = {"prompt": "a ring", "seed": 7, "size": "128x128", "steps": 3}
        control = {"name": "edges", "image": URL}
        answer = httpx.post(f"{url}/v1/images/generations", json={**body, "controls": [control]})
    (file,) = pictures(out).values()
    assert_same(file, picture_in(answer))
    assert read_parameters(file)["controls"][0]["image"] == DIGEST
    (dead,) = dead_letters(out)
    assert "its map is 128x64, the picture 128x128" in dead["error"]


# -- the refiner ----------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_with_deep_steps_and_a_refiner_are_as_from_the_pipeline(tmp_path: Path) -> None:
    folder = write_refiner(tmp_path / "small")
    model = engines.load("mini", "torch", refiner=str(folder))
    row = {"prompt": "a ring", "seed": 7, "steps": 5, **SIZE}
    flags = "--refiner", str(folder), "--refiner-switch-at", "0.6", "--deep-steps", "0,2"
    source, out = jsonl(tmp_path, [row]), tmp_path / "out"
    assert make(source, out, *flags, load=lambda: LocalRenderer(model, Provenance())) == 0
    (file,) = pictures(out).values()
    params = GenerationParams(
        "a ring", seed=7, steps=5, deep_steps=(0, 2), refiner="small", refiner_switch_at=0.6, **SIZE
    )
    (result,) = model.generate([params])
    assert result.image is not None and result.deep_steps == 3
    distance = np.abs(pixels(file).astype(int) - to_pixels(result.image)).max()
    assert distance <= 2, f"differs by {distance} of 255"
    assert read_parameters(file)["refiner"] == "small"


def test_a_changed_refiner_stops_the_resumed_job(tmp_path: Path) -> None:
    folder = write_refiner(tmp_path / "small")
    source, out = jsonl(tmp_path, [{"prompt": "a ring"}]), tmp_path / "out"
    flags = "--refiner", str(folder)
    assert make(source, out, *flags, load=Editor) == 0
    assert [*json.loads((out / FILE).read_text())["files"]] == ["refiner 'small'"]
    config = folder / "unet" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(BatchFailed, match="refiner 'small' has changed since the job began"):
        make(source, out, *flags, load=Editor)
