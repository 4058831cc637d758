"""`make full-size`: what the real size costs here, in seconds, memory and disk, and how near 8 bits
come to float32, as a table.

Writes a random-weight Stable Diffusion XL and, in each precision, exports and checks it (a deep and
a shallow step of one picture, against the model in PyTorch) and builds plans with TensorRT-RTX,
which needs no GPU for that: all for an L40S, as they are served there, and the largest for other
architectures. Each step is a process of its own, whose peak memory the kernel reports. A step that
is done is not taken again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.folders.export_folder import ExportFolder
from engines.folders.targets import TARGETS
from engines.parity.bounds import EIGHT_BIT_NETWORKS, STEP_BOUNDS
from engines.parity.calls import StepError, worst
from engines.trt.flavours import TENSORRT_RTX
from onnx_export.recipes import RECIPES

MIB, GIB = 2**20, 2**30
GPU = "l40s"
SERVED = TARGETS[GPU].max_batch
LARGEST, OTHERS = "unet_deep", ("SM120",)
PRECISIONS = ("fp16", *RECIPES)
SIDE = 512
CALIBRATION = ("--calibration-count", "4", "--calibration-size", "256")
"""Half the arithmetic of two prompts at 512²; the check's prompt and size are not among them."""
PICTURE = ("--check-prompts", "1", "--check-steps", "2", "--check-size", str(SIDE))
NOISE_BOUNDS = STEP_BOUNDS
"""of the noise that a deep and a shallow step find, as relative L2 from float32"""


class StepFailed(RuntimeError):
    """A step that ended with an error."""


@dataclass(frozen=True)
class FullSizeStep:
    """A process, and the folder that is there when it is done."""

    name: str
    arguments: Sequence[str]
    folder: Path


@dataclass(frozen=True)
class StepCost:
    step: str
    seconds: float
    peak_bytes: int
    """of the largest process"""
    files: dict[str, int] = field(default_factory=dict)
    """bytes by name, of what the step wrote"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="onnx_export.full_size", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/full-size"))
    parser.add_argument(
        "--max-batch",
        type=int,
        default=SERVED,
        metavar="N",
        help=f"images in one call (default: as an {TARGETS[GPU].name} is served, %(default)s)",
    )
    parser.add_argument(
        "--others",
        nargs="*",
        default=OTHERS,
        choices=TENSORRT_RTX.architectures,
        help=f"architectures that {LARGEST} alone is built for (default {' '.join(OTHERS)})",
    )
    parser.add_argument("--precision", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    options = parser.parse_args()
    try:
        taken = steps(options.out, options.max_batch, options.precision, options.others)
        print(table([measure(step) for step in taken]))
        for precision in options.precision:
            print(noise_errors(options.out / f"onnx-{precision}"))
    except StepFailed as error:
        raise SystemExit(f"full-size: {error}") from None


def steps(
    out: Path, max_batch: int, precisions: Sequence[str], others: Sequence[str]
) -> list[FullSizeStep]:
    model = out / "model"
    drawn = ("-m", "onnx_export.random_weights", str(model))
    found = [FullSizeStep("random weights", drawn, model)]
    for precision in precisions:
        onnx = out / f"onnx-{precision}"
        found.append(export_step(model, onnx, precision))
        found += build_steps(onnx, out, max_batch, precision, others)
    return found


def export_step(model: Path, onnx: Path, precision: str) -> FullSizeStep:
    calibration = CALIBRATION if precision in RECIPES else ()
    export = ("-m", "sdxl.cli", "export", "--model", str(model), "--precision", precision)
    flags = (*export, *calibration, *PICTURE, "--out", str(onnx))
    return FullSizeStep(f"{precision} export", flags, onnx)


def build_steps(
    onnx: Path, out: Path, max_batch: int, precision: str, others: Sequence[str]
) -> Iterator[FullSizeStep]:
    made = ("--onnx", str(onnx), "--max-batch", str(max_batch), "--out")
    plans = out / f"plans-{GPU}-{max_batch}-{precision}"
    build = ("-m", "sdxl.cli", "build", "--gpu", GPU, "--backend", TENSORRT_RTX.name)
    yield FullSizeStep(f"{precision} build", (*build, *made, str(plans)), plans)
    for sm in others:
        plan = out / f"plan-{sm.lower()}-{max_batch}-{precision}"
        alone = ("-m", "engines.trt.one_plan", "--network", LARGEST, "--sm", sm)
        yield FullSizeStep(f"{precision} {sm}", (*alone, *made, str(plan)), plan)


def measure(step: FullSizeStep) -> StepCost:
    if step.folder.exists():
        print(f"{step.name}: {step.folder} is there")
        return StepCost(step.name, 0.0, 0, sizes(step))
    print(f"{step.name}: {step.folder}", flush=True)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *step.arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise StepFailed(f"{step.name} ended with {process.returncode}")
    seconds = time.perf_counter() - start
    return StepCost(step.name, seconds, usage.ru_maxrss * 1024, sizes(step))


def sizes(step: FullSizeStep) -> dict[str, int]:
    """A link to the checkpoint's file counts where it was first."""
    return {
        str(path.relative_to(step.folder)): path.stat().st_size
        for path in sorted(step.folder.rglob("*"))
        if path.suffix in (".safetensors", ".onnx", ".plan")
    }


def noise_errors(onnx: Path) -> str:
    """The worst of each UNet; raises where one is beyond its bound."""
    export = ExportFolder.read(onnx)
    bound = NOISE_BOUNDS[export.precision]
    errors = [StepError(**error) for error in export.parity["step_errors"]]
    found = {n: worst(e.noise for e in errors if e.network == n) for n in EIGHT_BIT_NETWORKS}
    told = ", ".join(f"{name} {error:.4f}" for name, error in found.items())
    told = f"{export.precision}: noise at {SIDE}², relative L2 from float32: {told}; bound {bound}"
    if not all(error <= bound for error in found.values()):
        raise StepFailed(told)
    return told


def table(costs: list[StepCost]) -> str:
    lines = [f"{'step':<16}{'seconds':>9}{'peak GiB':>10}{'files GiB':>11}"]
    for cost in costs:
        total = sum(cost.files.values()) / GIB
        lines.append(
            f"{cost.step:<16}{cost.seconds:>9.0f}{cost.peak_bytes / GIB:>10.1f}{total:>11.2f}"
        )
        lines += [f"    {name:<52}{size / MIB:>10.1f} MiB" for name, size in cost.files.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
