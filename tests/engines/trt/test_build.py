"""A build publishes all plans or none, and builds no plan twice."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines.folders.engine_folder import EngineFolder
from engines.folders.export_folder import ExportFolder
from engines.folders.publishing import Busy, publish
from engines.folders.shipped import open_mini
from engines.folders.targets import TARGETS
from engines.parity.findings import CheckFailed
from engines.parity.proof import Proof, not_run
from engines.trt import build as build_module
from engines.trt.build import Prove, build
from sdxl.files import OutputError
from tests.engines.fake_builds import FakeWorker, order_of, proven
from tests.engines.tiny_export import PARITY, sign, write_export

NETWORKS = [
    *("clip_g", "clip_l", "unet_deep", "unet_prompt", "unet_shallow", "vae_decoder", "vae_encoder")
]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Site:
    """An export, the place for its plans, and the worker that builds them."""

    export: ExportFolder
    out: Path
    worker: FakeWorker

    def build(self, prove: Prove = lambda _: not_run(""), **changes: Any) -> EngineFolder:
        return build(order_of(self.export, self.out, **changes), prove=prove)

    def rebuild(self, prove: Prove = lambda _: not_run(""), **changes: Any) -> list[str]:
        """Build again and return the names of the built plans."""
        self.worker.built.clear()
        self.worker.fails_at = None
        self.build(prove, **changes)
        return sorted(self.worker.built)

    def fail(self, name: str, fault: BaseException | None = None) -> None:
        self.worker.fails_at = name
        self.worker.fault = fault or RuntimeError("killed")
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            self.build()


@pytest.fixture
def site(tiny: ExportFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    worker = FakeWorker()
    monkeypatch.setattr(build_module, "run_worker", worker)
    return Site(tiny, tmp_path / "plans" / "l40s", worker)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_build_leaves_a_plan_for_each_network_and_a_manifest(site: Site) -> None:
    engines = site.build()
    assert sorted(site.worker.built) == NETWORKS
    assert files(site.out) == sorted(["manifest.json", *(f"{n}.plan" for n in NETWORKS)])
    assert files(site.out.parent) == [".l40s.lock", "l40s"]
    assert engines == EngineFolder.read(site.out)
    assert (engines.model_digest, engines.gpu, engines.precision) == ("d" * 64, "L40S", "fp32")
    assert engines.export_parity == PARITY and not engines.is_run


def test_an_unchanged_build_touches_nothing(site: Site) -> None:
    site.build()
    before = {name: (site.out / name).stat().st_mtime_ns for name in files(site.out)}
    assert site.rebuild() == []
    assert {name: (site.out / name).stat().st_mtime_ns for name in files(site.out)} == before


def test_only_a_changed_graph_is_built_again(site: Site) -> None:
    site.build()
    with (site.export.folder / "vae_decoder.onnx").open("ab") as file:
        file.write(b"changed")
    sign(site.export.folder, "vae_decoder.onnx")
    site.export = ExportFolder.open(site.export.folder)
    assert site.rebuild() == ["vae_decoder"]
    assert files(site.out.parent) == [".l40s.lock", "l40s"]


@pytest.mark.parametrize(
    "change", [{"max_batch": 2}, {"is_sparse": True}, {"target": TARGETS["h100"]}]
)
def test_another_recipe_is_another_plan(site: Site, change: dict[str, Any]) -> None:
    site.build()
    assert "unet_deep" in site.rebuild(**change)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"has_controlnets": True}, {"unet_deep+control", "unet_shallow+control"}),
        (
            {"has_controlnets": True, "has_loras": True},
            {"unet_deep+locon", "unet_deep+locon+control", "unet_shallow+locon+control"},
        ),
        ({"has_image_prompts": True}, {"unet_deep+image"}),
        (
            {"has_image_prompts": True, "has_controlnets": True, "has_loras": True},
            {"unet_deep+image", "unet_deep+locon+control+image"},
        ),
    ],
)
def test_plans_for_requests_are_built_beside_the_others(
    change: dict[str, Any], names: set[str], site: Site
) -> None:
    site.export = open_mini()
    site.build()
    rest = set(site.rebuild(**change))
    assert names <= rest and not rest & set(NETWORKS)
    assert set(EngineFolder.read(site.out).plans) == rest | set(NETWORKS)
    assert site.rebuild(**change) == [] == site.rebuild()
    assert set(EngineFolder.read(site.out).plans) == set(NETWORKS)


def test_a_killed_build_continues(site: Site) -> None:
    site.fail("unet_shallow", KeyboardInterrupt())
    assert not site.out.exists(), "unfinished engines are published"
    finished = set(site.worker.built)
    assert finished and set(site.rebuild()) == set(NETWORKS) - finished
    assert files(site.out.parent) == [".l40s.lock", "l40s"]


@pytest.mark.parametrize("stage", ["manifest", "publishing"])
def test_a_build_that_fails_at_the_end_repeats_no_plan(
    stage: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise FULL

    with monkeypatch.context() as broken:
        target: Any = EngineFolder if stage == "manifest" else build_module
        broken.setattr(target, "write" if stage == "manifest" else "sync_folder", fail)
        with pytest.raises(OutputError, match="No space left"):
            site.build()
    assert site.rebuild() == [] and files(site.out)[0] == "clip_g.plan"


def test_a_folder_of_something_else_is_not_replaced(site: Site, tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "chapter.txt").write_text("once")
    for place in (tmp_path / "book", site.export.folder):
        site.out, before = place, files(place)
        with pytest.raises(OutputError, match="there is something else in it"):
            site.build()
        assert files(place) == before and not site.worker.built


def test_a_place_without_a_name_or_below_a_file_is_refused(site: Site, tmp_path: Path) -> None:
    site.out = Path("/")
    with pytest.raises(OutputError, match="must be a folder with a name"):
        site.build()
    (tmp_path / "file").write_text("in the way")
    site.out = tmp_path / "file" / "l40s"
    with pytest.raises(OutputError, match="file/l40s"):
        site.build()


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_interrupted_publishing_restores_the_old_folder(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, target = tmp_path / "new", tmp_path / "target"
    for folder in (finished, target):
        folder.mkdir()
        (folder / "which").write_text(folder.name)
    rename = os.rename

    def fail(source: Path, to: Path) -> None:
        if source == finished:
            raise fault
        rename(source, to)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        publish(finished, target)
    assert (target / "which").read_text() == "target"


def test_a_damaged_plan_is_built_again(site: Site) -> None:
    site.fail("vae_decoder")
    (site.out.with_name(".l40s.making") / "unet_deep.plan").write_bytes(b"cut off")
    assert site.rebuild() == ["unet_deep", "vae_decoder", "vae_encoder"]
    plan = site.out / "clip_l.plan"
    content = plan.read_bytes()
    plan.unlink()
    plan.write_bytes(bytes(len(content)))
    assert site.rebuild() == ["clip_l"] and plan.read_bytes() == content


def test_a_failed_rebuild_leaves_the_old_engines_unchanged(site: Site) -> None:
    site.build()
    before = {name: (site.out / name).read_bytes() for name in files(site.out)}
    site.worker.fails_at = "unet_deep"
    with pytest.raises(RuntimeError):
        site.build(max_batch=2)
    assert {name: (site.out / name).read_bytes() for name in files(site.out)} == before


def test_a_second_build_of_the_same_engines_is_refused(site: Site) -> None:
    site.out.parent.mkdir()
    with site.out.with_name(".l40s.lock").open("w") as other:
        other.write("process 4711")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="l40s: being made by process 4711; "):
            site.build()
    assert not site.worker.built
    site.build()


def test_a_full_disk_is_found_before_a_build(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 0))
    with pytest.raises(OutputError, match="on a disk with enough space.* .0.0 MB free") as caught:
        site.build()
    assert str(site.out) in str(caught.value) and not site.worker.built and not site.out.exists()


def test_progress_is_reported_for_each_plan_that_is_built(site: Site) -> None:
    reported: list[tuple[str, float]] = []
    order = order_of(site.export, site.out)
    build(order, lambda name, share: reported.append((name, share)))
    assert [r for r in reported if r[0] == "unet_deep"] == [("unet_deep", 0.5), ("unet_deep", 1.0)]
    reported.clear()
    build(order, lambda name, share: reported.append((name, share)))
    assert not reported


def test_engines_of_other_weights_replace_the_old_ones(site: Site, tmp_path: Path) -> None:
    site.build()
    site.export = write_export(tmp_path / "b", digest="b" * 64)
    assert site.build().model_digest == "b" * 64


def test_the_manifest_has_what_the_proof_found(site: Site) -> None:
    ran: list[str] = []

    def prove(engines: EngineFolder) -> Proof:
        ran.append(engines.folder.name)
        return proven(engines)

    for _ in range(2):
        engines = site.build(prove)
        assert engines == EngineFolder.read(site.out)
        assert engines.is_run and engines.unchecked is None
        assert engines.costs == {"unet_deep": {"2": 0.5}} and engines.device_bytes == 2**30
    assert ran == [".l40s.making"], "once, before it was published"


def test_plans_that_fail_the_proof_are_neither_published_nor_built_again(site: Site) -> None:
    def refuse(engines: EngineFolder) -> Proof:
        raise CheckFailed("unet_deep, relative L2 measured 0.7, required at most 0.2")

    with pytest.raises(CheckFailed, match="measured 0.7"):
        site.build(refuse)
    assert not site.out.exists()
    assert site.rebuild(proven) == [] and EngineFolder.read(site.out).is_run
