"""Makes the networks of each part of a checkpoint."""

from __future__ import annotations

from torch import nn

from sdxl.networks.text_encoder import ProjectingTextEncoder, TextEncoder
from sdxl.networks.unet import DeepUNet, PromptUNet, ShallowUNet
from sdxl.networks.vae import VaeDecoder, VaeEncoder
from sdxl.specs import Cut


def networks_of(part: str, module: nn.Module, cut: Cut = "reference") -> dict[str, nn.Module]:
    """Return the networks of one part; the UNet's three share weights."""
    match part:
        case "text_encoder":
            return {"clip_l": TextEncoder(module)}
        case "text_encoder_2":
            return {"clip_g": ProjectingTextEncoder(module)}
        case "unet":
            return {
                "unet_prompt": PromptUNet(module),
                "unet_deep": DeepUNet(module, cut),
                "unet_shallow": ShallowUNet(module, cut),
            }
        case _:
            return {"vae_decoder": VaeDecoder(module), "vae_encoder": VaeEncoder(module)}
