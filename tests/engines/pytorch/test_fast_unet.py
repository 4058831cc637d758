"""On a CPU, the UNet rearranged for a GPU, also in 8 bits, computes the same as before."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.control_weights import read_control
from engines.folders.export_folder import INPUT_SCALE, SCALE, WEIGHT
from engines.parity.calls import call_errors
from engines.parity.findings import relative_norm
from engines.pytorch.eight_bit import EightBit, flagged, put_control_layers, quantise
from engines.pytorch.fast_unet import Attention, rearrange
from engines.pytorch.launches import like_a_gpu
from engines.pytorch.torch_engine import load_torch
from engines.pytorch.torch_options import TorchOptions
from eval.gpu.proof import unet_calls
from onnx_export.check import example_inputs
from onnx_export.recipes import RECIPES, matching
from onnx_export.reference import fake_quantise
from sdxl.checkpoint import find
from sdxl.networks.attention import cross_attentions, prompted
from sdxl.networks.parts import networks_of
from sdxl.params import InvalidParams
from sdxl.pipeline import Pipeline, Result
from sdxl.places import CONTROLNETS
from sdxl.specs import CHUNK, image_specs, network_specs
from tests.engines.conftest import PICTURE
from tests.engines.distances import check_near
from tests.sdxl.control_nets import random_tensors
from tests.sdxl.test_control import our_residuals
from training.mini.control_check import unseen_layouts
from training.mini.layouts import MAPS

LEAST_ERROR = 2e-5
MOST_ERROR = {"fp8": 0.06, "int8": 0.03}
"""the error of the UNet's output relative to its norm, at any step of a real picture"""
MOST_LATENTS_ERROR = {"fp8": 0.25, "int8": 0.2}


def deep(unet: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        found: tuple[Tensor, ...] = networks_of("unet", unet)["unet_deep"](*inputs.values())
    return found


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    return find("mini").part("unet")


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    arch = find("mini").arch
    axes = {"rows": 2, "latent_h": 8, "latent_w": 8, "tokens": CHUNK}
    return example_inputs(network_specs(arch)["unet_deep"], axes, arch, 0)


@pytest.fixture(params=list(RECIPES))
def numbers(request: pytest.FixtureRequest, numbers_of: Callable[[str], Path]) -> tuple[str, Path]:
    return request.param, numbers_of(request.param)


@pytest.fixture(scope="module")
def rearranged(unet: nn.Module) -> nn.Module:
    ours = copy.deepcopy(unet).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rearrange(ours, "math")
    return ours


def test_rearranged_it_computes_the_same(
    rearranged: nn.Module, unet: nn.Module, inputs: dict[str, Tensor]
) -> None:
    for found, expected in zip(deep(rearranged, inputs), deep(unet, inputs), strict=True):
        check_near(found, expected, LEAST_ERROR)


def test_rearranged_it_attends_to_the_same_image_prompts(
    rearranged: nn.Module, unet: nn.Module, inputs: dict[str, Tensor]
) -> None:
    generator = torch.Generator().manual_seed(0)
    *text, mask = (
        torch.randn(t.shape({"rows": 2, "images": 1, "image_tokens": 4}), generator=generator)
        for t in image_specs(find("mini").arch, "float32")
    )
    plain = deep(unet, inputs)[0]
    with prompted(text, 0 * mask):
        found, expected = deep(rearranged, inputs)[0], deep(unet, inputs)[0]
    measured = relative_norm(found, expected)
    assert measured <= LEAST_ERROR < relative_norm(expected, plain), f"{measured:.2e}"


def test_self_attention_is_one_product_and_cross_attention_knows_its_turn(unet: nn.Module) -> None:
    ours = copy.deepcopy(unet)
    rearrange(ours)
    found = [m for m in ours.modules() if isinstance(m, Attention)]
    assert all((m.joint is None) == (m.layer is not None) for m in found)
    layers = [m.layer for m in cross_attentions(ours)]
    assert layers == list(range(len(found) // 2))


def test_rearranging_holds_no_weight_twice(numbers: tuple[str, Path], unet: nn.Module) -> None:
    """In floats and in 8 bits, the parts of joined layers are not kept. A gated product adds two
    numbers for each channel, which are not weights. An upsampler also keeps its quarters, because
    sides may be stretched."""
    for ours in (copy.deepcopy(unet), in_eight_bits(unet, numbers[1])):
        before = held_bytes(ours)
        rearrange(ours)
        assert held_bytes(ours) <= before


def test_8_bit_upsamplers_are_quarters_where_sides_are_doubles() -> None:
    """A map of 62 × 62 latents has sides of 31 and 16: the last is stretched, not doubled."""
    pytest.importorskip("triton", reason="Triton comes for Linux alone")
    from tests.engines.meta_launches import launches_of

    for side, doubled in ((1024, 2), (496, 1)):
        launches = launches_of("unet_deep", "fp8", 2, side)
        found = sum(each.constants.get("TAPS") == 4 for each in launches)
        assert found == doubled, side


def in_eight_bits(unet: nn.Module, path: Path) -> nn.Module:
    ours = copy.deepcopy(unet)
    quantise(ours, path)
    return ours


def held_bytes(module: nn.Module) -> int:
    named = (*module.named_parameters(), *module.named_buffers())
    held = {t.data_ptr(): t.nbytes for name, t in named if not re.search("gated|quarters", name)}
    return sum(held.values())


def test_8_bit_layers_are_the_recipes(numbers: tuple[str, Path], unet: nn.Module) -> None:
    number, path = numbers
    ours = copy.deepcopy(unet)
    replaced = set(quantise(ours, path))
    layers = [n for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    own = {name for name in layers if RECIPES[number].own_rule_for(name).is_quantised}
    in_graphs = {n for n, rule in matching(RECIPES[number], layers).items() if rule.is_quantised}
    assert replaced == own > in_graphs
    assert all(isinstance(ours.get_submodule(name), EightBit) for name in replaced)


def test_8_bits_here_are_what_the_exports_reference_computes(
    numbers: tuple[str, Path], unet: nn.Module, inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    """This compares the layers that graphs have in 8 bits."""
    number, path = numbers[0], tmp_path / "of_graphs.safetensors"
    recipe, tensors = RECIPES[number], load_file(numbers[1])
    in_graphs = {k: t for k, t in tensors.items() if recipe.rule_for(layer_of(k)).is_quantised}
    save_file(in_graphs, path)
    ours, theirs = copy.deepcopy(unet), copy.deepcopy(unet)
    quantise(ours, path)
    rearrange(ours)
    fake_quantise(theirs, path)
    # A value halfway between two steps may go to either.
    check_near(deep(ours, inputs)[0], deep(theirs, inputs)[0], 0.01, number)


def test_each_further_layer_is_what_its_numbers_stand_for(
    numbers: tuple[str, Path], unet: nn.Module
) -> None:
    number, path = numbers
    ours, theirs = copy.deepcopy(unet), copy.deepcopy(unet)
    replaced = quantise(ours, path)
    fake_quantise(theirs, path)
    further = [name for name in replaced if RECIPES[number].further_rule_for(name)]
    assert further
    for name in further:
        layer: Any = ours.get_submodule(name)
        shape = (2, 5, 7) if layer.weight.dim() == 4 else (2, 9)
        given = torch.randn(shape[0], *shape[1:], layer.weight.shape[-1]).movedim(-1, 1)
        given = given if layer.weight.dim() == 4 else given.movedim(1, -1)
        with torch.inference_mode():
            check_near(layer(given), theirs.get_submodule(name)(given), 0.01, (number, name))


def test_a_sum_of_tokens_is_part_of_our_own_product() -> None:
    """PyTorch's FP8 product leaves the sum to the next norm."""
    from engines.pytorch.launches import noted
    from tests.engines.meta_launches import begun, engines_of

    for number, has_sums in (("fp16", True), ("int8", False), ("fp8", True)):
        loop = begun(engines_of(number, "mini"), images=1, latent=20)
        with noted() as launches:
            loop.tick()
        norms = [each for each in launches if each.name == "_add_norm"]
        assert norms
        assert any(each.by_name["added"] is not None for each in norms) == has_sums, number


def layer_of(key: str) -> str:
    return key.removesuffix(INPUT_SCALE).removesuffix(SCALE).removesuffix(WEIGHT)


def test_8_bits_stay_near_float32_at_every_step(numbers: tuple[str, Path], mini: Pipeline) -> None:
    number, path = numbers
    engines = load_torch(
        mini.checkpoint, device="cpu", precision=number, numbers=[path], options=TorchOptions()
    )
    errors = call_errors(engines, unet_calls(mini, PICTURE))
    print(f"{number}: the UNet's relative L2 by step", [f"{e:.4f}" for e in errors])
    assert max(errors) <= MOST_ERROR[number], f"{max(errors):.4f}, at most {MOST_ERROR[number]}"
    (found,) = Pipeline(mini.checkpoint, engines).generate([PICTURE])
    (expected,) = mini.generate([PICTURE])
    check_near(latents_of(found), latents_of(expected), MOST_LATENTS_ERROR[number], "latents")


def test_a_controlnet_beside_8_bits_is_in_e4m3_and_near_itself(
    numbers: tuple[str, Path], mini: Pipeline
) -> None:
    """The net's 8-bit layers are the UNet's; its residuals are as near as the UNet's noise."""
    number, path = numbers
    net = read_control(CONTROLNETS / "edges", mini.checkpoint).network()
    ours, unet = copy.deepcopy(net), mini.checkpoint.part("unet")
    put_control_layers(ours, path)
    replaced = {name for name, each in ours.named_modules() if isinstance(each, EightBit)}
    names = {name for name, _ in net.named_modules()}
    assert replaced == names & {*quantise(unet, path)}
    (drawing,) = unseen_layouts(1)
    edges = torch.from_numpy(MAPS["edges"](drawing)) / 255
    for call in unet_calls(mini, PICTURE):
        if call.network != "unet_deep":
            continue
        given = {name: call.inputs[name] for name in ("sample", "timestep")}
        t = random_tensors(len(given["sample"]), *given["sample"].shape[2:]) | given
        t["hint"] = edges.expand(len(t["sample"]), 3, -1, -1)
        strengths = [[1.0] * 10] * len(t["sample"])
        found, expected = (
            torch.cat([each.flatten() for each in our_residuals(net, t, strengths, fit)])
            for fit in (lambda net: put_control_layers(net, path), lambda net: None)
        )
        check_near(found, expected, MOST_ERROR["fp8"], number)


@pytest.mark.parametrize("number", [torch.int8, torch.float8_e4m3fn])
def test_a_nan_shows_in_its_row_and_in_the_next_call_no_more(number: torch.dtype) -> None:
    layer = EightBit(torch.ones(4, 6).to(number), torch.ones(4), torch.ones(6), torch.zeros(4))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), x

    network, x = flagged(Network()), torch.randn(3, 5, 6)
    broken = x.clone()
    broken[1, 2, 3] = torch.nan
    for given, rows in ((broken, [1]), (x, [])):
        found = network(given)[0].isnan().flatten(1).any(1).nonzero().flatten().tolist()
        assert found == rows, f"rows {found} are NaN, needed {rows}"


def latents_of(result: Result) -> Tensor:
    assert result.latents is not None, result.error
    return result.latents


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", TorchOptions()),
        ("attention=flash, compile", TorchOptions(attention="flash", compile=True)),
        ("no-graphs,no-rearranged", TorchOptions(graphs=False, rearranged=False)),
    ],
)
def test_options_are_a_line_of_text(text: str, expected: TorchOptions) -> None:
    assert TorchOptions.parse(text) == expected
    assert TorchOptions.parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["attention=fast", "no-attention", "graphs=1"])
def test_an_unknown_option_is_named(text: str) -> None:
    with pytest.raises(InvalidParams, match="must be (one of auto|attention=NAME)"):
        TorchOptions.parse(text)


def test_8_bits_and_numbers_go_together(mini: Pipeline, tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"precision": "fp8"},
        {"precision": "fp16", "numbers": [tmp_path]},
    ]
    for each in settings:
        with pytest.raises(InvalidParams, match="numbers"):
            load_torch(mini.checkpoint, device="cpu", **each)


def test_fp8_needs_a_gpu_that_has_it(mini: Pipeline, tmp_path: Path) -> None:
    with like_a_gpu((8, 6)), pytest.raises(InvalidParams, match="a GPU of compute capability 8.9"):
        load_torch(mini.checkpoint, device="meta", precision="fp8", numbers=[tmp_path])
