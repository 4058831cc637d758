"""The scorer's training: by contrast, each scene beside three that differ in one attribute.

So it distinguishes counts, places and colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from sdxl.mini.clip import MiniClip, pixels_of
from sdxl.mini.scenes import (
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    Scene,
    caption,
    draw,
)
from sdxl.mini.vocabulary import EOS, write_tokenizer
from training.fitting import Schedule, fit, in_half
from training.mini import topology
from training.mini.neighbours import sample_group

_GROUP, _PLACE_SHARE = 4, 0.3
_SHARPNESS = 10.0  # of answers, as unit vectors are short


def _soften(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur some pictures and grain them all, since generated ones are never quite clean."""
    is_blurred = torch.from_numpy(rng.random(len(images)) < 0.5).to(images.device)
    blurred = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
    grain = 0.06 * torch.rand(len(images), 1, 1, 1, device=images.device)
    softened = torch.where(is_blurred[:, None, None, None], blurred, images)
    return softened + grain * torch.randn_like(images)


def _is_no_negative(scenes: list[Scene]) -> Tensor:
    """Return whether text i may be true of picture j, although they are not a pair.

    Open captions ("a circle") are compared only with their own group.
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
    """Return layout, background, then colour and shape of the first and of the second thing,
    ordered from the top or from the left. What neither picture nor caption determines is
    UNKNOWN."""
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
    facts_of_things = [(_index(COLOURS, t.colour), SHAPES.index(t.shape)) for t in things]
    facts_of_things += [(UNKNOWN, UNKNOWN)] * (2 - len(facts_of_things))
    return (layout, _index(COLOURS, scene.background), *facts_of_things[0], *facts_of_things[1])


def _index(names: Iterable[str], name: str | None) -> int:
    return UNKNOWN if name is None else list(names).index(name)


class Student(nn.Module):
    """The scorer with the questions of its training; the export leaves those out.

    By contrast alone it had not learned places and shapes after 1500 steps: picture and caption
    must both express a place before their agreement can be learned. So both are also asked for
    these facts directly.
    """

    ANSWERS = (len(LAYOUTS), len(COLOURS), len(COLOURS), len(SHAPES), len(COLOURS), len(SHAPES))

    def __init__(self) -> None:
        super().__init__()
        self.clip = MiniClip(topology.new_scorer_vision(), topology.new_scorer_text())
        self.heads = nn.Linear(topology.SCORER_WIDTH, sum(self.ANSWERS))
        self.sharpness = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))

    def misses(self, features: Tensor, scenes: list[Scene]) -> Tensor:
        """Return how far the answers, read from unit vectors, are from the facts."""
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
            outputs = model.get_image_features(pixels), model.get_text_features(tokens)
        seen, read = (F.normalize(f.pooler_output.float(), dim=-1) for f in outputs)
        logits = student.sharpness.clamp(max=np.log(100.0)).exp() * read @ seen.T
        logits = logits.masked_fill(_is_no_negative(scenes).to(device), -1e4)
        target = torch.arange(len(scenes), device=device)
        contrast = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        return contrast + student.misses(seen, scenes) + student.misses(read, scenes)

    fit(student, loss_of, schedule, work / "scorer.pt")
