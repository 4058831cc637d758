"""CLIP's text encoders with SDXL's outputs: the penultimate layer and the projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


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
