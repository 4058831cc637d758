"""Captions encoded once for the UNet. The text encoders must not be in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.mini import topology


@dataclass(frozen=True)
class EncodedCaptions:
    """One row for each caption, in half precision."""

    context: Tensor
    pooled: Tensor

    def of(self, rows: Tensor, device: str, kept: Tensor | None = None) -> dict[str, Any]:
        """Return the UNet's arguments for these rows. Where `kept` is 0, the caption is dropped."""
        kept_rows = (torch.ones(len(rows)) if kept is None else kept).to(device)
        time_ids = torch.tensor([topology.TIME_IDS], dtype=torch.float32, device=device)
        return {
            "encoder_hidden_states": self.context[rows].float().to(device)
            * kept_rows[:, None, None],
            "added_cond_kwargs": {
                "text_embeds": self.pooled[rows].float().to(device) * kept_rows[:, None],
                "time_ids": time_ids.repeat(len(rows), 1),
            },
        }


@torch.no_grad()
def encode_captions(pipe: Any, texts: list[str]) -> EncodedCaptions:
    context, _, pooled, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False)
    return EncodedCaptions(context.half().cpu(), pooled.half().cpu())
