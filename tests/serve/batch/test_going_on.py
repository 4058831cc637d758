"""What a later start believes: the ledger's word, a listing and a sample; and who may join it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sdxl.params import GenerationParams
from serve.batch import command
from serve.batch.batch_spec import BatchFailed
from serve.batch.job import FORMERLY
from serve.batch.results import MANIFEST
from serve.batch.rows import content_id
from serve.batch.store import FolderStore
from serve.orders import ImageOrder, ModelCard, Update
from tests.serve.batch.drawers import SMALL, Drawer, dead_letters, make, noted, pictures, prompts


def pictures_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pictures that a job reads, as it reads them."""
    names, get = [], FolderStore.get

    def noting(self: FolderStore, name: str) -> bytes:
        if name.startswith("images/"):
            names.append(name)
        return get(self, name)

    monkeypatch.setattr(FolderStore, "get", noting)
    # The contact sheet reads 24 however many there are.
    monkeypatch.setattr("serve.batch.results.write_sheet", lambda store, images: [])
    return names


@pytest.mark.parametrize("flags", [(), ("--tar",)])
def test_going_on_reads_a_sample_and_with_a_flag_everything(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.batch.finished.SAMPLED", 0.0)
    source, out, log = prompts(tmp_path, 64), tmp_path / "out", tmp_path / "log"
    assert make(source, out, *SMALL, *flags) == 0
    read = pictures_read(monkeypatch)
    assert make(source, out, *SMALL, *flags, load=partial(Drawer, str(log))) == 0
    assert len(set(read)) == 1, f"read {len(set(read))} files, needed a worker's first alone"
    assert make(source, out, *SMALL, *flags, "--read-back", load=partial(Drawer, str(log))) == 0
    assert len(set(read)) == (8 if flags else 64) and noted(log) == []


def test_a_sample_that_is_wrong_has_the_rest_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.batch.finished.SAMPLED", 0.0)
    source, out, log = prompts(tmp_path, 24), tmp_path / "out", tmp_path / "log"
    assert make(source, out, *SMALL) == 0
    before = pictures(out)
    for name in (sorted(before)[i] for i in (*range(8), 20)):
        path = out / "images" / name
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    assert make(source, out, *SMALL, load=partial(Drawer, str(log))) == 0
    assert len(noted(log)) == 9 and pictures(out) == before
    assert command.main(["--verify", str(out)]) == 0


@pytest.mark.parametrize("flags", [(), ("--tar",)])
def test_a_picture_that_is_damaged_unseen_is_told_and_ends_no_job(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contact sheet meets it, which is drawn of 24 pictures."""
    monkeypatch.setattr("serve.batch.finished.SAMPLED", 0.0)
    source, out = prompts(tmp_path, 16), tmp_path / "out"
    assert make(source, out, *SMALL, *flags) == 0
    last = sorted((out / "images").rglob("*.*"))[-1]
    last.write_bytes(b"x" * last.stat().st_size)
    assert make(source, out, *SMALL, *flags) == 0
    told = json.loads((out / "summary.json").read_text())["run"]["trouble"]
    assert "cannot be read; --read-back makes" in told
    assert make(source, out, *SMALL, *flags, "--read-back") == 0
    assert command.main(["--verify", str(out)]) == 0


def test_verify_reads_every_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert make(prompts(tmp_path, 24), out, *SMALL) == 0
    read = pictures_read(monkeypatch)
    assert command.main(["--verify", str(out)]) == 0
    assert len(read) == 24


def test_a_job_that_the_version_before_began_goes_on(tmp_path: Path) -> None:
    """Its lines name no engine, and rows that say the same as an earlier one were given up."""
    source, out, log = tmp_path / "prompts.txt", tmp_path / "out", tmp_path / "log"
    source.write_text("a\nb\na\nc\n")
    assert make(source, out) == 0
    ledger = out / "ledger/000000.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines:
        del line["engine"]
    (twin,) = (line for line in lines if line["id"].endswith("-row2"))
    (out / twin["file"]).unlink()
    twin |= {"id": content_id({"prompt": "a"}), "error": "id: is not allowed", "params": {}}
    twin |= {"file": "", "sha256": "", "size": 0, "seed": 0, "timings": {}}
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert make(source, out, load=partial(Drawer, str(log))) == 0
    assert len(noted(log)) == 1 and len(pictures(out)) == 4 and dead_letters(out) == []
    assert command.main(["--verify", str(out)]) == 0


# -- several kinds of GPU -------------------------------------------------------------------


class Carded(Drawer):
    """One that says what engine it is, whole, and draws nothing before all its peers do."""

    def __init__(self, engine: dict[str, str], began: set[str], peers: int) -> None:
        super().__init__()
        self.said = {"backend": "tensorrt", "precision": "int8", "version": "10.14"} | engine
        self.began, self.peers = began, peers

    async def card(self) -> ModelCard:
        return replace(await super().card(), engines=self.said)

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        self.began.add(self.said["device"])
        while len(self.began) < self.peers:
            await asyncio.sleep(0.01)
        async for update in super().generate(order):
            yield update


def kinds(*engines: dict[str, str]) -> Callable[[], Carded]:
    """Workers of these kinds in turn."""
    turns, began = itertools.cycle(engines), set[str]()
    return lambda: Carded(next(turns), began, len(engines))


H100, L40S = {"device": "H100"}, {"device": "L40S"}


def test_gpus_of_several_kinds_share_a_job_and_each_picture_names_its_own(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    source, out = prompts(tmp_path, 64), tmp_path / "out"
    two = ("--workers", "2", "--mixed-gpus", *SMALL)
    assert make(source, out, *two, load=kinds(H100, L40S)) == 0
    told = parquet.read_table(out / MANIFEST).column("engine").to_pylist()
    assert set(told) == {"tensorrt int8 H100 10.14", "tensorrt int8 L40S 10.14"}
    counts = json.loads((out / "summary.json").read_text())["images_by_engine"]
    assert counts == {name: told.count(name) for name in set(told)}
    assert command.main(["--verify", str(out)]) == 0


def test_a_kind_that_comes_later_is_taken_on_where_the_command_says_so(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 8), tmp_path / "out"
    assert make(source, out, load=kinds(H100)) == 0
    with pytest.raises(BatchFailed, match="--mixed-gpus allows both"):
        make(source, out, load=kinds(L40S))
    assert make(source, out, "--mixed-gpus", load=kinds(L40S)) == 0


def test_another_precision_is_refused_among_several_kinds_too(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 8), tmp_path / "out"
    assert make(source, out, load=kinds(H100)) == 0
    with pytest.raises(BatchFailed, match="needed the same precision"):
        make(source, out, "--mixed-gpus", load=kinds({**L40S, "precision": "fp16"}))


# -- presets --------------------------------------------------------------------------------


def test_a_jobs_quality_is_its_models_and_stays_what_it_began_with(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 2), tmp_path / "out"
    assert make(source, out, "--quality", "low") == 0
    stored = json.loads((out / "job.json").read_text())
    assert stored["parameters"] == {"steps": 20, "cache_interval": 2}
    del stored["presets"]
    stored["parameters"] = FORMERLY["low"].values()
    (out / "job.json").write_text(json.dumps(stored))
    assert make(source, out, "--quality", "low") == 0, "a job from before there were any goes on"
    assert make(source, tmp_path / "other", "--quality", "low", "--steps", "7") == 0
    other = json.loads((tmp_path / "other/job.json").read_text())
    assert other["parameters"] == {"steps": 7, "cache_interval": 2}


def test_a_job_that_began_when_every_step_count_had_one_interval_goes_on_with_it(
    tmp_path: Path,
) -> None:
    source, out = prompts(tmp_path, 2), tmp_path / "out"
    quick = ("--steps", "4")
    assert make(source, out, *quick) == 0
    stored = json.loads((out / "job.json").read_text())
    assert stored["usual_interval"] is None and intervals(out) == [1, 1]
    del stored["usual_interval"]
    (out / "job.json").write_text(json.dumps(stored))
    for ledger in (out / "ledger").glob("*"):
        ledger.unlink()
    assert make(source, out, *quick) == 0
    assert intervals(out) == [2, 2]


def intervals(out: Path) -> list[int]:
    texts = (file.read_text() for file in (out / "ledger").glob("*"))
    entries = (json.loads(line) for text in texts for line in text.splitlines())
    return [GenerationParams.from_dict(entry["params"]).interval for entry in entries]
