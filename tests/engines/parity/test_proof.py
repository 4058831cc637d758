"""Built plans are compared with the model, in every profile and over whole pictures, and timed.

ONNX Runtime stands in for TensorRT: it computes the real graphs, but not with a GPU's rounding and
times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engines.control_graphs import variant_graph
from engines.folders.export_folder import ExportFolder
from engines.folders.profiles import Profile, profiles
from engines.folders.shipped import open_mini
from engines.onnxruntime_engine import OnnxRuntimeEngine, load_onnxruntime, open_session
from engines.parity.calls import call_errors, record_calls
from engines.parity.findings import CheckFailed
from engines.parity.pictures import paint, subject_of
from engines.parity.proof import PlanTrial
from engines.pytorch.torch_engine import load_torch
from sdxl.checkpoint import find
from sdxl.engine import Engine, Engines
from sdxl.specs import ModelSpec, plain_name
from tests.engines.variant_graphs import with_variants

MINI = find("mini")
SUBJECT = replace(subject_of(MINI, 1, 0), steps=4)
MAX_BATCH = 2
ENDING = ("clip_l+lora", "unet_deep+control", "unet_deep+image", "unet_shallow+locon+control")


@dataclass
class Off:
    """An engine whose first output is 10% too large where `is_off` is true."""

    engine: Engine
    is_off: Callable[[int], bool]

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.engine(inputs, outputs)
        first = outputs[self.spec.outputs[0].name]
        if self.is_off(len(first)):
            first.mul_(1.1)


def with_off(engines: Engines, name: str, is_off: Callable[[int], bool]) -> Engines:
    return replace(engines, by_name={**engines.by_name, name: Off(engines[name], is_off)})


def with_ending(export: ExportFolder, name: str) -> Engine:
    """Return a network with LoRAs of an empty bank, or with residuals."""
    plain = plain_name(name)
    graph, spec = variant_graph(export.graph_bytes(plain), with_variants(export)[name])
    bank = {t.name: torch.zeros(t.shape({"bank": 2})) for t in spec.bank}
    return OnnxRuntimeEngine(spec, open_session(export, plain, graph), bank=bank)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDXL_HOME", str(tmp_path_factory.mktemp("home")))
        export = open_mini()
        found = load_onnxruntime(export)
        added = {name: with_ending(export, name) for name in ENDING}
        return replace(found, buckets=(2, 4), by_name={**found.by_name, **added})


@pytest.fixture(scope="module")
def reference() -> Engines:
    return load_torch(MINI, device="cpu", precision="fp32")


def trial(reference: Engines, built: Engines, said: list[str]) -> PlanTrial:
    made = {n: profiles(e.spec, MINI.arch, MAX_BATCH) for n, e in built.by_name.items()}
    used = iter((100, 350))
    return PlanTrial(
        MINI,
        SUBJECT,
        "fp32",
        lambda: reference,
        lambda: built,
        made,
        lambda: next(used),
        said.append,
    )


@pytest.mark.slow
def test_every_network_runs_in_every_profile_and_pictures_are_the_models(
    reference: Engines, built: Engines
) -> None:
    said: list[str] = []
    asked = trial(reference, built, said)
    proof = asked.run()
    whats = [finding["what"] for finding in proof.parity["findings"]]
    for name, found in asked.profiles.items():
        ran = [what for what in whats if what.startswith(f"{name}, profile")]
        assert len(ran) == len(found) >= 2, f"{name}: {ran}"
    assert [what for what in whats if "PSNR" in what] == [
        f"1 pictures of 128×128, 4 steps, interval {n}, PSNR in dB" for n in (1, 2)
    ]
    assert all("required" in line for line in said) and len(said) == len(whats)
    assert proof.device_bytes == 250
    assert set(proof.costs) == {plain_name(name) for name in built.by_name}
    assert list(proof.costs["unet_deep"]) == ["2", "4"]
    assert all(seconds > 0 for costs in proof.costs.values() for seconds in costs.values())


@pytest.mark.slow
def test_every_network_that_is_off_in_one_profile_is_named(
    reference: Engines, built: Engines
) -> None:
    off: dict[str, Callable[[int], bool]] = {
        "unet_deep": lambda rows: rows == 2 * MAX_BATCH,
        "unet_shallow": lambda rows: rows == 1,
        "unet_deep+control": lambda rows: rows == 1,
        "clip_g": lambda rows: True,
        "vae_decoder": lambda rows: True,
    }
    wrong = built
    for name, is_off in off.items():
        wrong = with_off(wrong, name, is_off)
    with pytest.raises(CheckFailed) as error:
        trial(reference, wrong, []).run()
    found = re.findall(r"([\w+]+), profile [^;]* required at most 0.01", str(error.value))
    assert {*found} == {*off}, error.value


@pytest.mark.slow
def test_a_profile_that_no_call_meets_is_refused(reference: Engines, built: Engines) -> None:
    asked = trial(reference, built, [])
    strange = {"latents": ((3, 4, 9, 9),) * 3}
    made = {**asked.profiles, "vae_decoder": [Profile(strange), *asked.profiles["vae_decoder"]]}
    with pytest.raises(CheckFailed, match="vae_decoder: no call of the model meets profile 1"):
        replace(asked, profiles=made).run()


def test_a_step_is_compared_from_the_references_own_input(
    reference: Engines, built: Engines
) -> None:
    """So the error of an earlier step does not grow in it."""
    recorder, calls = record_calls(reference, "unet_deep", "unet_shallow")
    paint(MINI, recorder, SUBJECT, 1)
    assert [each.network for each in calls] == ["unet_deep", "unet_shallow"] * 2
    wrong = with_off(built, "unet_deep", lambda rows: True)
    deep, shallow, *rest = call_errors(wrong, calls)
    assert deep == pytest.approx(0.1, abs=0.002) and shallow < 0.001
    assert rest[0] == pytest.approx(0.1, abs=0.002) and rest[1] < 0.001
