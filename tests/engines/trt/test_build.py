"""A build publishes everything or nothing, repeats nothing, and says what went wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from engines.folders.engine_folder import EngineFolder
from engines.folders.export_folder import ExportFolder
from engines.folders.publishing import Busy, publish
from engines.folders.targets import TARGETS
from engines.parity.findings import CheckFailed
from engines.parity.proof import Proof, not_run
from engines.trt import build as build_module
from engines.trt.build import build
from sdxl.files import OutputError
from tests.engines.fake_builds import FakeWorker, order_of, proven
from tests.engines.tiny_export import PARITY, sign, write_export

NETWORKS = [
    *("clip_g", "clip_l", "unet_deep", "unet_prompt", "unet_shallow", "vae_decoder", "vae_encoder")
]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    worker = FakeWorker()
    monkeypatch.setattr(build_module, "run_worker", worker)
    return worker


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_build_leaves_a_plan_for_each_network_and_a_manifest(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "plans" / "l40s"
    engines = build(order_of(tiny, out))
    assert sorted(worker.built) == NETWORKS
    assert files(out) == sorted(["manifest.json", *(f"{n}.plan" for n in NETWORKS)])
    assert files(out.parent) == [".l40s.lock", "l40s"]
    assert engines == EngineFolder.read(out)
    assert (engines.model_digest, engines.gpu, engines.precision) == ("d" * 64, "L40S", "fp32")
    assert engines.export_parity == PARITY and not engines.is_run


def test_nothing_unchanged_is_built_again(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    build(order_of(tiny, out))
    before = {name: (out / name).stat().st_mtime_ns for name in files(out)}
    build(order_of(tiny, out))
    assert sorted(worker.built) == NETWORKS
    assert {name: (out / name).stat().st_mtime_ns for name in files(out)} == before


def test_a_changed_graph_alone_is_built_again(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    build(order_of(tiny, out))
    worker.built.clear()
    with (tiny.folder / "vae_decoder.onnx").open("ab") as file:
        file.write(b"changed")
    sign(tiny.folder, "vae_decoder")
    build(order_of(ExportFolder.open(tiny.folder), out))
    assert worker.built == ["vae_decoder"]
    assert files(tmp_path) == [".l40s.lock", "l40s", "tiny"]


@pytest.mark.parametrize(
    "change", [{"max_batch": 2}, {"is_sparse": True}, {"target": TARGETS["h100"]}]
)
def test_another_recipe_is_another_plan(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker, change: dict[str, object]
) -> None:
    out = tmp_path / "l40s"
    build(order_of(tiny, out))
    worker.built.clear()
    build(order_of(tiny, out, **change))
    assert "unet_deep" in worker.built


def test_a_killed_build_goes_on_where_it_was(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    worker.fails_at, worker.fault = "unet_shallow", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        build(order_of(tiny, out))
    assert not out.exists(), "nothing half-built may have the engines' name"
    finished = list(worker.built)
    assert finished
    worker.built.clear()
    worker.fails_at = None
    build(order_of(tiny, out))
    assert not set(worker.built) & set(finished), "what was finished is built again"
    assert files(tmp_path) == [".l40s.lock", "l40s", "tiny"]


@pytest.mark.parametrize("stage", ["manifest", "publishing"])
def test_a_build_that_fails_at_the_end_repeats_no_plan(
    stage: str,
    tiny: ExportFolder,
    tmp_path: Path,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "l40s"
    with monkeypatch.context() as broken:
        if stage == "manifest":
            broken.setattr(EngineFolder, "write", full)
        else:
            broken.setattr(build_module, "sync_folder", full)
        with pytest.raises(OutputError, match="No space left"):
            build(order_of(tiny, out))
    worker.built.clear()
    build(order_of(tiny, out))
    assert not worker.built and files(out)[0] == "clip_g.plan"


def test_a_folder_of_something_else_is_not_replaced(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "book"
    out.mkdir()
    (out / "chapter.txt").write_text("once")
    for place in (out, tiny.folder):
        before = files(place)
        with pytest.raises(OutputError, match="there is something else in it"):
            build(order_of(tiny, place))
        assert files(place) == before and not worker.built


def test_a_place_without_a_name_is_refused(tiny: ExportFolder, worker: FakeWorker) -> None:
    with pytest.raises(OutputError, match="needed a folder with a name"):
        build(order_of(tiny, Path("/")))


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_publishing_that_breaks_off_puts_the_old_folder_back(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, target = tmp_path / "new", tmp_path / "target"
    for folder in (finished, target):
        folder.mkdir()
        (folder / "which").write_text(folder.name)
    rename = os.rename

    def breaks(source: Path, to: Path) -> None:
        if source == finished:
            raise fault
        rename(source, to)

    monkeypatch.setattr(os, "rename", breaks)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        publish(finished, target)
    assert (target / "which").read_text() == "target"


def test_a_plan_damaged_while_the_build_was_stopped_is_built_again(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    worker.fails_at = "vae_decoder"
    with pytest.raises(RuntimeError):
        build(order_of(tiny, out))
    (tmp_path / ".l40s.making" / "unet_deep.plan").write_bytes(b"cut off")
    worker.built.clear()
    worker.fails_at = None
    build(order_of(tiny, out))
    assert sorted(worker.built) == ["unet_deep", "vae_decoder", "vae_encoder"]


def test_a_damaged_published_plan_is_built_again(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    build(order_of(tiny, out))
    content = (out / "clip_l.plan").read_bytes()
    (out / "clip_l.plan").unlink()
    (out / "clip_l.plan").write_bytes(bytes(len(content)))
    worker.built.clear()
    build(order_of(tiny, out))
    assert worker.built == ["clip_l"] and (out / "clip_l.plan").read_bytes() == content


def test_a_failed_rebuild_leaves_the_old_engines_as_they_were(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    build(order_of(tiny, out))
    before = {name: (out / name).read_bytes() for name in files(out)}
    worker.fails_at = "unet_deep"
    with pytest.raises(RuntimeError):
        build(order_of(tiny, out, max_batch=2))
    assert {name: (out / name).read_bytes() for name in files(out)} == before


def test_a_second_build_of_the_same_engines_is_refused(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    with (tmp_path / ".l40s.lock").open("w") as other:
        other.write("process 4711")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="l40s: being made by process 4711; needed: wait"):
            build(order_of(tiny, out))
    assert not worker.built
    build(order_of(tiny, out))


def test_a_full_disk_is_found_before_anything_is_built(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 0))
    out = tmp_path / "l40s"
    with pytest.raises(OutputError, match="needed space on the disk .0.0 MB free") as caught:
        build(order_of(tiny, out))
    assert str(out) in str(caught.value) and not worker.built and not out.exists()


def test_a_disk_that_fills_up_during_a_build_leaves_nothing_published(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    worker.fails_at = "unet_deep"
    worker.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OutputError, match="No space left on device") as caught:
        build(order_of(tiny, out))
    assert str(out) in str(caught.value) and not out.exists()


def test_a_place_that_cannot_be_written_is_named(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="file/l40s"):
        build(order_of(tiny, tmp_path / "file" / "l40s"))


def test_progress_is_told_of_every_plan_that_is_built(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    told: list[tuple[str, float]] = []
    build(order_of(tiny, tmp_path / "l40s"), lambda name, share: told.append((name, share)))
    assert [t for t in told if t[0] == "unet_deep"] == [("unet_deep", 0.5), ("unet_deep", 1.0)]
    told.clear()
    build(order_of(tiny, tmp_path / "l40s"), lambda name, share: told.append((name, share)))
    assert not told


def test_a_model_exported_again_from_other_weights_replaces_the_engines(
    tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    build(order_of(write_export(tmp_path / "a", digest="a" * 64), out))
    engines = build(order_of(write_export(tmp_path / "b", digest="b" * 64), out))
    assert engines.model_digest == "b" * 64
    assert json.loads((out / "manifest.json").read_text())["model_digest"] == "b" * 64


def test_what_running_them_found_is_in_the_manifest(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    ran: list[Path] = []

    def prove(engines: EngineFolder) -> Proof:
        ran.append(engines.folder)
        return proven(engines)

    out = tmp_path / "l40s"
    for _ in range(2):
        engines = build(order_of(tiny, out), prove=prove)
        assert engines == EngineFolder.read(out)
        assert engines.is_run and engines.unchecked is None
        assert engines.costs == {"unet_deep": {"2": 0.5}} and engines.device_bytes == 2**30
    assert [folder.name for folder in ran] == [".l40s.making"], "once, before it was published"


def test_plans_that_are_not_the_model_are_not_published_and_not_built_again(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    def refuse(engines: EngineFolder) -> Proof:
        raise CheckFailed("unet_deep, relative L2 measured 0.7, required at most 0.2")

    out = tmp_path / "l40s"
    with pytest.raises(CheckFailed, match="measured 0.7"):
        build(order_of(tiny, out), prove=refuse)
    assert not out.exists()
    worker.built.clear()
    assert build(order_of(tiny, out), prove=proven).is_run and not worker.built


def test_plans_that_were_made_without_their_gpu_are_run_where_it_is(
    tiny: ExportFolder, tmp_path: Path, worker: FakeWorker
) -> None:
    out = tmp_path / "l40s"
    made = build(order_of(tiny, out), prove=lambda _: not_run("there is no L40S here"))
    assert made.unchecked == "not run: there is no L40S here"
    worker.built.clear()
    assert build(order_of(tiny, out), prove=proven).is_run and not worker.built
    assert EngineFolder.read(out).parity["findings"]
