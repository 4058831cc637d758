"""Captions encoded once for the UNet. The text encoders must not be in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.mini.unet_training import time_ids

_AT_ONCE = 100


@dataclass(frozen=True)
class EncodedCaptions:
    """One row for each caption, in half precision."""

    context: Tensor
    pooled: Tensor

    def of(self, rows: Tensor, device: str, kept: Tensor | None = None) -> dict[str, Any]:
        """Return the UNet's arguments for these rows. Where `kept` is 0, the caption is dropped."""
        kept_rows = torch.ones(len(rows)) if kept is None else kept
        context = (self.context[rows].float() * kept_rows[:, None, None]).to(device)
        pooled = (self.pooled[rows].float() * kept_rows[:, None]).to(device)
        added = {"text_embeds": pooled, "time_ids": time_ids(context)}
        return {"encoder_hidden_states": context, "added_cond_kwargs": added}


@torch.no_grad()
def encode_captions(pipe: Any, texts: list[str]) -> EncodedCaptions:
    parts = [
        pipe.encode_prompt(texts[i : i + _AT_ONCE], do_classifier_free_guidance=False)
        for i in range(0, len(texts), _AT_ONCE)
    ]
    context, pooled = (torch.cat([part[i] for part in parts]).half().cpu() for i in (0, 2))
    return EncodedCaptions(context, pooled)
