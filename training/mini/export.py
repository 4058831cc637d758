"""Writes trained networks as one small diffusers folder, which replaces the old one as a whole.

UNet, VAE and scorer are stored as fp16, text encoders as fp32: transformers keeps the stored dtype,
and every step reads their output. diffusers loads the folder in fp16 or fp32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engines.folders.publishing import publish
from sdxl.files import grant_usual, write_json
from sdxl.mini.clip import MiniClip
from sdxl.mini.scenes import SIDE
from sdxl.single_file.configs import END
from training.mini.topology import new_scheduler
from training.mini.vocabulary import write_tokenizer

_INDEX = {
    "_class_name": "StableDiffusionXLPipeline",
    "force_zeros_for_empty_prompt": True,
    "add_watermarker": None,
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "image_encoder": [None, None],
    "feature_extractor": [None, None],
}
_PREPROCESSING = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": SIDE},
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "do_convert_rgb": True,
    "resample": 3,
}


def _write_scheduler(folder: Path) -> None:
    """Write the scheduler with the entries for other solvers that SDXL's file has. Without them,
    diffusers' DDIM would clip latents like pixels."""
    new_scheduler().save_pretrained(folder)
    path = folder / "scheduler_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "clip_sample": False, "set_alpha_to_one": False}, indent=2)


def export(
    networks: Mapping[str, Any], scorer: MiniClip, preview: Mapping[str, object], out: Path
) -> None:
    """Write beside `out` and then swap, so that a reader never finds half a model."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, network in networks.items():
        is_half = name in ("vae", "unet")
        network.to(torch.float16 if is_half else torch.float32).save_pretrained(fresh / name)
        network.float()
    name_as_sdxl(fresh / "text_encoder")
    name_as_sdxl(fresh / "text_encoder_2")
    scorer.save(fresh / "clip")
    write_tokenizer(fresh / "tokenizer", END)
    write_tokenizer(fresh / "tokenizer_2", "!")
    write_tokenizer(fresh / "clip", END)
    _write_scheduler(fresh / "scheduler")
    write_json(fresh / "model_index.json", _INDEX, indent=2)
    write_json(fresh / "clip/vision/preprocessor_config.json", _PREPROCESSING, indent=2)
    write_json(fresh / "preview.json", preview, indent=2)
    for weights in fresh.rglob("*.safetensors"):
        grant_usual(weights)
    publish(fresh, out)


def name_as_sdxl(folder: Path) -> None:
    """Name a text encoder's tensors as in SDXL and older versions. transformers 5 omits the
    prefix."""
    path = folder / "model.safetensors"
    tensors = {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": t
        for name, t in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
