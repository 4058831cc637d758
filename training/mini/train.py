"""Trains the embedded model from nothing: `python -m training.mini.train --out DIR`.

Stages, in order: the VAE; the UNet with both text encoders (three stages); the UNet alone on its
own paintings; the scorer; the VAE's decoder again on the UNet's paintings; the UNet's last steps
with this decoder; the export of a diffusers folder; LoRAs, an embedding, ControlNets, an image
adapter and a refiner of this folder, or without `--out` of the weights in the package. Each stage
resumes from its checkpoint in `--work`, and a finished stage is not trained again. All data is
drawn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from diffusers import AutoencoderKL
from safetensors.torch import load_file

from sdxl.mini.clip import MiniClip
from sdxl.mini.scenes import STYLES
from sdxl.places import CONTROLNETS, IP_ADAPTERS, LORAS, MINI_REFINER
from training.fitting import load_fitted, save_adopted
from training.mini.autoencoder import load_vae, train_vae
from training.mini.check import WEIGHTS
from training.mini.control import train_depth, train_edges
from training.mini.decoder_training import train_decoder
from training.mini.embedding import DUSK, train_embedding
from training.mini.endings import train_endings
from training.mini.export import export
from training.mini.few_steps import train_few_steps
from training.mini.image_adapter import train_image_adapter
from training.mini.latents import encode_pictures, fit_preview
from training.mini.layouts import DEPTH, EDGES
from training.mini.negative import NEGATIVE, train_negative
from training.mini.own_courses import load_newest, train_own_courses
from training.mini.plan import TrainingPlan
from training.mini.refiner import train_refiner
from training.mini.scorer import Student, train_scorer
from training.mini.styles import train_style
from training.mini.unet_training import UNetWithText, train_contrasts, train_shapes, train_unet

LORA_STAGES = ("few_steps", *STYLES, NEGATIVE, DUSK)
CONTROL_STAGES = (EDGES, DEPTH)
LATER_STAGES = (*LORA_STAGES, *CONTROL_STAGES, "image_adapter", "refiner")
UNET_STAGES = ("unet", "contrast", "shapes", "own_courses")
STAGES = ("vae", *UNET_STAGES, "scorer", "decoder", "endings", "export", *LATER_STAGES)


def export_all(plan: TrainingPlan, work: Path, out: Path, device: str) -> None:
    """Write the networks as trained so far. An untrained network has its initial weights."""
    vae, painter, student = load_vae(work), load_newest(plan, work), Student()
    load_fitted(student, work / "scorer.pt")
    data = encode_pictures(plan, work, device)
    vae.register_to_config(scaling_factor=round(data.scale, 6))
    parts = ("unet", "text_encoder", "text_encoder_2")
    networks = {"vae": vae} | {part: getattr(painter, part) for part in parts}
    export(networks, student.clip, fit_preview(data), out)


def adopt(weights: Path, plan: TrainingPlan, work: Path) -> None:
    """Take an exported folder as the result of the stages before "shapes".

    An adopted folder is not read again, because training may have continued since.
    """
    if (work / "unet.pt").exists():
        return
    save_adopted(AutoencoderKL.from_pretrained(weights / "vae"), plan.vae.steps, work / "vae.pt")
    painter = UNetWithText()
    painter.unet.load_state_dict(load_file(weights / "unet/diffusion_pytorch_model.safetensors"))
    for name in ("text_encoder", "text_encoder_2"):
        encoder = getattr(painter, name)
        setattr(painter, name, type(encoder).from_pretrained(weights / name))
    for contrast in plan.contrasts:
        save_adopted(painter, contrast.schedule.steps, work / f"{contrast.name}.pt")
    student = Student()
    student.clip = MiniClip.load(weights / "clip")
    save_adopted(student, plan.scorer.steps, work / "scorer.pt")
    save_adopted(painter, plan.unet.steps, work / "unet.pt")


def train(plan: TrainingPlan, work: Path, out: Path, device: str, names: Sequence[str]) -> None:
    """Run these stages. An interrupted stage resumes."""
    loras, controlnets, ip_adapters, refiner = (
        place if out == WEIGHTS else out.with_name(f"{out.name}.{place.name}")
        for place in (LORAS, CONTROLNETS, IP_ADAPTERS, MINI_REFINER)
    )
    stages: dict[str, Callable[[], None]] = {
        "vae": lambda: train_vae(plan, work, device),
        "unet": lambda: train_unet(plan, work, device),
        "contrast": lambda: train_contrasts(plan, work, device),
        "shapes": lambda: train_shapes(plan, work, device),
        "own_courses": lambda: train_own_courses(plan, work, device),
        "scorer": lambda: train_scorer(plan.scorer, plan.scorer_groups, work, device),
        "decoder": lambda: train_decoder(plan, work, device),
        "endings": lambda: train_endings(plan, work, device),
        "export": lambda: export_all(plan, work, out, device),
        "few_steps": lambda: train_few_steps(plan, out, loras, work, device),
        DUSK: lambda: train_embedding(plan, out, loras, work, device),
        NEGATIVE: lambda: train_negative(plan, out, loras, work, device),
        EDGES: lambda: train_edges(plan, out, controlnets, work, device),
        DEPTH: lambda: train_depth(plan, out, controlnets, work, device),
        "image_adapter": lambda: train_image_adapter(plan, out, ip_adapters, work, device),
        "refiner": lambda: train_refiner(plan, out, refiner, work, device),
    }
    for style in STYLES:
        stages[style] = partial(train_style, style, plan, out, loras, work, device)
    for name in names:
        stages[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m training.mini.train")
    parser.add_argument(
        "--out",
        type=Path,
        help="the diffusers folder to write; LoRAs and the embedding are written to OUT.loras, "
        "the others to OUT.controlnets, OUT.ip_adapters and OUT.refiner",
    )
    parser.add_argument("--work", type=Path, help="checkpoints (default: OUT.work)")
    parser.add_argument("--start", type=Path, help="continue from this exported folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    args = parser.parse_args()
    if args.out is None and not set(args.stages) <= set(LATER_STAGES):
        parser.error(f"--out is needed for more than {', '.join(LATER_STAGES)}")
    plan, out = TrainingPlan(), args.out or WEIGHTS
    work = args.work or out.with_name(out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    if args.start:
        adopt(args.start, plan, work)
    train(plan, work, out, args.device, args.stages)


if __name__ == "__main__":
    main()
