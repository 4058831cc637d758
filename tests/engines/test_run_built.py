"""`sdxl build` compares plans with plain PyTorch, in any memory layout.

The TensorRT double computes with fakes. It shows the calls of plans, not a GPU's rounding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import run_built as run_built_module
from engines.cuda import device
from engines.folders.engine_folder import EngineFolder
from engines.folders.profiles import buckets
from engines.lora import LoraFile, fuse
from engines.parity import proof
from engines.pytorch import torch_engine
from engines.pytorch.torch_options import PLAIN
from engines.run_built import run_built
from engines.trt import build as build_module
from engines.trt import tensorrt_loading
from engines.trt.build import BuildSpec, build
from engines.trt.flavours import Flavour
from sdxl.checkpoint import NETWORK_FOLDERS, find
from sdxl.engine import Engines
from tests.engines.fake_builds import L40S, FakeWorker, order_of
from tests.engines.tiny_export import write_export
from tests.engines.trt_double import TensorRTDouble
from tests.fakes import fake_engines

MINI = find("mini")


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSpec:
    """A build of the embedded model, on a machine that seems to have the GPU."""
    monkeypatch.setattr(build_module, "run_worker", FakeWorker())
    monkeypatch.setattr(device, "local_target", lambda: L40S)
    monkeypatch.setattr(proof, "used_on_gpu", lambda: 0)
    monkeypatch.setattr(tensorrt_loading, "load_tensorrt", on_double)
    monkeypatch.setattr(run_built_module, "PICTURES", 1)
    export = write_export(tmp_path / "export", arch=MINI.arch, digest=MINI.digest)
    return order_of(export, tmp_path / "l40s", max_batch=1)


def on_double(made: EngineFolder, flavour: Flavour) -> Engines:
    library = TensorRTDouble(arch=made.arch)
    plans = tensorrt_loading.open_plans(made, flavour, library, library.device)
    return Engines(made.arch, plans, buckets=buckets(made.max_batch))


def asked_of_pytorch(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[dict[str, Any]]:
    """The arguments with which the reference is loaded; the double's fakes replace it."""
    asked: list[dict[str, Any]] = []

    def load(checkpoint: object, **settings: Any) -> Engines:
        asked.append(settings)
        return replace(fake_engines(arch=MINI.arch), **changes)

    monkeypatch.setattr(torch_engine, "load_torch", load)
    return asked


def test_plans_run_beside_a_reference_whose_maps_lie_channels_last(
    order: BuildSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of_pytorch(monkeypatch, memory_format=torch.channels_last)
    made = build(order, prove=partial(run_built, order=order, model="mini"))
    assert made.is_run and made.unchecked is None
    whats = [finding["what"] for finding in made.parity["findings"]]
    for name in made.plans:
        assert any(what.startswith(f"{name}, profile 1 of 1") for what in whats), f"{name}: {whats}"
    assert [what for what in whats if "PSNR" in what] == [
        f"1 pictures of 128×128, 20 steps, interval {n}, PSNR in dB" for n in (1, 2)
    ]
    painted = {"pictures": 1, "steps": 20, "side": None, "intervals": [1, 2]}
    assert EngineFolder.read(order.out).parity["painted"] == painted
    # The reference has diffusers' own modules.
    (settings,) = asked
    expected = {"options": PLAIN, "device": "cuda", "precision": "fp32", "cut": order.export.cut}
    assert {name: settings[name] for name in expected} == expected


def test_plans_with_a_lora_run_beside_the_model_with_it(
    order: BuildSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of_pytorch(monkeypatch)
    lora = LoraFile.parse("outlined")
    order = replace(order, export=replace(order.export, loras=(lora.as_dict(),)))
    prove = partial(run_built, order=order, model="mini")
    unnamed = build(order, prove=prove).unchecked
    assert unnamed and "name them with --lora" in unnamed and not asked
    assert build(order, prove=partial(prove, loras=[lora])).unchecked is None
    (settings,) = asked
    parts = {part: MINI.part(part) for part in NETWORK_FOLDERS}
    plain = {name: value.clone() for name, value in parts["unet"].state_dict().items()}
    fuse([lora], parts)
    expected, found = parts["unet"].state_dict(), settings["load_part"]("unet").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not all(torch.equal(found[name], value) for name, value in plain.items())
