"""Trains the scorer by contrast. Each scene is compared with three scenes that differ in one
attribute, so that the scorer distinguishes counts, places and colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdxl.mini.clip import MiniClip, pixels_of
from sdxl.mini.scenes import COLOURS, PLACES, RELATIONS, SHAPES, Scene, caption, draw
from training.fitting import Schedule, fit, in_half
from training.mini import topology
from training.mini.latents import tokenizers
from training.mini.neighbours import sample_group

_GROUP, _PLACE_SHARE = 4, 0.3
_SHARPNESS = 10.0  # multiplies answers, because unit vectors have small elements


def _soften(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur some pictures and add grain to all, because generated pictures are never quite clean."""
    is_blurred = torch.from_numpy(rng.random(len(images)) < 0.5).to(images.device)
    blurred = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
    grain = 0.06 * torch.rand(len(images), 1, 1, 1, device=images.device)
    softened = torch.where(is_blurred[:, None, None, None], blurred, images)
    return softened + grain * torch.randn_like(images)


def _is_excluded(scenes: list[Scene]) -> Tensor:
    """Return whether text i may be true of picture j although they are not a pair, so that they are
    not compared.

    Captions with open facts ("a circle") are compared only with their own group.
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
    """Return layout, background, and then colour and shape of the first and the second thing, in
    order from the top or from the left. Facts that neither picture nor caption determines are
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
    """The scorer and heads that predict facts during training. The export omits the heads.

    With the contrast alone, it had not learned places and shapes after 1500 steps: features of
    picture and caption must both express a place before they can agree. So heads also predict these
    facts from both.
    """

    ANSWERS = (len(LAYOUTS), len(COLOURS), len(COLOURS), len(SHAPES), len(COLOURS), len(SHAPES))

    def __init__(self) -> None:
        super().__init__()
        self.clip = MiniClip(topology.new_scorer_vision(), topology.new_scorer_text())
        self.heads = nn.Linear(topology.SCORER_WIDTH, sum(self.ANSWERS))
        self.sharpness = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))

    def misses(self, features: Tensor, scenes: list[Scene]) -> Tensor:
        """Return the error of the facts that the heads predict from unit vectors."""
        wanted = torch.tensor([facts(scene) for scene in scenes], device=features.device)
        answers = (_SHARPNESS * self.heads(features)).split(self.ANSWERS, dim=-1)
        errors = [
            F.cross_entropy(answer, fact, ignore_index=UNKNOWN, reduction="sum")
            for answer, fact in zip(answers, wanted.T, strict=True)
        ]
        known = (wanted != UNKNOWN).sum(0).clamp(min=1)
        return (torch.stack(errors) / known).mean()


def train_scorer(schedule: Schedule, groups: int, work: Path, device: str) -> None:
    torch.manual_seed(0)
    student = Student().to(device)
    model = student.clip
    tokenizer, _ = tokenizers(work)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        scenes = [s for _ in range(groups) for s in sample_group(rng, _GROUP, _PLACE_SHARE)]
        images = np.stack([draw(scene, int(rng.integers(2**31))) for scene in scenes])
        texts = [caption(scene, rng) for scene in scenes]
        tokens = tokenizer(texts, padding=True, return_tensors="pt").input_ids.to(device)
        with in_half(device):
            pixels = _soften(pixels_of(images).to(device), rng)
            outputs = model.get_image_features(pixels), model.get_text_features(tokens)
        pictures, captions = (F.normalize(f.pooler_output.float(), dim=-1) for f in outputs)
        logits = student.sharpness.clamp(max=np.log(100.0)).exp() * captions @ pictures.T
        logits = logits.masked_fill(_is_excluded(scenes).to(device), -1e4)
        target = torch.arange(len(scenes), device=device)
        contrast = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        return contrast + student.misses(pictures, scenes) + student.misses(captions, scenes)

    fit(student, loss_of, schedule, work / "scorer.pt")
