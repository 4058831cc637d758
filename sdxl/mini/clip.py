"""A small CLIP that scores how well captions describe a picture, and computes features for FID.

transformers loads its two encoders. `training.mini.scorer` trains it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, ResNetForImageClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling

WEIGHTS = Path(__file__).parent / "weights" / "clip"


class MiniClip(nn.Module):
    """A ResNet and a CLIP text encoder with a common embedding space, with CLIPModel's methods."""

    def __init__(self, vision: ResNetForImageClassification, text: Any) -> None:
        super().__init__()
        self.vision, self.text = vision, text

    @classmethod
    def load(cls, folder: Path) -> MiniClip:
        vision = ResNetForImageClassification.from_pretrained(
            folder / "vision", dtype=torch.float32
        )
        text = CLIPTextModelWithProjection.from_pretrained(folder / "text", dtype=torch.float32)
        return cls(vision, text).eval()

    def save(self, folder: Path) -> None:
        """Save the weights as float16."""
        for name in ("vision", "text"):
            network = getattr(self, name)
            network.half().save_pretrained(folder / name)
            network.float()

    @property
    def vision_model(self) -> nn.Module:
        """The network whose features FID compares."""
        return self.vision.resnet

    def get_image_features(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(pooler_output=self.vision(pixel_values).logits)

    def get_text_features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> BaseModelOutputWithPooling:
        output = self.text(input_ids, attention_mask=attention_mask)
        return BaseModelOutputWithPooling(pooler_output=output.text_embeds)


class Scorer:
    """Embeds pictures and captions; the cosine says how well they agree."""

    def __init__(self, folder: Path = WEIGHTS) -> None:
        self.model = MiniClip.load(folder)
        self.tokenizer = CLIPTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def image_features(self, images: np.ndarray) -> Tensor:
        """Embed uint8 (n, 128, 128, 3) as unit vectors (n, 128)."""
        features = self.model.get_image_features(pixels_of(images)).pooler_output
        return F.normalize(features, dim=-1)

    @torch.no_grad()
    def text_features(self, texts: list[str]) -> Tensor:
        tokens = self.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
        features = self.model.get_text_features(tokens.input_ids).pooler_output
        return F.normalize(features, dim=-1)


def pixels_of(images: np.ndarray) -> Tensor:
    """Scale 0…255 to −1…1, channels first, like the exported preprocessor."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
