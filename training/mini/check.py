"""Measures the embedded model: `python -m training.mini.check` prints its figures.

Questions about pictures of held-out captions: Does a picture's caption rank first among 20? Do the
pixels show the stated colours, places and counts? Are the shapes right? Is the background clean?
Drawn originals test the judges; originals passed once through the VAE test the VAE.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import AutoencoderKL, StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

from sdxl.canny import Pixels
from sdxl.mini.clip import Scorer, pixels_of
from sdxl.mini.scenes import Image, Scene, caption, draw, sample_scene
from sdxl.params import REFINER_SWITCH_AT, GenerationParams
from sdxl.places import MINI
from serve.render.contact_sheet import contact_sheet
from training.mini.judge import faults, shape_overlaps, specks, straighten
from training.mini.lora import add_lora
from training.mini.neighbours import distractors
from training.mini.painting import to_images

WEIGHTS = MINI
GOOD_SHAPE = 0.95
STEPS, GUIDANCE = 20, GenerationParams().guidance
_SEED, _BATCH = 2024, 20


@dataclass(frozen=True)
class PictureVerdict:
    """The scorer's and the pixel judge's results for one picture."""

    scene: Scene
    is_first: bool
    fault: str
    overlap: float  # IoU of the worst shape with the ideal
    specks: int


def held_out_scenes(count: int, seed: int = _SEED) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [sample_scene(rng, held_out=True) for _ in range(count)]


def load_painter(weights: Path = WEIGHTS, lora: str | None = None) -> Any:
    """Load the model in diffusers, with a LoRA of the package if one is named."""
    pipe = StableDiffusionXLPipeline.from_pretrained(
        weights, torch_dtype=torch.float32, add_watermarker=False
    )
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        add_lora(pipe, lora)
    return pipe


def load_refiner(folder: Path, pipe: Any) -> Any:
    """Load a refiner in diffusers, for the latents of `pipe`."""
    refiner = StableDiffusionXLImg2ImgPipeline.from_pretrained(
        folder, vae=pipe.vae, torch_dtype=torch.float32, add_watermarker=False
    )
    refiner.set_progress_bar_config(disable=True)
    return refiner


def paint_with(
    pipe: Any,
    prompts: Sequence[Scene | str],
    guidance: float = GUIDANCE,
    steps: int = STEPS,
    is_trailing: bool = False,
    first_seed: int = 0,
    refiner: Any = None,
    maps: Sequence[Pixels] = (),
    **options: Any,
) -> list[Image]:
    """Paint one picture for each prompt, from noise with the prompt's number as seed. A refiner
    does the last steps; a ControlNet of the pipeline needs maps."""
    spacing = "trailing" if is_trailing else "leading"
    pipe.scheduler = type(pipe.scheduler).from_config(
        pipe.scheduler.config, timestep_spacing=spacing
    )
    common: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance}
    base: dict[str, Any] = {"output_type": "np", **options}
    if refiner is not None:
        refiner.scheduler = pipe.scheduler
        base |= {"output_type": "latent", "denoising_end": REFINER_SWITCH_AT}
    images: list[Image] = []
    for start in range(0, len(prompts), _BATCH):
        batch = slice(start, start + _BATCH)
        texts = [each if isinstance(each, str) else caption(each) for each in prompts[batch]]
        seeds = [torch.Generator().manual_seed(first_seed + start + i) for i in range(len(texts))]
        if maps:
            base["image"] = [PIL.Image.fromarray(each).convert("RGB") for each in maps[batch]]
        painted = pipe(texts, generator=seeds, **common, **base).images
        if refiner is not None:
            rest = {"image": painted, "denoising_start": REFINER_SWITCH_AT}
            painted = refiner(texts, output_type="np", **common, **rest).images
        images += list((painted * 255 + 0.5).astype(np.uint8))
    return images


@torch.no_grad()
def pass_through_vae(images: list[Image], weights: Path = WEIGHTS) -> list[Image]:
    """Encode and decode the pictures. No UNet could paint better ones."""
    vae = AutoencoderKL.from_pretrained(weights / "vae").float()
    returned: list[Image] = []
    for start in range(0, len(images), _BATCH):
        pixels = pixels_of(np.stack(images[start : start + _BATCH]))
        returned += to_images(vae, vae.encode(pixels).latent_dist.mean)
    return returned


def psnr(originals: list[Image], images: list[Image]) -> float:
    """Return the pictures' mean PSNR in dB."""
    errors = (np.stack(originals) / 255.0 - np.stack(images) / 255.0) ** 2
    return float(np.mean(-10 * np.log10(errors.mean((1, 2, 3)))))


def psnr_of_straightened(scenes: list[Scene], images: list[Image]) -> float:
    """Return the mean PSNR in dB of pictures without faults to the same pictures with ideal
    shapes."""
    pairs = [
        (straight.picture, image)
        for scene, image in zip(scenes, images, strict=True)
        if (straight := straighten(image, scene)) is not None
    ]
    return psnr([ideal for ideal, _ in pairs], [image for _, image in pairs])


def judge_all(scenes: list[Scene], images: list[Image], scorer: Scorer) -> list[PictureVerdict]:
    rng = np.random.default_rng(_SEED)
    verdicts = []
    for scene, image in zip(scenes, images, strict=True):
        texts = [caption(s) for s in (scene, *distractors(scene, rng))]
        fault = "; ".join(faults(image, scene))
        overlap = min(shape_overlaps(image, scene))
        scores = scorer.text_features(texts) @ scorer.image_features(image[None])[0]
        is_first = bool((scores <= scores[0]).all())
        verdicts.append(PictureVerdict(scene, is_first, fault, overlap, specks(image)))
    return verdicts


def report(title: str, verdicts: list[PictureVerdict]) -> None:
    kinds = defaultdict(list)
    for verdict in verdicts:
        kinds[verdict.scene.kind].append(verdict)
    for kind, group in {**kinds, "all": verdicts}.items():
        first = np.mean([v.is_first for v in group])
        right = np.mean([not v.fault for v in group])
        wrong = Counter(v.fault.split(":")[0] for v in group if v.fault)
        overlaps = np.array([v.overlap for v in group])
        clean = np.mean([not v.specks for v in group])
        shares = f"first {first:6.1%}  pixels {right:6.1%}  no speck {clean:6.1%}"
        shares += (
            f"  shape median {np.median(overlaps):.3f}, good {(overlaps >= GOOD_SHAPE).mean():6.1%}"
        )
        print(f"{title:9} {kind:6} n={len(group):3}  {shares}  {dict(wrong) or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m training.mini.check")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lora", help="name of a LoRA of the package")
    parser.add_argument("--refiner", type=Path, help="folder of a refiner for the last steps")
    parser.add_argument("--trailing", action="store_true", help="begin at the last timestep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first picture")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet (PNG) here")
    parser.add_argument("--faults", action="store_true", help="list the faults")
    args = parser.parse_args()
    scenes, scorer = held_out_scenes(args.count), Scorer(args.weights / "clip")
    drawn = [draw(scene, 10_000 + i) for i, scene in enumerate(scenes)]
    report("drawn", judge_all(scenes, drawn, scorer))
    returned = pass_through_vae(drawn, args.weights)
    report("VAE", judge_all(scenes, returned, scorer))
    print(f"VAE       {psnr(drawn, returned):.2f} dB")
    pipe = load_painter(args.weights, args.lora)
    refiner = load_refiner(args.refiner, pipe) if args.refiner else None
    images = paint_with(pipe, scenes, args.guidance, args.steps, args.trailing, args.seed, refiner)
    verdicts = judge_all(scenes, images, scorer)
    report("generated", verdicts)
    print(f"generated {psnr_of_straightened(scenes, images):.2f} dB to the same with ideal shapes")
    if args.faults:
        for i, v in enumerate(verdicts):
            if v.fault or not v.is_first:
                print(i, caption(v.scene), "" if v.is_first else "[not first]", v.fault, sep=" | ")
    if args.sheet:
        pairs = list(zip(images, map(caption, scenes), strict=True))
        PIL.Image.fromarray(contact_sheet(pairs)).save(args.sheet)


if __name__ == "__main__":
    main()
