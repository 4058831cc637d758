"""Cause the messages of docs/troubleshooting.md about models and engines, with doubles of GPUs and
TensorRT.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engines import choice
from engines.choice import EngineRequest, choose_engines
from engines.folders.places import export_place
from engines.folders.targets import TARGETS
from engines.pytorch import torch_engine
from engines.trt import build
from sdxl import cli
from sdxl.checkpoint import MINI, Checkpoint
from sdxl.images import BrokenImage, to_pixels
from tests.documents import ROOT
from tests.engines.fake_builds import FakeWorker, order_of, proven
from tests.engines.tiny_export import DIGEST, write_export
from tests.fakes import fake_engines
from tests.sdxl.single_files import write_single_file

TOOLS = ("bash", "cat", "cksum", "cut", "grep", "sed", "test", "tr", "echo")
"""Programs that `make setup` calls before it finds Python."""


@dataclass
class Trouble:
    """A folder and pytest's fixtures, for a function that causes a message."""

    folder: Path
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]
    log: pytest.LogCaptureFixture

    def error_of(self, *argv: str) -> str:
        """Run a command that fails; return its error output."""
        assert cli.main(argv) != 0
        return self.capture.readouterr().err

    def render(self, *flags: str) -> str:
        return self.error_of("render", "a ring", *flags, "--out", str(self.folder / "out.png"))

    def file(self, name: str, content: bytes = b"") -> str:
        (self.folder / name).write_bytes(content)
        return str(self.folder / name)

    def single_file(self, *tensors: str) -> str:
        save_file({name: torch.zeros(1) for name in tensors}, self.folder / "a.safetensors")
        return str(self.folder / "a.safetensors")


Cause = Callable[[Trouble], str]


# -- installing -----------------------------------------------------------------------------


def without_python(trouble: Trouble) -> str:
    programs = trouble.folder / "bin"
    programs.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    make = shutil.which("make")
    assert make
    command = [make, "setup", f"VENV={trouble.folder / 'venv'}"]
    environment = {"PATH": str(programs)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode and not (trouble.folder / "venv").exists()
    return done.stderr


def on_no_gpu(trouble: Trouble) -> str:
    with_gpu(trouble, None)
    return trouble.render("--backend", "tensorrt")


# -- models ---------------------------------------------------------------------------------


def without_vae(trouble: Trouble) -> str:
    file = write_single_file(MINI, trouble.folder / "a.safetensors", without=["vae"])
    return trouble.render("--model", str(file))


def from_no_hub(trouble: Trouble) -> str:
    trouble.patch.setenv("HF_HUB_OFFLINE", "1")
    return trouble.render("--model", "some/model")


# -- engines --------------------------------------------------------------------------------


def with_gpu(trouble: Trouble, name: str | None) -> None:
    trouble.patch.setattr(choice, "local_target", lambda: name and TARGETS[name])


def refusal_of_engines(
    trouble: Trouble, backend: str, folder: Path | None = None, precision: str | None = None
) -> str:
    """Return why no engines were found for a model of this digest."""
    trouble.patch.setattr(choice, "model_digest", lambda checkpoint: DIGEST)
    checkpoint = Checkpoint("tiny", trouble.folder / "none")
    request = EngineRequest("some/model", checkpoint, precision=precision, folder=str(folder or ""))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        choose_engines(request, backend)
    return str(caught.value)


def without_plans(trouble: Trouble) -> str:
    with_gpu(trouble, "h100")
    return trouble.render("--backend", "tensorrt")


def with_plans_of_another_gpu(trouble: Trouble) -> str:
    trouble.patch.setattr(build, "run_worker", FakeWorker())
    export = write_export(trouble.folder / "export")
    build.build(order_of(export, trouble.folder / "plans"), prove=proven)
    with_gpu(trouble, "h100")
    return refusal_of_engines(trouble, "tensorrt-rtx", trouble.folder / "plans")


def with_engines_of_another_model(trouble: Trouble) -> str:
    write_export(trouble.folder / "export", digest="e" * 64)
    return refusal_of_engines(trouble, "onnxruntime", trouble.folder / "export")


def without_check(trouble: Trouble) -> str:
    export = write_export(trouble.folder / "export")
    replace(export, parity={"findings": [], "note": "no check"}).write()
    return refusal_of_engines(trouble, "onnxruntime", trouble.folder / "export")


def without_check_in_torch(trouble: Trouble) -> str:
    export = write_export(export_place("tiny", DIGEST, "int8"))
    replace(export, precision="int8").write()
    return refusal_of_engines(trouble, "torch", precision="int8")


def on_torch_instead(trouble: Trouble) -> str:
    trouble.patch.setattr(choice, "model_digest", lambda checkpoint: DIGEST)
    trouble.patch.setattr(torch_engine, "load_torch", lambda *args, **options: fake_engines())
    with_gpu(trouble, "l40s")
    choose_engines(EngineRequest("some/model", Checkpoint("tiny", trouble.folder)), "auto")
    return trouble.log.text


def with_overflow(_: Trouble) -> str:
    with pytest.raises(BrokenImage) as caught:
        to_pixels(torch.full((3, 8, 8), torch.nan, dtype=torch.float16))
    return str(caught.value)


LOCAL: dict[str, Cause] = {
    "Python 3.11 or newer": without_python,
    "needs an NVIDIA GPU": on_no_gpu,
    "must be 'mini'": lambda t: t.render("--model", "x"),
    "no model_index.json": lambda t: t.render("--model", str(t.folder)),
    "pickle weights": lambda t: t.render("--model", t.file("a.ckpt")),
    "is Stable Diffusion 1": lambda t: t.render(
        "--model", t.single_file("cond_stage_model.transformer.a", "first_stage_model.a")
    ),
    "holds no VAE": without_vae,
    "not a whole safetensors": lambda t: t.render("--model", t.file("a.safetensors", b"cut off")),
    "nor could be fetched": from_no_hub,
    "no fp16 export": lambda t: refusal_of_engines(t, "onnxruntime", precision="fp16"),
    "has no engines to run": without_plans,
    "built for a L40S": with_plans_of_another_gpu,
    "of the weights": with_engines_of_another_model,
    "published without a check": without_check,
    "PyTorch's own 8 bits": without_check_in_torch,
    "runs on torch": on_torch_instead,
    "the decoder overflowed": with_overflow,
}
