"""ControlNets: our networks with and without residuals equal diffusers', in every mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.pytorch.fast_unet import rearrange
from sdxl.checkpoint import find
from sdxl.control_inputs import residual_strengths, union_strengths
from sdxl.controls import MODES
from sdxl.networks.control import control_networks
from sdxl.specs import (
    CUTS,
    SDXL_1_0,
    ControlArchitecture,
    Cut,
    control_specs,
    image_axes,
    level_axes,
    network_specs,
    residual_specs,
    with_loras,
    with_residuals,
)
from tests.sdxl.control_nets import (
    MEDIUM,
    SMALL,
    architecture_of,
    called,
    check_equal,
    diffusers_noise,
    diffusers_residuals,
    diffusers_union,
    mini_unet,
    random_control,
    random_tensors,
    random_union,
    unet_results,
)

ROWS, COUNT = 2, 10
SHAPES = [(16, 16), (17, 23)]
"""latents' height and width; odd sides are rounded up at each level"""


def our_residuals(
    net: Any,
    t: dict[str, Tensor],
    strengths: Sequence[Sequence[float]],
    fit: Callable[[nn.Module], None] = lambda net: None,
) -> Any:
    """Call both networks as their specs say. `fit` changes the net's layers."""
    specs, ours = control_specs(find("mini").arch, architecture_of(net)), copy.deepcopy(net)
    fit(ours)
    networks = control_networks(ours)
    given = t | {"strengths": torch.tensor(strengths)}
    for name in ("control_prompt", "control_deep"):
        given |= called(networks[name], specs[name], given)
    return [given[each.name] for each in specs["control_deep"].outputs]


def check_all(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for each, other in zip(found, expected, strict=True):
        check_equal(each, other)


@pytest.mark.parametrize(("h", "w"), SHAPES)
@pytest.mark.parametrize("config", [{}, SMALL, MEDIUM], ids=["full", "small", "medium"])
def test_a_net_equals_diffusers(config: dict[str, Any], h: int, w: int) -> None:
    net, t = random_control(**config), random_tensors(ROWS, h, w)
    expected = diffusers_residuals(net, t, 0.7)
    found = our_residuals(net, t, [[0.7] * COUNT] * ROWS)
    check_all(found, expected)
    noise = unet_results(t, found)["noise"]
    check_equal(noise, diffusers_noise(mini_unet(), t, expected))
    without = unet_results(t, [])["noise"]
    change = float((noise - without).norm() / without.norm())
    assert change > 0.02, f"the net changes the noise by {change:.1e} only"


@pytest.mark.parametrize("make", [random_control, partial(random_control, **SMALL), random_union])
def test_rearranged_for_a_gpu_a_net_computes_the_same(make: Callable[[], Any]) -> None:
    net, t, strengths = make(), random_tensors(ROWS, 16, 16), [[0.7] * COUNT] * ROWS
    found = our_residuals(net, t, strengths, partial(rearrange, attention="math"))
    check_all(found, our_residuals(net, t, strengths))


def test_rows_of_a_call_have_their_own_strengths() -> None:
    """Each row equals the row alone. A row with strength 0 equals a row without a net."""
    net, t = random_control(), random_tensors(ROWS, 16, 16)
    found = our_residuals(net, t, [[0.5] * COUNT, [0.0] * COUNT])
    check_all([each[:1] for each in found], [e[:1] for e in diffusers_residuals(net, t, 0.5)])
    assert all(not each[1].any() for each in found)
    assert torch.equal(unet_results(t, found)["noise"][1], unet_results(t, [])["noise"][1])


def test_guess_mode_is_a_table_of_strengths() -> None:
    net, t = random_control(), random_tensors(ROWS, 16, 16)
    positive, negative = residual_strengths("guess", 0.8, COUNT)
    expected = diffusers_residuals(net, t, 0.8, is_guess=True)
    check_all(our_residuals(net, t, [positive] * ROWS), expected)
    assert not any(negative), "diffusers' pipeline adds zeros to the negative rows"


def test_modes_of_the_webui_are_tables_of_strengths() -> None:
    """The webui's extension computes the first ten as `weight * 0.825 ** float(12 - i)`."""
    soft = [0.5 * 0.825 ** float(12 - i) for i in range(13)][:COUNT]
    tables = {mode: residual_strengths(mode, 0.5, COUNT) for mode in MODES}
    assert tables["balanced"] == ([0.5] * COUNT, [0.5] * COUNT)
    assert tables["prompt"] == (soft, soft)
    assert tables["control"] == (soft, [0.0] * COUNT)


@pytest.mark.parametrize("strengths", [[0.6], [0.6, 1.2], [1.0, 0.5, 0.25]])
def test_a_union_equals_diffusers(strengths: list[float]) -> None:
    """Each row equals diffusers' result for it alone: in diffusers rows change each other."""
    net, t = random_union(), random_tensors(ROWS, 16, 16, hints=len(strengths))
    if len(strengths) == 3:
        t["hint_types"][:, 2] = t["hint_types"][:, 0]
    scales, strength = union_strengths(strengths)
    expected = diffusers_union(net, t, strengths)
    found = our_residuals(
        net, t | {"hint_scales": torch.tensor([scales] * ROWS)}, [[strength] * COUNT] * ROWS
    )
    check_all(found, expected)
    check_equal(unet_results(t, found)["noise"], diffusers_noise(mini_unet(), t, expected))


def test_hints_with_scale_0_pad_a_unions_row() -> None:
    net, t = random_union(), random_tensors(ROWS, 16, 16, hints=3)
    scales = torch.tensor([[0.6, 1.2, 0.0]] * ROWS)
    t["hint_types"][:, 2] = 0
    two = {
        name: tensor[:, :2] if name.startswith("hint_") or name == "hints" else tensor
        for name, tensor in t.items()
    }
    ones = [[1.0] * COUNT] * ROWS
    padded = our_residuals(net, t | {"hint_scales": scales}, ones)
    check_all(padded, our_residuals(net, two | {"hint_scales": scales[:, :2]}, ones))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("h", "w"), SHAPES)
def test_shallow_on_deeps_cache_equals_deep_with_residuals(cut: Cut, h: int, w: int) -> None:
    t = random_tensors(ROWS, h, w)
    residuals = our_residuals(random_control(), t, [[1.0] * COUNT] * ROWS)
    found = unet_results(t, residuals, cut)
    check_equal(found["shallow"], found["noise"])
    plain = unet_results(t, [], cut)["noise"]
    assert (plain - found["noise"]).norm() > 0.01 * plain.norm()


@pytest.mark.parametrize("make", [random_control, random_union])
def test_half_precision_stays_half(make: Any) -> None:
    """Graphs are strongly typed, so no tensor may turn into float32."""
    net = copy.deepcopy(make())
    architecture, networks = architecture_of(net), control_networks(net.to(torch.bfloat16))
    specs = control_specs(find("mini").arch, architecture, "bfloat16")
    given = random_tensors(ROWS, 8, 8) | {"strengths": torch.ones(ROWS, COUNT)}
    for name, spec in specs.items():
        inputs = {
            each.name: given[each.name].to(getattr(torch, each.dtype)) for each in spec.inputs
        }
        given |= (results := called(networks[name], spec, given | inputs))
        assert {tensor.dtype for tensor in results.values()} == {torch.bfloat16}


@pytest.mark.parametrize("cut", CUTS)
def test_specs_with_residuals_keep_all_other_tensors_in_place(cut: Cut) -> None:
    arch = find("mini").arch
    plain = network_specs(arch, cut=cut)
    specs = plain | with_loras(plain)
    controlled = with_residuals(specs, arch)
    deeps = {"unet_deep", "unet_deep+lora", "unet_deep+locon"}
    assert set(controlled) == {
        f"{name}+control" for name in (*deeps, "unet_shallow", "unet_shallow+locon")
    }
    for name, spec in controlled.items():
        old = specs[name.removesuffix("+control")]
        others = tuple(t for t in spec.inputs if not t.name.startswith("residual_"))
        assert (others, spec.outputs) == (old.inputs, old.outputs)
        count = COUNT if "deep" in name else 1 if cut == "reference" else 3
        assert len(spec.inputs) - len(others) == count
        is_adapted = name.count("+") == 2
        assert [t.name for t in spec.inputs[-2:]] == ["pages", "scales"] or not is_adapted


@pytest.mark.parametrize("side", [128, 104])
def test_residuals_have_sdxls_shapes_at_full_size(side: int) -> None:
    from diffusers.models.controlnets.controlnet import ControlNetModel
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    from sdxl.single_file import configs

    with torch.device("meta"):
        net = ControlNetModel.from_unet(UNet2DConditionModel(**configs.SDXL_1_0["unet"]))
    own = architecture_of(net)
    assert own == ControlArchitecture((*[640] * 4, *[1280] * 30))
    axes = {"rows": 2, "pictures": 1, "tokens": 77, **level_axes(side, side)}
    axes |= image_axes(SDXL_1_0, side, side)
    specs, networks = control_specs(SDXL_1_0, own), control_networks(net)
    for name, spec in specs.items():
        inputs = [torch.zeros(t.shape(axes), device="meta") for t in spec.inputs]
        results = [tuple(each.shape) for each in networks[name](*inputs)]
        assert results == [t.shape(axes) for t in spec.outputs], name
    assert len(residual_specs(SDXL_1_0, "float16")) == COUNT
