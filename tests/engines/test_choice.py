"""`auto` chooses the fastest backend that can serve the model, and reports why others cannot."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import engines
from engines import BACKENDS, choice
from engines.choice import EngineRequest, choose_engines, why_slower
from engines.folders.engine_folder import EngineFolder
from engines.folders.export_folder import DataFile, ExportError, changed_file
from engines.folders.places import export_place, plans_place, plans_root
from engines.folders.targets import TARGETS, Target
from engines.onnxruntime_engine import OnnxRuntimeError
from engines.trt import build as build_module
from engines.trt.build import build
from engines.trt.engine_store import best_for
from engines.trt.flavours import FLAVOURS, TENSORRT, TENSORRT_RTX, BackendMissing, Flavour
from sdxl.engine import Engines
from sdxl.params import InvalidParams
from tests.engines.fake_builds import L40S, FakeWorker, order_of, proven
from tests.engines.tiny_export import DIGEST, write_export

RTX = "tensorrt-rtx"
EMPTY = DataFile(hashlib.sha256(b"").hexdigest(), 0)
UNRUN: dict[str, Any] = {"findings": [], "note": "not run: there is no L40S here"}


@dataclass
class Machine:
    """A simulated machine with installed backends, and a request to it."""

    asked: EngineRequest
    loaded: list[str]
    monkeypatch: pytest.MonkeyPatch
    folder: Path

    def set_gpu(self, target: Target | None) -> None:
        self.monkeypatch.setattr(choice, "local_target", lambda: target)

    def add_plans(self, *, digest: str = DIGEST, precision: str = "int8", **facts: Any) -> Path:
        self.monkeypatch.setattr(build_module, "run_worker", FakeWorker())
        export = write_export(self.folder / f"export-{precision}-{digest[0]}", digest=digest)
        place = plans_place("tiny", digest, precision) / "l40s-tensorrt-rtx"
        build(order_of(replace(export, precision=precision, **facts), place), prove=proven)
        return place

    def choose(self, backend: str = "auto", **changes: Any) -> Engines:
        return choose_engines(replace(self.asked, **changes), backend)

    def passed_over(self, **changes: Any) -> dict[str, str]:
        reasons = self.choose(**changes).description["passed_over"]
        assert isinstance(reasons, dict)
        return reasons


@pytest.fixture
def machine(
    usual: EngineRequest, loaded: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Machine:
    return Machine(usual, loaded, monkeypatch, tmp_path)


def test_without_gpu_and_export_auto_runs_pytorch_and_logs_every_reason(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        reasons = machine.passed_over()
    assert machine.loaded == ["torch"]
    assert list(reasons) == ["tensorrt", RTX, "onnxruntime"]
    (line,) = caplog.messages
    assert line.startswith("some/model runs on torch (") and all(
        r in line for r in reasons.values()
    )
    assert "found none here" in reasons["tensorrt"]
    assert "sdxl export --model some/model --precision fp32" in reasons["onnxruntime"]


@pytest.mark.parametrize("backend", ["tensorrt", RTX, "onnxruntime"])
def test_a_precision_that_is_never_exported_is_refused(backend: str, machine: Machine) -> None:
    machine.set_gpu(L40S)
    with pytest.raises(
        InvalidParams,
        match="precision must be fp32, fp16, int8, fp8, or the backend torch, got 'bf16'",
    ):
        machine.choose(backend, precision="bf16")
    machine.choose(precision="bf16")
    assert machine.loaded == ["torch"]


def test_with_an_export_auto_runs_onnxruntime_on_a_cpu_and_pytorch_on_a_gpu(
    machine: Machine,
) -> None:
    write_export(export_place("tiny", DIGEST, "fp32"))
    assert list(machine.passed_over()) == ["tensorrt", RTX] and not machine.loaded
    machine.set_gpu(L40S)
    assert list(machine.passed_over()) == ["tensorrt", RTX] and machine.loaded == ["torch"]


def test_auto_runs_pytorch_if_onnxruntime_cannot_load_a_graph(machine: Machine) -> None:
    def fail(_: object) -> Engines:
        raise OnnxRuntimeError("unet_deep.onnx: no such operator")

    write_export(export_place("tiny", DIGEST, "fp32"))
    machine.monkeypatch.setattr("engines.onnxruntime_engine.load_onnxruntime", fail)
    assert "no such operator" in machine.passed_over()["onnxruntime"]
    assert machine.loaded == ["torch"]


def test_a_library_that_does_not_load_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_broken.py").write_text("raise ImportError('libcuda.so.1: not there')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = replace(FLAVOURS["tensorrt"], module="tensorrt_broken")
    with pytest.raises(BackendMissing, match="tensorrt does not load: libcuda.so.1: not there"):
        broken.load()
    absent = Flavour("tensorrt-x", "tensorrt_x")
    with pytest.raises(BackendMissing, match="tensorrt-x is not installed; run pip install"):
        absent.load()


def test_a_named_folder_is_used_whatever_else_is_installed(machine: Machine) -> None:
    plans = machine.add_plans()
    machine.set_gpu(L40S)
    mine = write_export(machine.folder / "mine").folder
    assert machine.choose(folder=str(mine)).description["backend"] == "onnxruntime"
    assert not machine.loaded
    machine.choose(folder=str(plans))
    assert machine.loaded == ["tensorrt"]


@pytest.mark.parametrize(
    ("backend", "precision", "reason"),
    [
        ("torch", None, "engines cannot be used with the backend torch"),
        ("onnxruntime", "fp16", "is fp32, expected fp16"),
        ("auto", "fp16", "onnxruntime: .*is fp32, expected fp16; torch: engines cannot"),
    ],
)
def test_a_folder_that_does_not_fit_the_request_is_refused(
    machine: Machine, backend: str, precision: str | None, reason: str
) -> None:
    mine = write_export(machine.folder / "mine").folder
    with pytest.raises((InvalidParams, ExportError, BackendMissing), match=reason):
        machine.choose(backend, folder=str(mine), precision=precision)


def test_a_folder_of_other_weights_or_of_something_else_is_refused(machine: Machine) -> None:
    other = write_export(machine.folder / "other", digest="e" * 64).folder
    with pytest.raises(ExportError, match="of the weights eeeeeeeeeeee .*expected dddddddddddd"):
        machine.choose("onnxruntime", folder=str(other))
    with pytest.raises(InvalidParams, match="must be a folder of `sdxl export` or `sdxl build`"):
        machine.choose(folder=str(machine.folder))


def test_an_unchecked_export_is_refused_unless_allowed(machine: Machine) -> None:
    named = machine.folder / "mine"
    for place in (named, export_place("tiny", DIGEST, "fp32")):
        replace(write_export(place), parity={"findings": [], "note": "no check"}).write()
        folder = str(place) if place == named else ""
        with pytest.raises(ExportError, match="published without a check; run .*--unchecked"):
            machine.choose("onnxruntime", folder=folder)
        found = machine.choose("onnxruntime", folder=folder, takes_unchecked=True)
        assert found.description["backend"] == "onnxruntime"


@pytest.mark.parametrize(
    ("field", "reason"),
    [("export_parity", "its export was published without"), ("parity", "not run: there is no")],
)
def test_unchecked_plans_are_refused_unless_allowed(
    machine: Machine, field: str, reason: str
) -> None:
    unchecked: Any = {field: UNRUN}
    replace(EngineFolder.read(machine.add_plans()), **unchecked).write()
    machine.set_gpu(L40S)
    with pytest.raises(BackendMissing, match=f"{reason} .*; run .*or --unchecked"):
        machine.choose(RTX)
    assert reason in machine.passed_over()[RTX]
    machine.choose(RTX, takes_unchecked=True)
    assert machine.loaded == ["torch", "tensorrt"]


def test_plans_with_a_lora_are_used_only_if_their_folder_is_named(machine: Machine) -> None:
    place = machine.add_plans(loras=(["style.safetensors", 0.8],))
    machine.set_gpu(L40S)
    with pytest.raises(BackendMissing, match="none were built for this model"):
        machine.choose(RTX)
    machine.choose(RTX, folder=str(place))
    assert machine.loaded == ["tensorrt"]
    note = "not run: LoRAs are fused into them; name them with --lora as at the export"
    replace(EngineFolder.read(place), parity={"findings": [], "note": note}).write()
    with pytest.raises(BackendMissing, match=f"{note}; run `sdxl build` of it on a L40S, or"):
        machine.choose(RTX, folder=str(place))


def test_auto_warns_on_a_gpu_if_tensorrt_does_not_run(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        without = machine.choose()
        assert not (caplog.messages or why_slower(without.description)), "there is no GPU"
        machine.set_gpu(L40S)
        slower = machine.choose()
    (warning,) = caplog.messages
    assert warning.startswith("some/model runs on torch, not on TensorRT: tensorrt: ")
    assert warning.endswith(why_slower(slower.description))
    assert not why_slower(machine.choose("torch").description), "PyTorch was asked for"


def test_auto_prefers_fitting_plans_unless_a_cpu_is_asked_for(machine: Machine) -> None:
    machine.set_gpu(L40S)
    machine.add_plans()
    write_export(export_place("tiny", DIGEST, "fp32"))
    assert list(machine.passed_over()) == ["tensorrt"] and machine.loaded == ["tensorrt"]
    assert machine.choose(device="cpu").description["backend"] == "onnxruntime"
    assert machine.loaded == ["tensorrt"]


def test_of_several_plans_the_gpus_own_precision_is_preferred(machine: Machine) -> None:
    for precision in ("fp32", "int8", "fp16"):
        machine.add_plans(precision=precision)
    for asked, expected in ((None, "int8"), ("fp16", "fp16")):
        found = best_for(plans_root(), TENSORRT_RTX, L40S, DIGEST, asked)
        assert isinstance(found, EngineFolder) and found.precision == expected


@pytest.mark.parametrize(
    ("gpu", "digest", "precision", "reason"),
    [
        ("h100", DIGEST, None, "built for a L40S, found a H100 here"),
        ("l40s", "e" * 64, None, "none were built for this model"),
        ("l40s", DIGEST, "fp16", "is int8, expected fp16"),
    ],
)
def test_plans_for_something_else_are_passed_over_with_the_reason(
    machine: Machine, gpu: str, digest: str, precision: str | None, reason: str
) -> None:
    machine.set_gpu(TARGETS[gpu])
    machine.add_plans(digest=digest)
    with pytest.raises(BackendMissing, match=reason):
        machine.choose(RTX, precision=precision)
    assert reason in machine.passed_over(precision=precision)[RTX]
    assert machine.loaded == ["torch"]


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        (
            "tensorrt",
            {"device": "cuda:1"},
            "device cannot select a GPU for tensorrt: set CUDA_VISIBLE_DEVICES",
        ),
        ("tensorrt", {}, "tensorrt needs an NVIDIA GPU, found none here"),
        ("onnxruntime", {}, "no fp32 export of some/model in .*; run sdxl export"),
    ],
)
def test_a_named_backend_is_not_replaced(
    machine: Machine, backend: str, changes: dict[str, str], reason: str
) -> None:
    with pytest.raises((InvalidParams, BackendMissing, ExportError), match=reason):
        machine.choose(backend, **changes)
    assert not machine.loaded


def test_every_backend_has_a_loader_and_others_are_refused() -> None:
    assert set(BACKENDS) == {"auto", *choice._loaders()}
    assert TENSORRT.name == BACKENDS[1]
    with pytest.raises(InvalidParams, match="backend must be one of auto, .*, got 'cuda'"):
        engines.load("mini", "cuda")


def test_pytorch_runs_8_bits_only_by_an_export_that_checked_them(machine: Machine) -> None:
    """The check of the graphs does not cover PyTorch's 8 bits, which include more layers."""

    def choose(**changes: Any) -> Engines:
        return machine.choose("torch", precision="int8", **changes)

    def check_in_torch(note: str) -> None:
        parity = {"findings": [{"what": "in PyTorch: PSNR", "measured": 30.0}], "note": note}
        replace(export, parity={**export.parity, "torch": parity}).write()

    with pytest.raises(ExportError, match="sdxl export --model some/model --precision int8"):
        choose()
    place = export_place("tiny", DIGEST, "int8")
    export = replace(write_export(place), precision="int8")
    check_in_torch("")
    with pytest.raises(ExportError, match=f"no {changed_file('unet')} there"):
        choose()
    (place / changed_file("unet")).write_bytes(b"")
    data = {**export.data, changed_file("unet"): EMPTY}
    export = replace(export, data=data)
    export.write()
    refused = "8 bits were not compared with the model; run sdxl export --model .*--unchecked"
    with pytest.raises(ExportError, match=refused):
        choose()
    check_in_torch("in PyTorch: PSNR measured 9")
    with pytest.raises(ExportError, match="in PyTorch: PSNR measured 9; run .*--unchecked"):
        choose()
    assert not machine.loaded
    choose(takes_unchecked=True)
    check_in_torch("")
    choose()
    machine.choose("onnxruntime", precision="int8")
    assert machine.loaded == ["torch", "torch"]
