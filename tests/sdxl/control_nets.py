"""The embedded model's UNet and ControlNets with random weights: our results and diffusers'."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from diffusers.models.controlnets.controlnet import ControlNetModel
from diffusers.models.controlnets.controlnet_union import ControlNetUnionModel
from torch import Tensor, nn

from sdxl.checkpoint import find
from sdxl.networks.attention import cross_attentions
from sdxl.networks.parts import networks_of
from sdxl.specs import (
    ControlArchitecture,
    Cut,
    ModelSpec,
    control_specs,
    image_axes,
    level_axes,
    network_specs,
    with_residuals,
)

MOST = 1e-5
"""the largest difference, relative to the result"""
HINT_WIDTHS = (4, 8, 12, 16)
TYPES = 8
"""the number of types of ProMax"""
SMALL: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "DownBlock2D", "DownBlock2D"),
    "mid_block_type": "UNetMidBlock2D",
    "transformer_layers_per_block": (1, 1, 1),
}
"""diffusers' smallest ControlNet of SDXL, without any attention"""
MEDIUM: dict[str, Any] = {"transformer_layers_per_block": (0, 0, 1)}
Tensors = Mapping[str, Tensor]


@cache
def mini_unet() -> Any:
    """The embedded model's UNet with diffusers' own attention processors."""
    return find("mini").part("unet")


def random_control(seed: int = 0, **config: Any) -> Any:
    """Return a net with the UNet's weights, and with random weights where a new net has zeros."""
    made = ControlNetModel.from_unet(
        mini_unet(), conditioning_embedding_out_channels=HINT_WIDTHS, load_weights_from_unet=False
    )
    return perturbed(changed(made, **config), seed)


def random_union(seed: int = 0, types: int = TYPES) -> Any:
    made = ControlNetUnionModel.from_unet(
        mini_unet(), conditioning_embedding_out_channels=HINT_WIDTHS, load_weights_from_unet=False
    )
    stem = made.config.block_out_channels[0]
    sizes = {"num_control_type": types, "num_trans_channel": stem, "num_proj_channel": stem}
    return perturbed(changed(made, **sizes), seed)


def changed(net: Any, **config: Any) -> Any:
    # `_use_default_values` lists the fields that diffusers would set to its defaults.
    own = {name: value for name, value in net.config.items() if name[0] != "_"}
    return type(net)(**{**own, **config})


def perturbed(net: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    own = dict(mini_unet().named_parameters())
    for name, parameter in net.named_parameters():
        if name in own and own[name].shape == parameter.shape:
            parameter.data.copy_(own[name].data)
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(noise * (0.3 if parameter.dim() > 1 else 0.1) / noise[0].numel() ** 0.5)
    return net.eval().requires_grad_(False)


def architecture_of(net: Any) -> ControlArchitecture:
    widths = tuple(each.to_k.out_features for each in cross_attentions(net))
    return ControlArchitecture(widths, net.config.get("num_control_type", 0))


def random_tensors(rows: int, h: int, w: int, hints: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Return a UNet call's prompt, sample and timestep, and hints of a union."""
    arch = find("mini").arch
    axes = {"rows": rows, "tokens": 77, "latent_h": h, "latent_w": w, "hints": hints}
    axes["pictures"] = rows
    axes |= image_axes(arch, h, w)
    generator = torch.Generator().manual_seed(seed)
    unet = network_specs(arch)
    control = control_specs(arch, ControlArchitecture((), TYPES))
    wanted = [
        *unet["unet_prompt"].inputs,
        *control["control_prompt"].inputs,
        unet["unet_deep"].inputs[0],
    ]
    made = {t.name: torch.rand(t.shape(axes), generator=generator) for t in wanted}
    types = torch.arange(hints).expand(rows, -1) * 3 + 1
    return made | {
        "sample": torch.randn(made["sample"].shape, generator=generator),
        "context": torch.randn(made["context"].shape, generator=generator),
        "time_ids": torch.tensor([[8.0 * h, 8.0 * w, 0, 0, 8.0 * h, 8.0 * w]] * rows),
        "timestep": torch.linspace(900.0, 3.5, rows),
        "hint": made["hints"][:, 0],
        "hint_types": torch.nn.functional.one_hot(types, TYPES).float(),
    }


def diffusers_residuals(
    net: Any, t: Tensors, strength: float = 1.0, is_guess: bool = False
) -> list[Tensor]:
    down, middle = net(
        *_step(t),
        controlnet_cond=t["hint"],
        conditioning_scale=strength,
        guess_mode=is_guess,
        added_cond_kwargs=_added(t),
        return_dict=False,
    )
    return [*down, middle]


def diffusers_union(net: Any, t: Tensors, strengths: list[float]) -> list[Tensor]:
    """Call diffusers' union for each row alone, because it mixes the rows of a call."""
    rows = []
    for row in range(len(t["sample"])):
        own = {name: tensor[row : row + 1] for name, tensor in t.items()}
        used = own["hint_types"][0].argmax(1).tolist()
        down, middle = net(
            *_step(own),
            controlnet_cond=list(own["hints"].unbind(1)),
            control_type=own["hint_types"].amax(1),
            control_type_idx=used,
            conditioning_scale=strengths,
            added_cond_kwargs=_added(own),
            return_dict=False,
        )
        rows.append([*down, middle])
    return [torch.cat(each) for each in zip(*rows, strict=True)]


def diffusers_noise(unet: Any, t: Tensors, residuals: Sequence[Tensor] = ()) -> Tensor:
    more: dict[str, Any] = {}
    if residuals:
        *down, more["mid_block_additional_residual"] = residuals
        more["down_block_additional_residuals"] = tuple(down)
    noise: Tensor = unet(*_step(t), added_cond_kwargs=_added(t), **more).sample
    return noise


def _step(t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    return t["sample"], t["timestep"], t["context"]


def _added(t: Tensors) -> dict[str, Tensor]:
    return {"text_embeds": t["pooled"], "time_ids": t["time_ids"]}


@cache
def copied_unet() -> Any:
    """Copy the UNet, because our networks change its processors."""
    return copy.deepcopy(mini_unet())


def called(network: Any, spec: ModelSpec, given: dict[str, Tensor]) -> dict[str, Tensor]:
    inputs = {each.name: given[each.name] for each in spec.inputs}
    axes = spec.axes({name: tuple(tensor.shape) for name, tensor in inputs.items()})
    with torch.inference_mode():
        results = dict(zip([t.name for t in spec.outputs], network(*inputs.values()), strict=True))
    h, w = given["sample"].shape[-2:]
    sizes = axes | level_axes(h, w)
    shapes = {name: tuple(tensor.shape) for name, tensor in results.items()}
    assert shapes == {each.name: each.shape(sizes) for each in spec.outputs}, spec.name
    return results


def unet_results(
    t: dict[str, Tensor], residuals: list[Tensor], cut: Cut = "reference"
) -> dict[str, Tensor]:
    """Return Deep's noise and caches, and the noise of Shallow with these caches."""
    arch = find("mini").arch
    networks, plain = networks_of("unet", copied_unet(), cut), network_specs(arch, cut=cut)
    specs = plain | with_residuals(plain, arch)
    given = t | called(networks["unet_prompt"], specs["unet_prompt"], t)
    given |= {f"residual_{index}": each for index, each in enumerate(residuals)}
    ending = "+control" if residuals else ""
    deep = called(networks["unet_deep"], specs[f"unet_deep{ending}"], given)
    shallow = called(networks["unet_shallow"], specs[f"unet_shallow{ending}"], given | deep)
    return deep | {"shallow": shallow["noise"]}


def check_equal(found: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 0
    distance = float((found - expected).norm() / expected.norm())
    assert distance <= MOST, f"differs by {distance:.1e}, at most {MOST}"
