"""docs/deploy.md: the `console` commands run with a small stand-in for SDXL."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel

from engines.folders.targets import GIB_PER_IMAGE, TARGETS
from eval.quality.captions import scene_captions
from eval.quality.inception import Inception
from eval.quality.protocol import INCEPTION_WIDTH
from sdxl.checkpoint import MINI
from sdxl.files import grant_usual
from sdxl.presets import FILE
from serve.cli import read_settings
from tests.documents import ROOT, calls_of_sdxl, commands, shell_commands
from tests.isolation import run_alone

DOCUMENT = ROOT / "docs" / "deploy.md"
STAND_IN = "--width 128 --height 128 --steps 4 --count 8"
"""Flags that make the evaluation fit a small model."""


def test_the_page_names_only_settings_that_exist() -> None:
    for command, *flags in calls_of_sdxl([*commands(DOCUMENT), *shell_commands(DOCUMENT)]):
        if command == "serve":
            assert read_settings(flags).model == "models/sdxl"


def test_the_gpus_that_it_lists_are_those_that_engines_are_built_for() -> None:
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\w+) \|$", DOCUMENT.read_text(), re.M)
    assert rows == [
        (each.name, str(each.memory_gib), str(each.max_batch), each.precision)
        for each in TARGETS.values()
    ]
    assert f"one for each {GIB_PER_IMAGE} GiB | fp16" in DOCUMENT.read_text()


# -- the stand-in ---------------------------------------------------------------------------


def write_foreign_model(folder: Path, factor: float = 1.001) -> None:
    """Write the embedded model by another name, with other weights and without presets."""
    shutil.copytree(MINI, folder)
    (folder / FILE).unlink()
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    changed = {name: tensor * factor for name, tensor in load_file(weights).items()}
    save_file(changed, weights)
    grant_usual(weights)


def write_benchmark_files(folder: Path) -> None:
    """Write files with the names of `sdxl eval fetch` and random content."""
    folder.mkdir()
    lines = ["caption", *scene_captions(8)]
    (folder / "captions_source.tsv").write_text("\n".join(lines) + "\n")
    mean, covariance = np.zeros(INCEPTION_WIDTH), np.eye(INCEPTION_WIDTH)
    np.savez(folder / "val2014.npz", mu=mean, sigma=covariance)
    torch.manual_seed(0)
    torch.save(Inception().state_dict(), folder / "pt_inception-2015-12-05-6726825d.pth")
    clip = folder / "clip-vit-base-patch32"
    CLIPModel(CLIPConfig(projection_dim=512)).save_pretrained(clip)
    shutil.copytree(MINI / "tokenizer", clip, dirs_exist_ok=True)


def as_run(line: str) -> str:
    return line.replace(" --out scores", f" {STAND_IN} --out scores")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_command_works_in_an_empty_folder_with_a_foreign_checkpoint(tmp_path: Path) -> None:
    write_foreign_model(tmp_path / "models" / "sdxl")
    write_benchmark_files(tmp_path / "mlperf")
    (tmp_path / "prompts.txt").write_text("a red circle\na green star\na red circle\n")
    own = f"export SDXL_HOME=/mnt/home SDXL_SHUTDOWN_S=200 PYTHONPATH={ROOT}"
    done = run_alone("\n".join(["set -x", own, *map(as_run, commands(DOCUMENT))]), tmp_path, 7000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert "3 rows: 3 pictures, 0 dead letters, no problems" in done.stdout
    assert len(list((tmp_path / "through" / "images").rglob("*.png"))) == 3
