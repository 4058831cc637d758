"""An untrusted export.json or manifest.json is read, or refused in one line."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest

from engines.folders.engine_folder import EngineFolder
from engines.folders.export_folder import ExportFolder
from engines.folders.profiles import buckets, latent_sides, most_chunks
from engines.trt import build as build_module
from engines.trt.build import build
from engines.trt.engine_store import best_for
from engines.trt.flavours import TENSORRT_RTX
from tests.engines.fake_builds import L40S, FakeWorker, order_of
from tests.mutants import change_bytes, change_json, check_each


def read_export(folder: Path, original: str, chance: random.Random) -> None:
    (folder / "export.json").write_bytes(change_json(original, chance))
    export = ExportFolder.open(folder, verify=True)
    json.dumps(export.as_dict())
    for name in export.graphs:
        export.graph_bytes(name)


def read_graph(folder: Path, originals: dict[str, bytes], chance: random.Random) -> None:
    """Change the graph, too: its digest must stop it, whatever its content."""
    name = chance.choice(sorted(originals))
    (folder / name).write_bytes(change_bytes(originals[name], chance))
    try:
        ExportFolder.open(folder, verify=True)
    finally:
        (folder / name).write_bytes(originals[name])


def read_engines(folder: Path, original: str, chance: random.Random) -> None:
    (folder / "manifest.json").write_bytes(change_json(original, chance))
    best_for(folder.parent, TENSORRT_RTX, L40S, "d" * 64, None)
    engines = EngineFolder.read(folder)
    engines.mismatch(L40S, "1")
    buckets(engines.max_batch)
    for name in engines.plans:
        engines.plan_bytes(name)
    deep = engines.plans["unet_deep"]
    latent_sides(deep.spec, deep.profiles)
    most_chunks(deep.spec, deep.profiles)
    json.dumps(engines.as_dict())


@pytest.fixture
def engines(tiny: ExportFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineFolder:
    monkeypatch.setattr(build_module, "run_worker", FakeWorker())
    return build(order_of(tiny, tmp_path / "plans" / "l40s"))


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])
def test_mutated_manifests_are_read_or_refused(
    count: int, tiny: ExportFolder, engines: EngineFolder
) -> None:
    text = (tiny.folder / "export.json").read_text()
    graphs = {g.file: (tiny.folder / g.file).read_bytes() for g in tiny.graphs.values()}
    check_each(count // 4, partial(read_graph, tiny.folder, graphs))
    check_each(count, partial(read_export, tiny.folder, text))
    text = (engines.folder / "manifest.json").read_text()
    check_each(count, partial(read_engines, engines.folder, text))
