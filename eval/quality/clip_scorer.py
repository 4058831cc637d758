"""The CLIP score of pictures with captions, and the distance between two pictures.

One class serves OpenAI's ViT-B/32, which the benchmark requires, and the embedded model's CLIP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sdxl.checkpoint import quiet_loading
from sdxl.images import Pixels
from sdxl.params import InvalidParams

# CLIP's own preprocessing (Radford et al., 2021).
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
VIT_B_32 = {"hidden_size": 768, "patch_size": 32, "num_hidden_layers": 12}

Prepare = Callable[[Sequence[Pixels]], Tensor]


class ClipScorer:
    """`prepare` turns pictures into inputs of the vision tower."""

    def __init__(self, model: Any, tokenizer: Any, prepare: Prepare, device: str = "cpu") -> None:
        self.device, self.prepare, self.tokenizer = torch.device(device), prepare, tokenizer
        self.model = model.eval().requires_grad_(False).to(self.device)

    @torch.inference_mode()
    def scores(self, pictures: Sequence[Pixels], captions: Sequence[str]) -> list[float]:
        """100 × the cosine of each picture and its caption."""
        tokens = self.tokenizer(
            list(captions), padding=True, truncation=True, return_tensors="pt"
        ).to(self.device)
        texts = self.model.get_text_features(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
        )
        pixels = self.prepare(pictures).to(self.device)
        images = self.model.get_image_features(pixel_values=pixels)
        scores: Tensor = 100 * F.cosine_similarity(images.pooler_output, texts.pooler_output)
        return [float(score) for score in scores]

    @torch.inference_mode()
    def pooled(self, pictures: Sequence[Pixels]) -> Tensor:
        """The vision tower's pooled features, before the projection."""
        vision = self.model.vision_model
        pooled: Tensor = vision(self.prepare(pictures).to(self.device)).pooler_output
        return pooled.flatten(1).cpu()

    @torch.inference_mode()
    def distances(self, pictures: Sequence[Pixels], others: Sequence[Pixels]) -> list[float]:
        """LPIPS (Zhang et al., 2018) without its weights: the mean squared difference of unit
        feature vectors over places and layers, 0 for equal pictures and 2 at most."""
        vision, layers = self.model.vision_model, []
        for each in (pictures, others):
            out = vision(self.prepare(each).to(self.device), output_hidden_states=True)
            layers.append([F.normalize(_by_place(h), dim=-1) for h in out.hidden_states[1:]])
        differences = [(a - b).square().sum(-1).mean(-1) for a, b in zip(*layers, strict=True)]
        return [float(x) for x in torch.stack(differences).mean(0)]


def _by_place(hidden: Tensor) -> Tensor:
    """The vectors of a ResNet's map, or of a transformer's patches without the class token."""
    return hidden.flatten(2).mT if hidden.ndim == 4 else hidden[:, 1:]


def vit_b_32(folder: Path, device: str = "cpu") -> ClipScorer:
    """`openai/clip-vit-base-patch32` from a local folder."""
    from transformers import CLIPModel, CLIPTokenizer

    needed = "must be a folder of openai/clip-vit-base-patch32"
    if not (folder / "config.json").exists():
        raise InvalidParams("clip", str(folder), f"{needed}; no config.json there")
    try:
        with quiet_loading():
            model = CLIPModel.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
            tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        line = " ".join(str(error).split())[:200]
        raise InvalidParams("clip", str(folder), f"{needed} ({line})") from error
    for name, value in VIT_B_32.items():
        if (actual := getattr(model.config.vision_config, name)) != value:
            raise InvalidParams("clip", str(folder), f"{needed}; its {name} is {actual}")
    side = model.config.vision_config.image_size
    return ClipScorer(model, tokenizer, lambda pictures: clip_inputs(pictures, side), device)


def mini_scorer() -> ClipScorer:
    """A scorer with the embedded model's CLIP."""
    from sdxl.mini.clip import Scorer, pixels_of

    with quiet_loading():
        scorer = Scorer()
    return ClipScorer(scorer.model, scorer.tokenizer, lambda each: pixels_of(np.stack(each)))


def clip_inputs(pictures: Sequence[Pixels], side: int) -> Tensor:
    """Square pictures, resized bicubically in 8 bits by Pillow, then normalised."""
    resized = [
        np.asarray(Image.fromarray(p).resize((side, side), Image.Resampling.BICUBIC))
        for p in pictures
    ]
    values = torch.from_numpy(np.stack(resized)).movedim(-1, 1).float() / 255
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
    return (values - mean) / deviation
