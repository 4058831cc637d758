"""A fact in specs.py is stated nowhere else, so a changed word there changes everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sdxl.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
OLD, NEW = '"cache_hidden"', '"deep_features"'
RUN = """
import json, sys
from pathlib import Path
from engines.folders.export_folder import ExportFolder
from engines.onnxruntime_engine import load_onnxruntime
from engines.pytorch.torch_engine import load_torch
from engines.parity.findings import psnr
from sdxl.checkpoint import find
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

model, folder = sys.argv[1:]
export = ExportFolder.open(Path(folder))
checkpoint = find(model)
params = [GenerationParams("a ring", steps=4, cache_interval=2, seed=0)]
ours, theirs = (
    Pipeline(checkpoint, engines).generate(params)[0].image
    for engines in (load_onnxruntime(export), load_torch(checkpoint, device="cpu"))
)
names = [tensor.name for tensor in export.specs["unet_shallow"].inputs]
print(json.dumps({"names": names, "psnr": psnr(ours, theirs)}))
"""


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with one word changed."""
    root = tmp_path_factory.mktemp("renamed")
    for package in ("sdxl", "engines", "onnx_export"):
        ignored = shutil.ignore_patterns("__pycache__", "weights", "onnx")
        shutil.copytree(ROOT / package, root / package, ignore=ignored)
    specs = root / "sdxl" / "specs.py"
    text = specs.read_text()
    assert text.count(OLD) == 1
    specs.write_text(text.replace(OLD, NEW))
    return root


def run(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root), "SDXL_HOME": str(root / "home")}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_a_renamed_tensor_is_exported_built_and_run(renamed: Path, tiny: Checkpoint) -> None:
    model, folder, plans = str(tiny.folder), str(renamed / "export"), str(renamed / "plans")
    sdxl = ("-m", "sdxl.cli")
    run(renamed, *sdxl, "export", "--model", model, "--out", folder, "--unchecked")
    found = json.loads(run(renamed, "-c", RUN, model, folder))
    assert "deep_features" in found["names"] and "cache_hidden" not in found["names"]
    assert found["psnr"] >= 45, f"{found['psnr']:.1f} dB, needed 45"
    if find_spec("tensorrt_rtx"):
        target = ("--gpu", "l40s", "--backend", "tensorrt-rtx", "--max-batch", "1")
        run(renamed, *sdxl, "build", "--onnx", folder, "--out", plans, *target)
        manifest = (Path(plans) / "manifest.json").read_text()
        assert "deep_features" in manifest and "cache_hidden" not in manifest
