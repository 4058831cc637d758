"""Every layer follows the recipe, with scales from our own loop, in graphs that run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.folders.export_folder import (
    INPUT_SCALE,
    SCALE,
    SMOOTHING,
    WEIGHT,
    ExportFolder,
    changed_file,
)
from engines.lora import ADAPTED
from engines.parity.findings import relative_norm
from engines.pytorch.eight_bit import quantise as put_in_8_bits
from onnx_export.calibration import StepClock, calibration_prompts, first_steps
from onnx_export.export_spec import CalibrationSettings
from onnx_export.exporter import REPORT
from onnx_export.quantisation import Quantised, mean_calibrator, quantise, summary
from onnx_export.random_weights import SDXL_1_0
from onnx_export.recipes import INT8, RECIPES, UNCOMPILED, matching
from onnx_export.reference import fake_quantise
from sdxl.checkpoint import Checkpoint, find
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline
from sdxl.schedulers import table
from sdxl.specs import VAE
from tests.onnx_export.exports import PROMPTS, Exports

KEPT = "time_emb_proj|time_embedding|conv_in|conv_out|conv_shortcut|add_embedding|norm_out|to_out"
"""the layers that the reference submission does not quantise, by its own pattern"""
NUMBERS = tuple(RECIPES)
FLIPS = {"int8": 0.01, "fp8": 0.03}
"""the share of values that may differ: scales are stored in half precision, so a value between two
steps may round either way"""

pytestmark = pytest.mark.timeout(300)
"""The first test of a network quantises or exports it, which takes long."""


def layers_of(unet: nn.Module) -> list[str]:
    return [n for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]


@pytest.fixture(scope="module")
def full_size_layers() -> list[str]:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    with torch.device("meta"):
        return layers_of(UNet2DConditionModel(**SDXL_1_0["unet"]))


@pytest.mark.parametrize("number", NUMBERS)
def test_the_reference_submissions_layers_are_quantised(
    number: str, full_size_layers: list[str]
) -> None:
    rules = matching(RECIPES[number], full_size_layers)
    quantised = {name for name, rule in rules.items() if rule.is_quantised}
    wrong = [name for name in quantised if re.search(KEPT, name)]
    assert not wrong, f"to be kept: {wrong}"
    last = {f"up_blocks.2.resnets.2.conv{i}" for i in (1, 2)}
    convs = {name for name in quantised if ".resnets." in name}
    # The reference quantises one more layer, on which a compiler fails.
    assert not re.search(UNCOMPILED, " ".join(convs))
    assert len(convs) == 2 * 17 - 1 - (2 if number == "fp8" else 0)
    assert (convs & last) == (set() if number == "fp8" else last)
    # 70 transformer blocks: three projections of self-attention, one query of cross-attention, and
    # two feed-forward linears.
    assert len(quantised - convs) == 70 * (3 + 1 + 2)


def test_only_the_linears_are_smoothed(full_size_layers: list[str]) -> None:
    for name, rule in matching(INT8, full_size_layers).items():
        expected = 0.8 if rule.is_quantised and ".resnets." not in name else None
        assert rule.smoothing == expected, f"{name}: {rule.smoothing}, needed {expected}"


def test_the_mean_calibrator_takes_the_least_of_the_steps_means() -> None:
    clock = StepClock()
    constructor, arguments, named = mean_calibrator(clock)
    calibrator = constructor(*arguments, **named)
    assert calibrator.compute_amax() is None
    for clock.step, value in ((0, 1.0), (2, 5.0), (0, -3.0), (2, 9.0)):
        calibrator.collect(torch.tensor([0.5, value]))
    assert float(calibrator.compute_amax()) == 2.0, "steps' means are 2 and 7"
    calibrator.reset()
    assert calibrator.compute_amax() is None


@pytest.fixture
def parts(tiny: Checkpoint) -> dict[str, nn.Module]:
    return {name: tiny.part(name) for name in ADAPTED}


@pytest.fixture
def seen(parts: dict[str, nn.Module]) -> list[Tensor]:
    """The timesteps of each call of the UNet."""
    timesteps: list[Tensor] = []
    parts["unet"].get_submodule("time_proj").register_forward_pre_hook(
        lambda _, given: timesteps.append(given[0].clone())
    )
    return timesteps


def test_calibration_sees_the_first_steps_of_every_prompt(
    tiny: Checkpoint, parts: dict[str, nn.Module], seen: list[Tensor]
) -> None:
    first_steps(tiny, parts, PROMPTS, INT8, CalibrationSettings(), StepClock())
    times = table("euler", INT8.steps, tiny.scheduler).rows[: INT8.calibrated_steps, 1]
    batches = -(-len(PROMPTS) // INT8.batch)
    assert [float(t[0]) for t in seen] == pytest.approx([*times] * batches)
    rows = {int(t.shape[0]) for t in seen}
    assert rows == {4, 2}, f"{rows}: two prompts with guidance, then the one left over"


def test_calibration_follows_the_plan_that_is_served(
    tiny: Checkpoint, parts: dict[str, nn.Module]
) -> None:
    """Layers of Deep alone are called at deep steps, layers of Shallow at all steps."""
    clock, called = StepClock(), dict[str, list[int]]()
    for name in ("mid_block.resnets.0.conv1", "up_blocks.2.resnets.1.conv2"):
        steps = called[name] = []
        layer = parts["unet"].get_submodule(name)
        layer.register_forward_pre_hook(lambda *_, steps=steps: steps.append(clock.step))
    first_steps(tiny, parts, PROMPTS[:1], INT8, CalibrationSettings(cache_interval=3), clock)
    assert list(called.values()) == [[0, 3, 6], list(range(INT8.calibrated_steps))]


def test_calibration_paints_with_the_protocols_guidance_and_negative_prompt(
    tiny: Checkpoint, parts: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerationParams] = []
    resolve = Pipeline.resolve

    def listen(self: Pipeline, params: GenerationParams) -> GenerationParams:
        asked.append(params)
        return resolve(self, params)

    monkeypatch.setattr(Pipeline, "resolve", listen)
    first_steps(tiny, parts, PROMPTS[:1], INT8, CalibrationSettings(side=32), StepClock())
    (params,) = asked
    assert (params.guidance, params.cache_interval, params.width) == (8.0, 2, 32)
    assert (params.negative_prompt or "").startswith("normal quality, low quality")


def test_prompts_of_several_lengths_are_calibrated_apart(
    tiny: Checkpoint, parts: dict[str, nn.Module], seen: list[Tensor]
) -> None:
    """Otherwise a step would be two calls, and its statistic would be counted as two steps."""
    long = "circle " * 80
    prompts = [PROMPTS[0], long, PROMPTS[1], long]
    first_steps(tiny, parts, prompts, INT8, CalibrationSettings(negative_prompt=""), StepClock())
    assert [len(each) for each in seen] == [4] * 2 * INT8.calibrated_steps


@pytest.fixture(scope="module", params=NUMBERS)
def quantised(request: pytest.FixtureRequest, tiny: Checkpoint) -> tuple[str, nn.Module, Quantised]:
    parts = {name: tiny.part(name) for name in ADAPTED}
    recipe = RECIPES[request.param]
    run: Callable[[StepClock], None] = lambda clock: first_steps(  # noqa: E731
        tiny, parts, PROMPTS, recipe, CalibrationSettings(), clock
    )
    return request.param, parts["unet"], quantise(parts["unet"], recipe, run, torch.float16)


def test_stored_numbers_are_model_optimizers(
    quantised: tuple[str, nn.Module, Quantised], tiny: Checkpoint, tmp_path: Path
) -> None:
    """Our rounding with the stored numbers computes the same as Model Optimizer's modules."""
    number, theirs, found = quantised
    save_file(dict(found.tensors), tmp_path / "tensors.safetensors")
    ours = tiny.part("unet")
    fake_quantise(ours, tmp_path / "tensors.safetensors")
    generator = torch.Generator().manual_seed(0)
    for row in found.report:
        if row.became == number:
            layers: list[Any] = [unet.get_submodule(row.layer) for unet in (ours, theirs)]
            shape = (
                (2, layers[0].weight.shape[1], 4, 4)
                if row.kind == "conv"
                else (8, layers[0].weight.shape[1])
            )
            given = torch.randn(shape, generator=generator)
            with torch.no_grad():
                measured = relative_norm(*(layer(given) for layer in layers))
            assert measured <= FLIPS[number], (
                f"{row.layer}: {measured:.4f}, at most {FLIPS[number]}"
            )


def test_every_layer_is_reported(
    quantised: tuple[str, nn.Module, Quantised], tiny: Checkpoint
) -> None:
    number, _, found = quantised
    assert [row.layer for row in found.report] == layers_of(tiny.part("unet"))
    for row in found.report:
        is_stored = row.layer + INPUT_SCALE in found.tensors
        assert (row.became == number) == is_stored and row.why
        assert (row.range is not None) == is_stored
    lines = summary(found.report).splitlines()
    assert sum(int(line.split()[0]) for line in lines) == len(found.report)


def test_smoothing_leaves_the_product(
    quantised: tuple[str, nn.Module, Quantised], tiny: Checkpoint
) -> None:
    number, _, found = quantised
    unet: Any = tiny.part("unet")
    smoothed = [key.removesuffix(SMOOTHING) for key in found.tensors if key.endswith(SMOOTHING)]
    assert bool(smoothed) == (number == "int8")
    for name in smoothed:
        factors, scale = (found.tensors[name + key].float() for key in (SMOOTHING, SCALE))
        weight = found.tensors[name + WEIGHT].float() * scale[:, None] * factors
        original = unet.get_submodule(name).weight
        measured = relative_norm(weight, original)
        assert measured <= 0.02, f"{name}: {measured:.4f} off, at most 0.02"


@pytest.fixture(params=NUMBERS)
def folder(request: pytest.FixtureRequest, tiny_exports: Exports) -> ExportFolder:
    """An export for slow tests only: the first one takes half a minute."""
    return tiny_exports(request.param)


def test_graphs_quantise_what_the_report_says(folder: ExportFolder) -> None:
    rows = json.loads((folder.folder / REPORT).read_text())
    expected = {row["layer"] for row in rows if row["became"] == folder.precision}
    graph = ir.load(folder.folder / "unet_deep.onnx").graph
    stored = "INT8" if folder.precision == "int8" else "FLOAT8E4M3FN"
    weights = {
        n.removesuffix(WEIGHT)
        for n, v in graph.initializers.items()
        if n.endswith(WEIGHT) and v.dtype is not None and v.dtype.name == stored
    }
    assert weights == expected
    for name in expected:
        (scaled,) = graph.initializers[name + WEIGHT].consumers()
        assert scaled.op_type == "DequantizeLinear"
        (product,) = behind(scaled.outputs[0])
        before = product.inputs[0]
        assert before is not None and before.producer() is not None
        assert before.producer().op_type == "DequantizeLinear", f"{name} reads {before.name}"


def behind(weight: ir.Value) -> list[ir.Node]:
    nodes = list(weight.consumers())
    return behind(nodes[0].outputs[0]) if nodes[0].op_type == "Transpose" else nodes


def test_deep_and_shallow_share_the_quantised_weights(folder: ExportFolder) -> None:
    deep, shallow = (
        {
            key: (value.const_value.location, value.const_value.offset)
            for key, value in ir.load(folder.folder / f"{name}.onnx").graph.initializers.items()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        for name in ("unet_deep", "unet_shallow")
    )
    assert any(file == changed_file("unet") for file, _ in shallow.values())
    assert shallow.items() <= deep.items()


def test_what_is_not_quantised_stays_in_the_checkpoints_file(folder: ExportFolder) -> None:
    written = load_file(folder.folder / changed_file("unet"))
    layers = {key.removesuffix(INPUT_SCALE) for key in written if key.endswith(INPUT_SCALE)}
    kinds = (WEIGHT, SCALE, INPUT_SCALE, SMOOTHING)
    assert set(written) <= {layer + kind for layer in layers for kind in kinds}


def test_what_only_pytorch_takes_in_8_bits_lies_beside_the_graphs(
    folder: ExportFolder, tiny: Checkpoint
) -> None:
    recipe = RECIPES[folder.precision]
    unet: Any = tiny.part("unet")
    _, beside = folder.numbers
    further = load_file(beside)
    names = {key.removesuffix(INPUT_SCALE) for key in further if key.endswith(INPUT_SCALE)}
    assert names == {name for name in layers_of(unet) if recipe.further_rule_for(name)}
    for name in names:
        scale, stored = further[name + SCALE].float(), further[name + WEIGHT].float()
        weight = stored * scale.view(-1, *[1] * (stored.dim() - 1))
        measured = relative_norm(weight, unet.get_submodule(name).weight)
        assert measured <= FLIPS[folder.precision], f"{name}: {measured:.4f} off"
    assert not any(beside.name in graph.data for graph in folder.graphs.values())
    own = {name for name in layers_of(unet) if recipe.own_rule_for(name).is_quantised}
    assert set(put_in_8_bits(unet, *folder.numbers)) == own


def test_the_embedded_model_is_calibrated_on_its_own_scenes() -> None:
    prompts = calibration_prompts(find("mini"), None, INT8)
    assert len(prompts) == INT8.prompts and len(set(prompts)) > INT8.prompts / 2


def test_any_other_model_has_500_prompts_of_our_own(tiny: Checkpoint) -> None:
    all_ = calibration_prompts(tiny, None, INT8, 500)
    assert len(set(all_)) == 500 and all_ == [text.strip() for text in all_]
    lengths = sorted(len(text.split()) for text in all_)
    assert lengths[0] == 1 and lengths[-1] >= 20
    some = calibration_prompts(tiny, None, INT8)
    assert len(set(some)) == INT8.prompts and all_[0] in some and set(some) <= set(all_)
    with pytest.raises(InvalidParams, match="calibration-count must be 1 to 500 prompts, got 501"):
        calibration_prompts(tiny, None, INT8, 501)


def test_mlperfs_own_list_is_read(tiny: Checkpoint, tmp_path: Path) -> None:
    """The list has ids of COCO's captions, or is the table that COCO's tools make of them."""
    ids, table, annotations = (tmp_path / name for name in ("ids.txt", "captions.tsv", "coco.json"))
    ids.write_text("655\n282\n")
    table.write_text("id\tcaption\n655\ta dog\n282\ta cat\n")
    entries = [{"id": 282, "caption": "a cat "}, {"id": 655, "caption": "a dog"}]
    annotations.write_text(json.dumps({"annotations": entries}))
    assert calibration_prompts(tiny, ids, INT8, None, annotations) == ["a dog", "a cat"]
    assert calibration_prompts(tiny, table, INT8) == ["a dog", "a cat"]
    assert calibration_prompts(tiny, table, INT8, 1) == ["a dog"]
    with pytest.raises(
        InvalidParams, match="COCO captions and needs --annotations captions_train2014.json"
    ):
        calibration_prompts(tiny, ids, INT8)
    ids.write_text("7\n")
    with pytest.raises(InvalidParams, match="annotations must have the caption 7"):
        calibration_prompts(tiny, ids, INT8, None, annotations)


def test_each_line_of_a_file_is_a_prompt(tiny: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbf a cat \r\n\r\na dog\n")
    assert calibration_prompts(tiny, path, INT8) == ["a cat", "a dog"]
    for content, needed in ((b"\n\n", "have a prompt on each line"), (b"\xff\xfe", "hold UTF-8")):
        path.write_bytes(content)
        with pytest.raises(InvalidParams, match=f"calibration must {needed}"):
            calibration_prompts(tiny, path, INT8)
    with pytest.raises(InvalidParams, match="calibration must hold UTF-8 text .*No such file"):
        calibration_prompts(tiny, tmp_path / "gone.txt", INT8)


def test_only_the_unet_is_quantised(tiny_exports: Exports) -> None:
    half, *others = (tiny_exports(precision).graphs for precision in ("fp16", *NUMBERS))
    for name in ("clip_l", "clip_g", *VAE):
        assert {graphs[name].sha256 for graphs in others} == {half[name].sha256}


FREED = """
import gc
from tests.onnx_export.test_quantisation import calibrate_once

model = calibrate_once()
gc.collect()
raise SystemExit(model() is not None)
"""


def calibrate_once() -> weakref.ref[nn.Module]:
    unet = nn.ModuleDict({"attn1": nn.ModuleDict({"to_q": nn.Linear(64, 64)})})

    def run(_: StepClock) -> None:
        print("calibrating")
        unet.get_submodule("attn1.to_q")(torch.ones(4, 64))

    quantise(unet, INT8, run, torch.float32)
    return weakref.ref(unet)


def test_a_calibration_prints_its_progress_but_not_model_optimizers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calibrate_once()
    assert capsys.readouterr() == ("calibrating\n", "")


@pytest.mark.long
def test_a_calibrated_unet_is_freed() -> None:
    """This runs in a separate process, because the library's first import kept the UNet alive."""
    subprocess.run([sys.executable, "-c", FREED], check=True, timeout=120)
