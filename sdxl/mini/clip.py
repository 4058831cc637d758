"""The scorer: a small CLIP of its own, which ranks captions for a picture and gives features.

It learns by contrast, each scene beside three that differ from it in one attribute, so that it
tells a count, a place or a colour from the next. Plain transformers loads its two towers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, ResNetForImageClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling

from sdxl.mini import topology
from sdxl.mini.fitting import Schedule, fit, in_half
from sdxl.mini.scenes import (
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    Image,
    Scene,
    caption,
    draw,
    sample_group,
)
from sdxl.mini.vocabulary import EOS, write_tokenizer

WEIGHTS = Path(__file__).parent / "weights" / "clip"
_GROUP, _PLACE_SHARE = 4, 0.3
_SHARPNESS = 10.0  # of answers, as unit vectors are short


class MiniClip(nn.Module):
    """A ResNet and a CLIP text encoder whose outputs share a space, called as a CLIPModel is."""

    def __init__(self, vision: ResNetForImageClassification, text: Any) -> None:
        super().__init__()
        self.vision, self.text = vision, text
        self.config = text.config

    @classmethod
    def load(cls, folder: Path) -> MiniClip:
        vision = ResNetForImageClassification.from_pretrained(
            folder / "vision", dtype=torch.float32
        )
        text = CLIPTextModelWithProjection.from_pretrained(folder / "text", dtype=torch.float32)
        return cls(vision, text).eval()

    def save(self, folder: Path) -> None:
        """Stored as float16."""
        for name in ("vision", "text"):
            network = getattr(self, name)
            network.half().save_pretrained(folder / name)
            network.float()

    @property
    def vision_model(self) -> nn.Module:
        """What a picture is before it is put into words: the features that FID compares."""
        resnet: nn.Module = self.vision.resnet
        return resnet

    def get_image_features(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(pooler_output=self.vision(pixel_values).logits)

    def get_text_features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> BaseModelOutputWithPooling:
        found = self.text(input_ids, attention_mask=attention_mask)
        return BaseModelOutputWithPooling(pooler_output=found.text_embeds)


class Scorer:
    """Pictures and captions in one space, whose cosine says how well they agree."""

    def __init__(self, folder: Path = WEIGHTS) -> None:
        self.model = MiniClip.load(folder)
        self.tokenizer = CLIPTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def image_features(self, images: np.ndarray) -> Tensor:
        """uint8 (n, 128, 128, 3) to unit vectors (n, 128)."""
        found = self.model.get_image_features(pixels_of(images)).pooler_output
        return F.normalize(found, dim=-1)

    @torch.no_grad()
    def text_features(self, texts: list[str]) -> Tensor:
        tokens = self.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
        found = self.model.get_text_features(tokens.input_ids).pooler_output
        return F.normalize(found, dim=-1)

    def rank(self, image: Image, texts: list[str]) -> int:
        """The place (0 is best) that this picture gives the first text among all of them."""
        scores = self.text_features(texts) @ self.image_features(image[None])[0]
        return int((scores > scores[0]).sum())


def pixels_of(images: np.ndarray) -> Tensor:
    """As the exported preprocessor does it: 0…255 to −1…1, channels first."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def _soften(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur some pictures and grain them all, since generated ones are never quite clean."""
    is_blurred = torch.from_numpy(rng.random(len(images)) < 0.5).to(images.device)
    blurred = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
    grain = 0.06 * torch.rand(len(images), 1, 1, 1, device=images.device)
    softened = torch.where(is_blurred[:, None, None, None], blurred, images)
    return softened + grain * torch.randn_like(images)


def _is_no_negative(scenes: list[Scene]) -> Tensor:
    """True where text i may well be true of picture j, although they are not a pair.

    Open captions ("a circle") are held only against their own group.
    """
    names = np.array([caption(scene) for scene in scenes])
    same = names[:, None] == names[None]
    is_open = np.array([not scene.is_full for scene in scenes])
    group = np.arange(len(scenes)) // _GROUP
    unsure = (is_open[:, None] | is_open[None]) & (group[:, None] != group[None])
    return torch.from_numpy((same | unsure) & ~np.eye(len(scenes), dtype=bool))


LAYOUTS = (*PLACES, "pair, one above the other", "pair, side by side", "two", "three")
UNKNOWN = -100


def facts(scene: Scene) -> tuple[int, ...]:
    """Layout, background, then colour and shape of the first thing and of the second, by place:
    from the top, or from the left. What neither picture nor caption settles is UNKNOWN."""
    things = scene.things
    if scene.kind == "pair":
        if scene.relation is None:
            return (UNKNOWN, _index(COLOURS, scene.background), *[UNKNOWN] * 4)
        dx, dy = RELATIONS[scene.relation]
        things = things if dx + dy < 0 else things[::-1]
        layout = len(PLACES) + (dx != 0)
    elif scene.kind == "group":
        layout = len(PLACES) + scene.count
    else:
        layout = _index(PLACES, scene.place)
    told = [(_index(COLOURS, t.colour), SHAPES.index(t.shape)) for t in things]
    told += [(UNKNOWN, UNKNOWN)] * (2 - len(told))
    return (layout, _index(COLOURS, scene.background), *told[0], *told[1])


def _index(names: Iterable[str], name: str | None) -> int:
    return UNKNOWN if name is None else list(names).index(name)


class Student(nn.Module):
    """The scorer, and the questions it is asked while it learns; the export leaves those out.

    By contrast alone places and shapes stayed at chance for 1500 steps: that a picture and a
    caption agree on a place is heard only once both say it. So both are also asked for it.
    """

    ANSWERS = (len(LAYOUTS), len(COLOURS), len(COLOURS), len(SHAPES), len(COLOURS), len(SHAPES))

    def __init__(self) -> None:
        super().__init__()
        self.clip = MiniClip(topology.new_scorer_vision(), topology.new_scorer_text())
        self.heads = nn.Linear(topology.SCORER_WIDTH, sum(self.ANSWERS))
        self.sharpness = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))

    def misses(self, features: Tensor, scenes: list[Scene]) -> Tensor:
        """How far the answers read off unit vectors are from the facts."""
        asked = torch.tensor([facts(scene) for scene in scenes], device=features.device)
        answers = (_SHARPNESS * self.heads(features)).split(self.ANSWERS, dim=-1)
        errors = [
            F.cross_entropy(answer, fact, ignore_index=UNKNOWN, reduction="sum")
            for answer, fact in zip(answers, asked.T, strict=True)
        ]
        known = (asked != UNKNOWN).sum(0).clamp(min=1)
        return (torch.stack(errors) / known).mean()


def train_scorer(schedule: Schedule, groups: int, work: Path, device: str) -> None:
    torch.manual_seed(0)
    student = Student().to(device)
    model = student.clip
    write_tokenizer(work / "tokenizer", EOS)
    tokenizer = CLIPTokenizer.from_pretrained(work / "tokenizer")

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        scenes = [s for _ in range(groups) for s in sample_group(rng, _GROUP, _PLACE_SHARE)]
        images = np.stack([draw(scene, int(rng.integers(2**31))) for scene in scenes])
        texts = [caption(scene, rng) for scene in scenes]
        tokens = tokenizer(texts, padding=True, return_tensors="pt").input_ids.to(device)
        with in_half(device):
            pixels = _soften(pixels_of(images).to(device), rng)
            found = model.get_image_features(pixels), model.get_text_features(tokens)
        seen, read = (F.normalize(f.pooler_output.float(), dim=-1) for f in found)
        logits = student.sharpness.clamp(max=np.log(100.0)).exp() * read @ seen.T
        logits = logits.masked_fill(_is_no_negative(scenes).to(device), -1e4)
        target = torch.arange(len(scenes), device=device)
        contrast = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        return contrast + student.misses(seen, scenes) + student.misses(read, scenes)

    fit(student, loss_of, schedule, work / "scorer.pt")
