"""Makes the networks of each part of a checkpoint. SDXL reads CLIP's penultimate layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sdxl.networks.unet import DeepUNet, PromptUNet, ShallowUNet
from sdxl.networks.vae import VaeDecoder, VaeEncoder
from sdxl.specs import Cut


class TextEncoder(nn.Module):
    """clip_l: token ids → the penultimate hidden state, without the final norm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        return (self.model(token_ids, output_hidden_states=True).hidden_states[-2],)


class ProjectingTextEncoder(TextEncoder):
    """clip_g: the same, and the end token's projection."""

    def forward(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        out = self.model(token_ids, output_hidden_states=True)
        return (out.hidden_states[-2], out.text_embeds)


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
