"""Trains the UNet on latents of its own painting, before each step of the sampler.

Earlier stages train only on drawn pictures with noise. Latents of unfinished paintings are
different, and later steps continue the small errors of earlier ones. So pictures are painted like
in the service, and their latents before each deep step are stored. From each of these, a deep and a
shallow step must lead to the same picture with straightened things (the judge straightens them,
without a network). The error is measured in latents, and near the end also in decoded pixels,
because visible edges are finer than latents. The text encoders are frozen. Stars and crosses have
long outlines for their area and are bent most, so most courses show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from torch import Tensor

from sdxl.mini.scenes import Scene
from training.fitting import Schedule, fit, in_half, load_fitted, load_mean
from training.mini import topology
from training.mini.autoencoder import as_tensor, ink_of, load_vae, miss_of_shapes
from training.mini.judge import straighten
from training.mini.latents import encode_pictures, sample_pictures
from training.mini.neighbours import is_hard
from training.mini.painting import INTERVAL, Painting, paint, read, to_images
from training.mini.plan import TrainingPlan
from training.mini.unet_training import Lesson, UNetWithText, any_guidance

ROUNDS = 3  # number of rounds whose weights are averaged
FIRST = 4  # earlier steps only decide the layout
LATE = 10  # from this step on, predictions are also compared as pictures
SHARE, SEEN = 0.3, 0.15  # weights of the latents' loss and the picture's; that of `shapes` is 1
EASY = 0.3  # share of the pictures without a star or a cross that is used
BENT, RARELY, OFTEN = 0.05, 0.4, 2.5  # how often a course is drawn, by its worst shape's misfit
LEAST, MOST = 0.6, 3.0  # limits of a picture's weight; less ink gives more weight
DEEP_STEPS = slice(FIRST, None, INTERVAL)
_FIRST_LATE = (LATE - FIRST) // INTERVAL
_ROWS = 24
Doubles = NDArray[np.float64]


class OwnCourses(NamedTuple):
    """Scaled latents [n, steps, ...], the wanted picture (uint8 NHWC) and its latents, guidance,
    the captions' tokens, and the IoU of the worst shape with its ideal."""

    latents: Tensor
    picture: Tensor
    wanted: Tensor
    guidance: Tensor
    tokens: Tensor
    tokens_2: Tensor
    overlap: Tensor

    @property
    def length(self) -> int:
        return int(self.latents.shape[1])

    @classmethod
    def joined(cls, parts: Sequence[OwnCourses]) -> OwnCourses:
        return cls(*map(torch.cat, zip(*parts, strict=True)))


def checkpoints(plan: TrainingPlan, work: Path) -> list[Path]:
    return [work / f"own-courses-{number}.pt" for number in range(len(plan.own_courses))]


def endings_checkpoint(work: Path) -> Path:
    return work / "endings.pt"


def load_newest(plan: TrainingPlan, work: Path) -> UNetWithText:
    """Load the averaged weights of the latest stage; a new UNet if no stage has begun. Of
    `own_courses`, the mean of the latest three rounds, whose errors are smaller than any round's.
    The result of `endings` takes precedence."""
    painter = UNetWithText()
    for name in ("unet", *(contrast.name for contrast in plan.contrasts), "shapes"):
        load_fitted(painter, work / f"{name}.pt")
    for part in (painter.text_encoder, painter.text_encoder_2, painter.sketch):
        part.requires_grad_(False)
    rounds = [path for path in checkpoints(plan, work) if path.exists()]
    load_mean(painter, rounds[-ROUNDS:])
    load_fitted(painter, endings_checkpoint(work))
    return painter.eval()


def train_own_courses(plan: TrainingPlan, work: Path, device: str) -> None:
    """Train in rounds. Each round adds courses that the UNet of the round before painted."""
    courses: list[OwnCourses] = []
    for number, path in enumerate(checkpoints(plan, work)):
        courses.append(paint_own_courses(number, plan, work, device))
        torch.manual_seed(0)
        lesson = Lesson(load_newest(plan, work).to(device), plan, work, device)
        _train_round(lesson, OwnCourses.joined(courses), plan.own_courses[number], path)


def _train_round(lesson: Lesson, courses: OwnCourses, schedule: Schedule, path: Path) -> None:
    """Train on courses in four of five steps. The fifth is a step of `shapes`, so that its result
    is not forgotten."""
    plan = lesson.plan
    own_lesson = OwnLesson(lesson, courses, load_vae(path.parent))
    odds = odds_of(courses.overlap)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        with in_half(lesson.device):
            if step % 5 == 4:
                return lesson.guided_loss(lesson.any_rows(rng, plan.shapes_batch))
            rows = torch.from_numpy(rng.choice(len(odds), plan.own_batch, p=odds))
            at = torch.from_numpy(rng.integers(0, courses.length, plan.own_batch))
            looked = torch.from_numpy(rng.integers(_FIRST_LATE, courses.length, plan.own_looked))
            at[: len(looked)] = looked
            in_latents, in_pixels = own_lesson.misses(
                courses.latents[rows, at], rows, at, len(looked)
            )
            return SHARE * in_latents + SEEN * in_pixels

    fit(lesson.painter, loss_of, schedule, path)


class OwnLesson:
    """The error after a deep and a shallow step from any place of a course."""

    def __init__(self, lesson: Lesson, courses: OwnCourses, vae: AutoencoderKL) -> None:
        self._painter = lesson.painter
        self.painting = Painting(lesson.painter.unet, lesson.device)
        self._courses, self._device, self._scale = courses, lesson.device, lesson.scale
        self._vae = vae.to(lesson.device).requires_grad_(False)
        self._counts = _counts_of(courses.wanted.float()).to(lesson.device)

    def misses(
        self, latents: Tensor, rows: Tensor, at: Tensor, looked: int
    ) -> tuple[Tensor, Tensor]:
        """Return the error in latents, and for the first `looked` rows in decoded pixels. `latents`
        are the rows' latents before their deep steps `at`."""
        courses, painting, device = self._courses, self.painting, self._device
        latents = latents.float().to(device)
        step, guidance = step_of(at).to(device), courses.guidance[rows].to(device)
        tokens = courses.tokens[rows].to(device), courses.tokens_2[rows].to(device)
        conditions = read(painting, self._painter, *tokens)
        noise, cache = painting.deep(latents, step, conditions, guidance)
        between = painting.stepped(latents, step, noise)
        shallow = painting.shallow(between, step + 1, conditions[0], cache, guidance)
        before, after = painting.sigma(step), painting.sigma(step + 1)
        predicted = between - after * shallow
        first = self._error(latents - before * noise, rows, before)
        in_latents = (first + self._error(predicted, rows, after)) / 2
        decoded = self._vae.decode(predicted[:looked] / self._scale).sample
        pictures = as_tensor(courses.picture[rows[:looked]].numpy()).to(device)
        return in_latents, miss_of_shapes(decoded, pictures)

    def _error(self, latents: Tensor, rows: Tensor, sigma: Tensor) -> Tensor:
        """Return the error of latents as a share of their noise, with more weight under much noise,
        as in `noise_weights`."""
        error = (latents - self._courses.wanted[rows].float().to(self._device)) ** 2
        error = error * (1 + sigma**2).clamp(max=12) / (sigma**2 + 0.1)
        return (error.mean((1, 2, 3)) * self._counts[rows.to(self._device)]).mean()


def step_of(at: Tensor) -> Tensor:
    """Return the sampler's step for an index of a course's latents."""
    return FIRST + INTERVAL * at


def _counts_of(wanted: Tensor) -> Tensor:
    """Return weights of pictures. Pictures with small things, and thus short outlines, have more
    weight."""
    ink = ink_of(wanted).square().mean((1, 2, 3))
    counts = (ink.median() / ink).clamp(LEAST, MOST)
    return counts / counts.mean()


def odds_of(overlap: Tensor) -> Doubles:
    odds = ((1 - overlap.double()) / BENT).clamp(RARELY, OFTEN).numpy()
    return np.asarray(odds / odds.sum())


def _rows_of(number: int, plan: TrainingPlan, scenes: Sequence[Scene]) -> list[int]:
    """Return scenes that no other round uses."""
    rng = np.random.default_rng(40 + number)
    share = plan.pictures // (len(plan.own_courses) + 1)  # one for each round and for `endings`
    window = range(number * share, (number + 1) * share)
    chosen = [row for row in window if is_hard(scenes[row]) or rng.random() < EASY]
    return chosen[: plan.own_pictures]


@torch.no_grad()
def paint_own_courses(number: int, plan: TrainingPlan, work: Path, device: str) -> OwnCourses:
    """Paint a round's courses, or load them. Pictures that do not show their captions are left
    out."""
    path = work / f"own-courses-{number}-painted-{plan.own_pictures}.pt"
    if path.exists():
        return OwnCourses(*torch.load(path))
    painter, vae = load_newest(plan, work).to(device), load_vae(work).to(device)
    data, scenes = encode_pictures(plan, work, device), sample_pictures(plan)[0]
    torch.manual_seed(40 + number)
    parts: list[OwnCourses] = []
    chosen = _rows_of(number, plan, scenes)
    for start in range(0, len(chosen), _ROWS):
        rows = chosen[start : start + _ROWS]
        tokens = data.tokens[rows], data.tokens_2[rows]
        drawn = [scenes[row] for row in rows]
        part = paint_straightened(painter, vae, data.scale, drawn, tokens, DEEP_STEPS)
        if part is not None:
            parts.append(part)
        if start % (10 * _ROWS) == 0:
            print(f"painted {start} of {len(chosen)} courses", flush=True)
    if not parts:
        raise RuntimeError("no painting shows its caption yet; train `shapes` for longer")
    courses = OwnCourses.joined(parts)
    torch.save(tuple(courses), path)
    return courses


@torch.no_grad()
def paint_straightened(
    painter: UNetWithText,
    vae: AutoencoderKL,
    scale: float,
    scenes: Sequence[Scene],
    tokens: tuple[Tensor, Tensor],
    steps: slice,
) -> OwnCourses | None:
    """Paint these scenes and straighten the pictures. Pictures that do not show their scenes are
    left out; None if there are no others."""
    side, guidance = topology.LATENT_SIDE, any_guidance(len(scenes))
    blank = torch.zeros(len(scenes), topology.LATENT_CHANNELS, side, side, device=vae.device)
    *before, painted = paint(painter, blank, *tokens, guidance)
    pairs = zip(to_images(vae, painted / scale), scenes, strict=True)
    straightened = [straighten(*pair) for pair in pairs]
    good = [each for each in straightened if each is not None]
    if not good:
        return None
    kept = torch.tensor([each is not None for each in straightened])
    pictures = np.stack([each.picture for each in good])
    images = as_tensor(pictures).to(vae.device)
    return OwnCourses(
        latents=torch.stack(before[steps], dim=1).half().cpu()[kept],
        picture=torch.from_numpy(pictures),
        wanted=(vae.encode(images).latent_dist.mean * scale).half().cpu(),
        guidance=guidance[kept],
        tokens=tokens[0][kept],
        tokens_2=tokens[1][kept],
        overlap=torch.tensor([each.overlap for each in good]),
    )
