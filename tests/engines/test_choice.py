"""`auto` takes the best that is there, and says why not a better one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import BACKENDS, choice
from engines.choice import EngineRequest, choose_engines, why_slower
from engines.folders.engine_folder import EngineFolder
from engines.folders.export_folder import ExportError
from engines.folders.places import export_place, plans_place
from engines.folders.targets import TARGETS, Target
from engines.onnxruntime_engine import OnnxRuntimeError
from engines.trt import build as build_module
from engines.trt.build import build
from engines.trt.flavours import FLAVOURS, TENSORRT, BackendMissing, Flavour
from sdxl.engine import Engines
from sdxl.params import InvalidParams
from tests.engines.fake_builds import L40S, FakeWorker, order_of, proven
from tests.engines.tiny_export import DIGEST, write_export


def with_gpu(monkeypatch: pytest.MonkeyPatch, target: Target | None) -> None:
    monkeypatch.setattr(choice, "local_target", lambda: target)


def with_plans(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    digest: str = DIGEST,
    precision: str = "int8",
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(build_module, "run_worker", FakeWorker())
    export = write_export(tmp_path / f"export-{precision}-{digest[0]}", digest=digest)
    export = replace(export, precision=precision)
    out = plans_place("tiny", digest, precision) / "l40s-tensorrt-rtx"
    build(order_of(export, out), prove=proven)


def passed_over(engines: Engines) -> dict[str, str]:
    found = engines.description["passed_over"]
    assert isinstance(found, dict)
    return found


def test_without_gpu_or_export_it_is_pytorch_and_every_reason_is_told(
    usual: EngineRequest, loaded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engines = choose_engines(usual, "auto")
    assert loaded == ["torch"]
    reasons = passed_over(engines)
    assert list(reasons) == ["tensorrt", "tensorrt-rtx", "onnxruntime"]
    assert "found none here" in reasons["tensorrt"]
    assert "sdxl export --model some/model --precision fp32" in reasons["onnxruntime"]
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx", "onnxruntime"])
def test_a_precision_that_is_never_exported_is_refused_by_name(
    backend: str, usual: EngineRequest, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, L40S)
    asked = replace(usual, precision="bf16")
    with pytest.raises(InvalidParams, match="precision: 'bf16' .*fp8, or the backend torch"):
        choose_engines(asked, backend)
    choose_engines(asked, "auto")
    assert loaded == ["torch"]


def test_with_an_export_it_is_onnxruntime(usual: EngineRequest, loaded: list[str]) -> None:
    write_export(export_place("tiny", DIGEST, "fp32"))
    engines = choose_engines(usual, "auto")
    assert engines.description["backend"] == "onnxruntime" and not loaded
    assert list(passed_over(engines)) == ["tensorrt", "tensorrt-rtx"]


def test_a_graph_that_onnxruntime_cannot_load_leaves_pytorch(
    usual: EngineRequest, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> Engines:
        raise OnnxRuntimeError("unet_deep.onnx: no such operator")

    write_export(export_place("tiny", DIGEST, "fp32"))
    monkeypatch.setattr("engines.onnxruntime_engine.load_onnxruntime", fails)
    engines = choose_engines(usual, "auto")
    assert loaded == ["torch"] and "no such operator" in passed_over(engines)["onnxruntime"]


def test_a_library_that_does_not_load_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_broken.py").write_text("raise ImportError('libcuda.so.1: not there')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = replace(FLAVOURS["tensorrt"], module="tensorrt_broken")
    with pytest.raises(BackendMissing, match="tensorrt does not load: libcuda.so.1: not there"):
        broken.load()


def of_folder(usual: EngineRequest, folder: Path) -> EngineRequest:
    return replace(usual, folder=str(folder))


def test_a_folder_that_is_named_is_taken_whatever_else_is_there(
    usual: EngineRequest, loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_plans(monkeypatch, tmp_path)
    with_gpu(monkeypatch, TARGETS["l40s"])
    write_export(tmp_path / "mine")
    engines = choose_engines(of_folder(usual, tmp_path / "mine"), "auto")
    assert engines.description["backend"] == "onnxruntime" and not loaded
    choose_engines(
        of_folder(usual, plans_place("tiny", DIGEST, "int8") / "l40s-tensorrt-rtx"), "auto"
    )
    assert loaded == ["tensorrt"]


@pytest.mark.parametrize(
    ("backend", "precision", "reason"),
    [
        ("torch", None, "engines: .*torch runs no engines of a folder"),
        ("onnxruntime", "fp16", "is fp32, needed fp16"),
        ("auto", "fp16", "onnxruntime: .*is fp32, needed fp16; torch: engines: "),
        ("tensorrt", None, "found none here"),
    ],
)
def test_a_folder_that_does_not_fit_the_wish_is_refused(
    usual: EngineRequest, tmp_path: Path, backend: str, precision: str | None, reason: str
) -> None:
    write_export(tmp_path / "mine")
    asked = replace(of_folder(usual, tmp_path / "mine"), precision=precision)
    with pytest.raises((InvalidParams, ExportError, BackendMissing), match=reason):
        choose_engines(asked, backend)


def test_a_folder_of_other_weights_or_of_nothing_is_refused(
    usual: EngineRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_export(tmp_path / "other", digest="e" * 64)
    with pytest.raises(ExportError, match="of the weights eeeeeeeeeeee .*needed dddddddddddd"):
        choose_engines(of_folder(usual, tmp_path / "other"), "onnxruntime")
    with pytest.raises(InvalidParams, match="needed a folder of `sdxl export` or `sdxl build`"):
        choose_engines(of_folder(usual, tmp_path), "auto")
    with_plans(monkeypatch, tmp_path)
    with_gpu(monkeypatch, TARGETS["h100"])
    plans = plans_place("tiny", DIGEST, "int8") / "l40s-tensorrt-rtx"
    with pytest.raises(BackendMissing, match="built for a L40S, found a H100 here"):
        choose_engines(of_folder(usual, plans), "tensorrt-rtx")


def test_an_export_that_was_never_checked_is_refused_unless_asked_for(
    usual: EngineRequest, loaded: list[str], tmp_path: Path
) -> None:
    for folder in (tmp_path / "mine", export_place("tiny", DIGEST, "fp32")):
        replace(write_export(folder), parity={"findings": [], "note": "no check"}).write()
        asked = of_folder(usual, folder) if folder.name == "mine" else usual
        with pytest.raises(ExportError, match="published without a check; needed: .*--unchecked"):
            choose_engines(asked, "onnxruntime")
        engines = choose_engines(replace(asked, takes_unchecked=True), "onnxruntime")
        assert engines.description["backend"] == "onnxruntime"


@pytest.mark.parametrize("is_exported_unchecked", [False, True])
def test_plans_that_nobody_ran_are_refused_unless_asked_for(
    usual: EngineRequest,
    loaded: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_exported_unchecked: bool,
) -> None:
    with_plans(monkeypatch, tmp_path)
    with_gpu(monkeypatch, L40S)
    place = plans_place("tiny", DIGEST, "int8") / "l40s-tensorrt-rtx"
    field = "export_parity" if is_exported_unchecked else "parity"
    unchecked: Any = {field: {"findings": [], "note": "not run: there is no L40S here"}}
    replace(EngineFolder.read(place), **unchecked).write()
    reason = "its export was published without" if is_exported_unchecked else "not run: there is no"
    with pytest.raises(BackendMissing, match=f"{reason} .*; needed: .*or --unchecked"):
        choose_engines(usual, "tensorrt-rtx")
    assert reason in passed_over(choose_engines(usual, "auto"))["tensorrt-rtx"]
    choose_engines(replace(usual, takes_unchecked=True), "tensorrt-rtx")
    assert loaded == ["torch", "tensorrt"]


def test_a_folder_with_a_lora_is_taken_when_it_is_named(
    usual: EngineRequest, loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_plans(monkeypatch, tmp_path)
    with_gpu(monkeypatch, TARGETS["l40s"])
    place = plans_place("tiny", DIGEST, "int8") / "l40s-tensorrt-rtx"
    replace(EngineFolder.read(place), loras=({"scale": 1.0},)).write()
    choose_engines(of_folder(usual, place), "tensorrt-rtx")
    assert loaded == ["tensorrt"]
    note = "not run: LoRAs are fused into them; name them with --lora as at the export"
    unrun = {"findings": [], "note": note}
    replace(EngineFolder.read(place), loras=({"scale": 1.0},), parity=unrun).write()
    with pytest.raises(BackendMissing, match=f"{note}; needed: `sdxl build` of it on a L40S, or"):
        choose_engines(of_folder(usual, place), "tensorrt-rtx")
    with pytest.raises(BackendMissing, match="none were built for this model"):
        choose_engines(usual, "tensorrt-rtx")


def test_on_a_gpu_pytorch_comes_before_onnxruntime(
    usual: EngineRequest, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_export(export_place("tiny", DIGEST, "fp32"))
    with_gpu(monkeypatch, L40S)
    reasons = passed_over(choose_engines(usual, "auto"))
    assert loaded == ["torch"]
    assert list(reasons) == ["tensorrt", "tensorrt-rtx"]


def test_on_a_gpu_what_takes_tensorrts_place_is_said_aloud(
    usual: EngineRequest,
    loaded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        without = choose_engines(usual, "auto")
        assert not (caplog.messages or why_slower(without.description)), "without a GPU all is well"
        with_gpu(monkeypatch, L40S)
        slower = choose_engines(usual, "auto")
    (said,) = caplog.messages
    assert said.startswith("some/model runs on torch, not on TensorRT: tensorrt: ")
    assert said.endswith(why_slower(slower.description))
    asked_for = choose_engines(usual, "torch")
    assert not why_slower(asked_for.description), "who asks for PyTorch gets what was asked for"


def test_plans_that_fit_come_first(
    usual: EngineRequest, loaded: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpu(monkeypatch, L40S)
    with_plans(monkeypatch, tmp_path)
    assert list(passed_over(choose_engines(usual, "auto"))) == ["tensorrt"]
    assert loaded == ["tensorrt"]


def test_of_several_the_gpus_own_precision_is_taken(
    usual: EngineRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engines.folders.engine_folder import EngineFolder
    from engines.folders.places import plans_root
    from engines.trt.engine_store import best_for
    from engines.trt.flavours import TENSORRT_RTX

    for precision in ("fp32", "int8", "fp16"):
        with_plans(monkeypatch, tmp_path, precision=precision)
    for asked, expected in ((None, "int8"), ("fp16", "fp16")):
        found = best_for(plans_root(), TENSORRT_RTX, L40S, DIGEST, asked)
        assert isinstance(found, EngineFolder) and found.precision == expected


@pytest.mark.parametrize(
    ("gpu", "digest", "precision", "reason"),
    [
        ("h100", DIGEST, None, "built for a L40S, found a H100 here"),
        ("l40s", "e" * 64, None, "none were built for this model"),
        ("l40s", DIGEST, "fp16", "is int8, needed fp16"),
    ],
)
def test_plans_for_something_else_are_passed_over_with_the_reason(
    usual: EngineRequest,
    loaded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpu: str,
    digest: str,
    precision: str | None,
    reason: str,
) -> None:
    with_gpu(monkeypatch, TARGETS[gpu])
    with_plans(monkeypatch, tmp_path, digest=digest)
    asked = EngineRequest(usual.model, usual.checkpoint, precision=precision)
    with pytest.raises(BackendMissing, match=reason):
        choose_engines(asked, "tensorrt-rtx")
    assert reason in passed_over(choose_engines(asked, "auto"))["tensorrt-rtx"]
    assert loaded == ["torch"]


def test_engines_with_a_lora_are_not_taken_for_the_plain_model(
    usual: EngineRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(build_module, "run_worker", FakeWorker())
    with_gpu(monkeypatch, L40S)
    export = replace(write_export(tmp_path / "export"), loras=(["style.safetensors", 0.8],))
    out = plans_place("tiny", DIGEST, "fp32") / "l40s-tensorrt-rtx"
    build(order_of(export, out), prove=proven)
    with pytest.raises(BackendMissing, match="none were built for this model"):
        choose_engines(usual, "tensorrt-rtx")


def test_a_cpu_asked_for_is_a_cpu(
    usual: EngineRequest, loaded: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpu(monkeypatch, L40S)
    with_plans(monkeypatch, tmp_path)
    write_export(export_place("tiny", DIGEST, "fp32"))
    engines = choose_engines(EngineRequest(usual.model, usual.checkpoint, device="cpu"), "auto")
    assert engines.description["backend"] == "onnxruntime" and not loaded


def test_another_than_the_first_gpu_is_refused_by_name(usual: EngineRequest) -> None:
    asked = EngineRequest(usual.model, usual.checkpoint, device="cuda:1")
    with pytest.raises(InvalidParams, match="device: 'cuda:1' is not allowed; .*CUDA_VISIBLE"):
        choose_engines(asked, "tensorrt")


def test_a_backend_asked_for_is_not_replaced(usual: EngineRequest, loaded: list[str]) -> None:
    with pytest.raises(BackendMissing, match="tensorrt needs an NVIDIA GPU, found none here"):
        choose_engines(usual, "tensorrt")
    with pytest.raises(
        ExportError, match="no fp32 export of some/model in .*; needed: sdxl export"
    ):
        choose_engines(usual, "onnxruntime")
    assert not loaded


def test_a_library_that_is_not_installed_is_named() -> None:
    absent = Flavour("tensorrt-x", "tensorrt_x", True, True, True, None)
    with pytest.raises(BackendMissing, match="tensorrt-x is not installed; needed: pip install"):
        absent.load()


def test_every_backend_has_a_loader() -> None:
    assert set(BACKENDS) == {"auto", *dict(choice._loaders())}
    assert TENSORRT.name == BACKENDS[1]


def test_an_unknown_backend_is_refused_by_name() -> None:
    import engines

    with pytest.raises(InvalidParams, match="backend: 'cuda' is not allowed; needed one of auto, "):
        engines.load("mini", "cuda")
