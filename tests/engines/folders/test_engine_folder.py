"""Plans are checked before they run: their target, and every byte. Then they run the loop."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.folders.engine_folder import EngineError, EngineFolder
from engines.folders.export_folder import ExportFolder
from engines.folders.targets import target_of
from engines.trt import build as build_module
from engines.trt.build import build
from engines.trt.flavours import TENSORRT, TENSORRT_RTX, Flavour
from engines.trt.tensorrt_loading import open_plans
from sdxl import deepcache, schedulers
from sdxl.engine import Engines
from sdxl.inflight import Finished, InFlight, Request
from sdxl.policy import Limits
from sdxl.schedulers import SchedulerConfig
from tests.engines.damages import editor, flip_a_byte
from tests.engines.fake_builds import L40S, FakeWorker, order_of
from tests.engines.trt_double import TensorRTDouble
from tests.fakes import ARCH, FakeClock, fake_conditioning, fake_engines

BUCKETS = (2, 4, 8)
edit = editor("manifest.json")
CONFIG = SchedulerConfig.from_dict(
    {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
)


@pytest.fixture
def folder(tiny: ExportFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineFolder:
    monkeypatch.setattr(build_module, "run_worker", FakeWorker())
    return build(order_of(tiny, tmp_path / "l40s"))


def load(folder: Path, library: TensorRTDouble, flavour: Flavour = TENSORRT_RTX) -> Engines:
    found = EngineFolder.read(folder)
    engines = open_plans(found, flavour, library, library.device)
    return Engines(found.arch, engines, buckets=BUCKETS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: edit(d, lambda v: v.pop("gpu")), "not a manifest .*gpu"),
        (lambda d: edit(d, lambda v: v["plans"].pop("clip_l")), "'clip_l' is missing"),
        (lambda d: os.truncate(d / "clip_l.plan", 9), "clip_l.plan: has 9 bytes, expected"),
        (
            lambda d: edit(d, lambda v: v["plans"]["clip_l"].update(file="../clip_l.plan")),
            "'../clip_l.plan' leaves the folder",
        ),
    ],
)
def test_damage_is_named(
    folder: EngineFolder, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder.folder)
    with pytest.raises(EngineError, match=message) as caught:
        load(folder.folder, TensorRTDouble())
    assert str(folder.folder) in str(caught.value)


@pytest.mark.parametrize(
    "damage", [flip_a_byte, lambda path: path.write_bytes(bytes(path.stat().st_size))]
)
def test_a_changed_plan_is_never_deserialised(
    folder: EngineFolder, damage: Callable[[Path], object]
) -> None:
    first = next(iter(folder.plans))
    damage(folder.folder / f"{first}.plan")
    library = TensorRTDouble()
    with pytest.raises(EngineError, match=f"{first}.plan: has sha256"):
        load(folder.folder, library)
    assert library.deserialized == 0


def test_a_plan_that_tensorrt_does_not_take_is_named(folder: EngineFolder) -> None:
    path = folder.folder / "clip_g.plan"
    size = path.stat().st_size
    path.write_bytes(b"!" * size)

    def sign(value: dict[str, Any]) -> None:
        value["plans"]["clip_g"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()

    edit(folder.folder, sign)
    with pytest.raises(EngineError, match=r"clip_g.plan: tensorrt-rtx .* cannot load it"):
        load(folder.folder, TensorRTDouble())


def test_engines_of_another_version_are_refused(folder: EngineFolder) -> None:
    found = folder.mismatch(L40S, "9.9")
    assert found and re.match("built with tensorrt-rtx 1.* found 9.9 here", found), found


def test_tensorrts_plans_are_for_one_gpu_and_rtxs_for_an_architecture(folder: EngineFolder) -> None:
    ada = target_of("NVIDIA GeForce RTX 4090", (8, 9), 24 << 30)
    assert folder.runs_on(ada)
    assert not replace(folder, backend="tensorrt").runs_on(ada)


@pytest.mark.parametrize("flavour", [TENSORRT, TENSORRT_RTX])
@pytest.mark.parametrize("interval", [1, 2])
def test_the_loop_on_plans_gives_the_latents_of_the_loop_on_fakes(
    folder: EngineFolder, flavour: Flavour, interval: int
) -> None:
    """Images join and leave. Every recurring set of buffers is replayed as a graph."""
    library = TensorRTDouble()
    found = denoise(load(folder.folder, library, flavour), interval)
    expected = denoise(replace(fake_engines(), buckets=BUCKETS), interval)
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    device = library.device
    assert device.replays > device.captures > 0


def denoise(engines: Engines, interval: int) -> list[Tensor]:
    loop = InFlight(engines, FakeClock(), Limits(buckets=engines.buckets, rows=8))
    events = []
    for seed in range(5):
        loop.submit(
            Request(
                fake_conditioning(seed, 2 if seed else 1),
                schedulers.table("euler", 8, CONFIG),
                deepcache.plan(8, interval, guided_steps=None if seed else ()),
                5.0 if seed else 1.0,
                seed,
                ARCH.sample_size,
                ARCH.sample_size,
            )
        )
        events += loop.tick()
    events += loop.drain()
    finished = {event.id: event.latents for event in events if isinstance(event, Finished)}
    return [finished[id_] for id_ in sorted(finished)]
