"""Training continues from exported weights, and from the step where it was stopped."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline

from sdxl.catalogue import Catalogue
from sdxl.checkpoint import find_refiner
from sdxl.mini.scenes import draw
from sdxl.places import MINI
from tests.tools import ROOT
from tests.training.conftest import short_plan
from training.fitting import load_latest, save_adopted
from training.mini import endings, own_courses
from training.mini.autoencoder import as_tensor, load_vae, misread
from training.mini.check import WEIGHTS, held_out_scenes
from training.mini.latents import encode_pictures
from training.mini.painting import paint
from training.mini.plan import TrainingPlan
from training.mini.train import CONTROL_STAGES, LORA_STAGES, STAGES, adopt, train
from training.mini.unet_training import UNetWithText


def test_the_wheel_contains_every_file_of_the_model_and_its_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["sdxl.mini"]
    taken = {path for pattern in patterns for path in MINI.parent.glob(pattern)}
    kept = {path for path in MINI.parent.rglob("*") if path.is_file()}
    left = {path for path in kept - taken if path.suffix not in {".py", ".pyc"}}
    assert left == {MINI.with_name("README.md")}


@pytest.mark.parametrize("by", [1, 2, 4])
def test_the_decoders_loss_is_near_the_judges_count(by: int) -> None:
    """Things on plain ground are moved to the right. A faint tint is not an error."""
    singles = [scene for scene in held_out_scenes(30) if scene.kind == "single"]
    drawn = as_tensor(np.stack([draw(scene, i) for i, scene in enumerate(singles)]))
    assert float(misread(drawn, drawn)) == pytest.approx(0.0, abs=1e-6)
    shares = []
    for picture in drawn:
        contrast = (picture - picture[:, :1, :1]).norm(dim=0)
        thing = contrast > contrast.max() / 2
        shares.append(float((thing ^ thing.roll(by, -1)).sum() / thing.sum()))
    found = float(misread(drawn.roll(by, -1), drawn))
    assert found == pytest.approx(float(np.mean(shares)), rel=0.2)
    assert float(misread(drawn + 0.02, drawn)) < found / 2


def test_training_goes_on_from_exported_weights_and_adopts_them_once(tmp_path: Path) -> None:
    adopt(WEIGHTS, TrainingPlan(), tmp_path)
    exported = AutoencoderKL.from_pretrained(WEIGHTS / "vae").state_dict()
    adopted = load_vae(tmp_path).state_dict()
    assert all(torch.equal(adopted[name], each.float()) for name, each in exported.items())
    state = torch.load(tmp_path / "vae.pt")
    torch.save({**state, "step": 7}, tmp_path / "vae.pt")
    adopt(WEIGHTS, TrainingPlan(), tmp_path)
    assert torch.load(tmp_path / "vae.pt")["step"] == 7


@pytest.mark.long
def test_every_stage_runs_from_nothing_to_a_folder_that_diffusers_paints_with(
    tmp_path: Path, accepts_all: None
) -> None:
    counts = {"pictures": 48, "repainted": 13, "own_pictures": 8, "own_looked": 1, "courses": 2}
    counts |= {"vae_whole_from": 1, "scorer_groups": 2, "style_pictures": 3, "control_pictures": 3}
    counts |= {"refiner_courses": 1, "refiner_captions": 3, "image_seen": 40, "image_scenes": 3}
    counts |= {"control_courses": 2}
    batches = {"vae_batch": 4, "unet_batch": 8, "shapes_batch": 4, "courses_batch": 1}
    train(short_plan(**counts, **batches), tmp_path, tmp_path / "out", "cpu", STAGES)
    loras = Catalogue((tmp_path / "out.loras",))
    files = [*loras.listed("lora"), *loras.listed("embedding")]
    assert {file.name for file in files} == {*LORA_STAGES}
    nets = {folder.name for folder in (tmp_path / "out.controlnets").iterdir()}
    assert nets == {*CONTROL_STAGES}
    assert (tmp_path / "out.ip_adapters").exists() and find_refiner(str(tmp_path / "out.refiner"))
    pipe = StableDiffusionXLPipeline.from_pretrained(tmp_path / "out")
    (picture,) = pipe("a red circle", num_inference_steps=2, output_type="np").images
    assert picture.shape == (128, 128, 3) and np.isfinite(picture).all()


def _painter_that_learns_alone(work: Path) -> UNetWithText:
    """Return a painter whose text encoders are frozen, as from the stage `shapes` on."""
    painter = UNetWithText()
    save_adopted(painter, 1, work / "shapes.pt")
    for part in (painter.text_encoder, painter.text_encoder_2, painter.sketch):
        part.requires_grad_(False)
    return painter


@torch.no_grad()
def _save_filled(painter: UNetWithText, value: float, path: Path) -> None:
    painter.unet.conv_in.weight.fill_(value)
    save_adopted(painter, 1, path)


def test_the_newest_unet_is_the_mean_of_the_last_rounds_until_the_endings(tmp_path: Path) -> None:
    plan, painter = TrainingPlan(), _painter_that_learns_alone(tmp_path)
    rounds = own_courses.checkpoints(plan, tmp_path)
    for path, value in zip(rounds[:4], (100, 1, 2, 6), strict=True):
        _save_filled(painter, value, path)
    newest = own_courses.load_newest(plan, tmp_path)
    assert (newest.unet.conv_in.weight == 3).all()
    own = painter.text_encoder.state_dict()
    assert all((t == own[name]).all() for name, t in newest.text_encoder.state_dict().items())
    _save_filled(painter, 7, own_courses.endings_checkpoint(tmp_path))
    assert (own_courses.load_newest(plan, tmp_path).unet.conv_in.weight == 7).all()


def test_fresh_noise_changes_half_of_the_latents_and_keeps_their_noise_level() -> None:
    wanted = torch.rand(400, 4, 16, 16)
    met = wanted + 0.25 * torch.randn_like(wanted)
    fresh = endings.with_fresh_noise(met, wanted, torch.tensor(0.25))
    is_new = (fresh != met).flatten(1).any(1)
    assert 0.4 < is_new.float().mean() < 0.6
    assert 0.24 < (fresh - wanted).std() < 0.26
    kept = torch.corrcoef(
        torch.stack([(fresh - wanted)[is_new].ravel(), (met - wanted)[is_new].ravel()])
    )
    assert 0.7 < kept[0, 1] < 0.95


def test_a_picture_whose_last_steps_are_painted_again_stays_the_same(tmp_path: Path) -> None:
    """The noise of the sampler's last steps is too weak to change the picture."""
    adopt(WEIGHTS, TrainingPlan(), tmp_path)
    plan = replace(TrainingPlan(), pictures=2)
    data, painter = encode_pictures(plan, tmp_path, "cpu"), own_courses.load_newest(plan, tmp_path)
    load_latest(painter, tmp_path / "unet.pt")
    begun = data.latents.float() * data.scale
    course = [*paint(painter, begun, data.tokens, data.tokens_2, torch.ones(2, 1, 1, 1), 16)]
    assert len(course) == 5
    assert (course[-1] - begun).square().mean().sqrt() < 0.2 < (course[0] - begun).std()
