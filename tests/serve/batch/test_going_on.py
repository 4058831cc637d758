"""A rerun's checks of finished pictures, and the workers and older jobs that it accepts."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from serve.batch import command, ledger
from serve.batch.batch_spec import BatchFailed
from serve.batch.finished import FinishedPictures
from serve.batch.results import MANIFEST
from serve.batch.store import FolderStore
from serve.orders import ImageOrder, ModelCard, Update
from tests.serve.batch.drawers import SMALL, Drawer, lines_of, make, pictures, prompts


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads only its first picture."""
    monkeypatch.setattr("serve.batch.finished.SAMPLED", 0.0)


@pytest.mark.parametrize("flags", [(), ("--tar",)])
def test_a_rerun_reads_a_sample_and_with_read_back_everything(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, log = prompts(tmp_path, 64), tmp_path / "out", tmp_path / "log"
    assert make(source, out, *SMALL, *flags) == 0
    read, get = set[str](), FolderStore.get

    def recorded(store: FolderStore, name: str) -> bytes:
        if name.startswith("images/"):
            read.add(name)
        return get(store, name)

    monkeypatch.setattr(FolderStore, "get", recorded)
    # The contact sheet always reads 24 pictures.
    monkeypatch.setattr("serve.batch.results.write_sheet", lambda store, images: [])
    assert make(source, out, *SMALL, *flags, load=partial(Drawer, str(log))) == 0
    assert len(read) == 1, f"read {len(read)} files, needed only the worker's first"
    assert make(source, out, *SMALL, *flags, "--read-back", load=partial(Drawer, str(log))) == 0
    assert len(read) == (8 if flags else 64) and lines_of(log) == []


def test_after_a_damaged_sample_all_pictures_are_read(tmp_path: Path) -> None:
    source, out, log = prompts(tmp_path, 24), tmp_path / "out", tmp_path / "log"
    assert make(source, out, *SMALL) == 0
    before = pictures(out)
    for name in (sorted(before)[i] for i in (*range(8), 20)):
        path = out / "images" / name
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    assert make(source, out, *SMALL, load=partial(Drawer, str(log))) == 0
    assert len(lines_of(log)) == 9 and pictures(out) == before
    assert command.main(["--verify", str(out)]) == 0


def test_each_of_two_pieces_checked_at_once_is_read_whole_after_its_damaged_sample(
    copied: Path,
) -> None:
    store = FolderStore(copied / "out", "run")
    store.join()
    first, second = ([*ledger.read(store, shard).values()] for shard in ("000000", "000001"))
    for entry in (*first, *second):
        store.put(entry.file, store.get(entry.file)[::-1])
    finished, calls = FinishedPictures(store, False, "seed"), list[int]()

    def on_progress() -> None:
        """Check the second piece while the sample of the first is read."""
        calls.append(1)
        if len(calls) == 2:
            finished._has_read = False
            assert finished.find_sound(second, lambda: None) == []

    assert finished.find_sound(first, on_progress) == []


@pytest.mark.parametrize("flags", [(), ("--tar",)])
def test_a_damaged_picture_outside_the_sample_is_reported_and_stops_no_job(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """The contact sheet, which shows 24 pictures, finds the damage."""
    source, out = prompts(tmp_path, 16), tmp_path / "out"
    assert make(source, out, *SMALL, *flags) == 0
    last = sorted((out / "images").rglob("*.*"))[-1]
    last.write_bytes(b"x" * last.stat().st_size)
    assert make(source, out, *SMALL, *flags) == 0
    trouble = json.loads((out / "summary.json").read_text())["run"]["trouble"]
    assert "cannot be read; --read-back makes" in trouble
    assert make(source, out, *SMALL, *flags, "--read-back") == 0
    assert command.main(["--verify", str(out)]) == 0


# -- several kinds of GPU -------------------------------------------------------------------


class Carded(Drawer):
    """It has its own engine, and draws only when all peers have begun."""

    def __init__(self, engine: dict[str, str], began: set[str], peers: int) -> None:
        super().__init__()
        self.engines = {"backend": "tensorrt", "precision": "int8", "version": "10.14"} | engine
        self.began, self.peers = began, peers

    async def card(self) -> ModelCard:
        return replace(await super().card(), engines=self.engines)

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        self.began.add(self.engines["device"])
        while len(self.began) < self.peers:
            await asyncio.sleep(0.01)
        async for update in super().generate(order):
            yield update


def kinds(*engines: dict[str, str]) -> Callable[[], Carded]:
    """Load workers with these engines in turn."""
    turns, began = itertools.cycle(engines), set[str]()
    return lambda: Carded(next(turns), began, len(engines))


H100, L40S = {"device": "H100"}, {"device": "L40S"}


def test_several_kinds_of_gpus_share_a_job_and_each_picture_names_its_gpu(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    source, out = prompts(tmp_path, 64), tmp_path / "out"
    two = ("--workers", "2", "--mixed-gpus", *SMALL)
    assert make(source, out, *two, load=kinds(H100, L40S)) == 0
    engines = parquet.read_table(out / MANIFEST).column("engine").to_pylist()
    assert set(engines) == {"tensorrt int8 H100 10.14", "tensorrt int8 L40S 10.14"}
    counts = json.loads((out / "summary.json").read_text())["images_by_engine"]
    assert counts == {name: engines.count(name) for name in set(engines)}
    assert command.main(["--verify", str(out)]) == 0


def test_a_rerun_on_another_gpu_needs_a_flag_and_another_precision_is_refused(
    tmp_path: Path,
) -> None:
    source, out = prompts(tmp_path, 8), tmp_path / "out"
    assert make(source, out, load=kinds(H100)) == 0
    with pytest.raises(BatchFailed, match="engine .*L40S.* cannot join.* --mixed-gpus allows both"):
        make(source, out, load=kinds(L40S))
    assert make(source, out, "--mixed-gpus", load=kinds(L40S)) == 0
    with pytest.raises(BatchFailed, match="expected the same precision"):
        make(source, out, "--mixed-gpus", load=kinds({**L40S, "precision": "fp16"}))


# -- presets --------------------------------------------------------------------------------


def test_a_job_keeps_the_preset_of_quality_that_it_began_with(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 2), tmp_path / "out"
    assert make(source, out, "--quality", "low") == 0
    stored = json.loads((out / "job.json").read_text())
    assert stored["parameters"] == {"steps": 20, "cache_interval": 2}
    stored["presets"]["low"]["steps"] = stored["parameters"]["steps"] = 10
    (out / "job.json").write_text(json.dumps(stored))
    assert make(source, out, "--quality", "low") == 0, "a job with other presets resumes"
    assert make(source, tmp_path / "other", "--quality", "low", "--steps", "7") == 0
    other = json.loads((tmp_path / "other/job.json").read_text())
    assert other["parameters"] == {"steps": 7, "cache_interval": 2}
