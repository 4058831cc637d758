"""The lengths, rates and seeds of a training run."""

# A frozen schedule is a safe default.
# ruff: noqa: RUF009

from __future__ import annotations

from dataclasses import dataclass

from training.fitting import Schedule

GROUP = 4  # scenes that differ in one attribute


@dataclass(frozen=True)
class Contrast:
    """A training cycle on groups of scenes that differ in one attribute."""

    name: str
    schedule: Schedule
    place_share: float
    lowest: int  # timestep
    groups: int = 3_500
    seed: int = 7
    is_blind: bool = False


@dataclass(frozen=True)
class TrainingPlan:
    """The lengths and seeds of a whole run."""

    vae: Schedule = Schedule(steps=2600, peak_rate=2e-3, seed=1)
    decoder: Schedule = Schedule(steps=7000, peak_rate=1e-3, seed=5)
    unet: Schedule = Schedule(steps=5551, peak_rate=1e-3, seed=2, cycle=8000)
    contrasts: tuple[Contrast, ...] = (
        Contrast("groups", Schedule(steps=2000, peak_rate=8e-4, seed=6), 0.5, 400),
        Contrast("places", Schedule(steps=3600, peak_rate=1e-3, seed=8), 1.0, 900, 3_500, 9, True),
    )
    shapes: Schedule = Schedule(steps=9_000, peak_rate=6e-4, seed=15)
    own_courses: tuple[Schedule, ...] = (  # one for each round
        Schedule(steps=1800, peak_rate=4e-4, seed=31, average=0.998),
        Schedule(steps=2200, peak_rate=4e-4, seed=32, average=0.998),
        Schedule(steps=4200, peak_rate=5e-4, seed=51, average=0.998),
        Schedule(steps=3600, peak_rate=5e-4, seed=71, average=0.998),
        Schedule(steps=2600, peak_rate=4e-4, seed=91, average=0.998),
    )
    scorer: Schedule = Schedule(steps=1500, peak_rate=2e-3, seed=3)
    pictures: int = 30_000
    pictures_seed: int = 4
    repainted: int = 3_600  # pictures repainted for the decoder
    vae_batch: int = 16  # crops; a whole picture replaces four
    vae_whole_from: int = 1600
    decoder_batch: int = 6
    unet_batch: int = 32
    shapes_batch: int = 16  # each with and without its caption
    own_pictures: int = 2600  # pictures that the UNet paints for each round
    own_batch: int = 14  # each with and without its caption
    own_looked: int = 6  # rows of a batch whose decoded pictures count too
    endings: Schedule = Schedule(steps=1800, peak_rate=1.2e-4, seed=111, average=0.995)
    endings_batch: int = 8  # each with and without its caption, and decoded
    unet_emphasis: tuple[tuple[int, float], ...] = ((0, 1), (2000, 12), (3350, 60))
    scorer_groups: int = 16
    few_steps: Schedule = Schedule(steps=1500, peak_rate=2e-3, seed=13, average=0.995)
    few_steps_rank: int = 16
    few_steps_batch: int = 16
    courses: int = 528  # pictures that the teacher paints
    courses_batch: int = 24
    style: Schedule = Schedule(steps=600, peak_rate=2e-3, seed=14, average=0.99)
    style_rank: int = 8
    style_batch: int = 16
    style_pictures: int = 400
    embedding: Schedule = Schedule(steps=300, peak_rate=3e-3, seed=17, average=0.98)
    embedding_pictures: int = 300
    negative: Schedule = Schedule(steps=1000, peak_rate=2e-3, seed=16, average=0.99)
    negative_rank: int = 8
    negative_pictures: int = 1000
    control: Schedule = Schedule(steps=2300, peak_rate=1e-3, seed=18, average=0.995)
    control_bent: Schedule = Schedule(steps=3900, peak_rate=1e-3, seed=19, average=0.995)
    control_last: Schedule = Schedule(steps=600, peak_rate=4e-4, seed=120, average=0.99)
    control_courses: int = 600  # courses painted with the net
    control_depth: Schedule = Schedule(steps=600, peak_rate=1e-3, seed=20, average=0.995)
    control_pictures: int = 6000
    control_batch: int = 8  # each with and without its caption
    refiner_text: Schedule = Schedule(steps=2000, peak_rate=2e-3, seed=133, average=0.99)
    refiner_text_batch: int = 32
    refiner_captions: int = 4000
    refiner: Schedule = Schedule(steps=500, peak_rate=2e-4, seed=131, average=0.99)
    refiner_courses: int = 1400  # courses that the model paints
    refiner_batch: int = 6  # each with and without its caption, and decoded
    image_sight: Schedule = Schedule(steps=2500, peak_rate=5e-3, seed=142, average=0.99)
    image_seen: int = 16_000
    image_sight_batch: int = 48
    image_tokens: Schedule = Schedule(steps=1000, peak_rate=2e-3, seed=140, average=0.98)
    image_batch: int = 32
    image_adapter: Schedule = Schedule(steps=400, peak_rate=5e-4, seed=141, average=0.98)
    image_scenes: int = 3000
    image_unet_batch: int = 24
