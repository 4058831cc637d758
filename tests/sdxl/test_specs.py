"""The specs agree with SDXL 1.0's real networks at full size (on the meta device)."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPTextConfig

from sdxl.checkpoint_checks import network_class
from sdxl.networks.parts import networks_of
from sdxl.single_file import configs
from sdxl.specs import CUTS, SDXL_1_0, Cut, image_axes, network_specs


def full_size_networks(cut: Cut) -> dict[str, torch.nn.Module]:
    networks: dict[str, torch.nn.Module] = {}
    with torch.device("meta"):
        for part, config in configs.SDXL_1_0.items():
            kind, is_text = network_class(part), part.startswith("text_encoder")
            module = kind(CLIPTextConfig(**config)) if is_text else kind(**config)
            networks |= networks_of(part, module, cut)
    return networks


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_every_shape_is_right_at_full_size(cut: Cut) -> None:
    networks = full_size_networks(cut)
    for h, w in [(128, 128), (104, 152)]:
        axes = {"rows": 2, "chunks": 3, "tokens": 154, "batch": 1, "latent_h": h, "latent_w": w}
        axes |= image_axes(SDXL_1_0, h, w)
        for name, spec in network_specs(SDXL_1_0, cut=cut).items():
            inputs = [
                torch.zeros(t.shape(axes), dtype=getattr(torch, t.dtype), device="meta")
                for t in spec.inputs
            ]
            with torch.no_grad():
                outputs = networks[name](*inputs)
            found = {t.name: tuple(out.shape) for t, out in zip(spec.outputs, outputs, strict=True)}
            assert found == {t.name: t.shape(axes) for t in spec.outputs}, name


def test_timesteps_stay_float32_in_half_precision() -> None:
    for spec in network_specs(SDXL_1_0, "float16").values():
        for tensor in spec.tensors:
            expected = {"timestep": "float32", "token_ids": "int64"}.get(tensor.name, "float16")
            assert tensor.dtype == expected, f"{spec.name}.{tensor.name}"


def test_one_name_always_has_the_same_shape() -> None:
    specs = network_specs(SDXL_1_0)
    unets = [*specs["unet_deep"].tensors, *specs["unet_shallow"].tensors]
    assert len({t.name for t in unets}) == len(set(unets))
