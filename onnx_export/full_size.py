"""`make full-size`: what the real size costs here, in seconds, memory and disk, as a table.

Writes a random-weight Stable Diffusion XL, exports it in fp16 and builds plans for an L40S with
TensorRT-RTX, which needs no GPU for that. Each step is a process of its own, whose peak memory the
kernel reports. A step whose folder is there is not taken again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MIB, GIB = 2**20, 2**30
GPU, BACKEND, PRECISION = "l40s", "tensorrt-rtx", "fp16"


class StepFailed(RuntimeError):
    """A step that ended with an error."""


@dataclass(frozen=True)
class StepCost:
    step: str
    seconds: float
    peak_bytes: int
    """of the largest process"""
    files: dict[str, int]
    """bytes by name, of what the step wrote"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="onnx_export.full_size", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/full-size"))
    parser.add_argument("--max-batch", type=int, default=1, help="of the plans")
    options = parser.parse_args()
    try:
        print(table([measure(*step) for step in steps(options.out, options.max_batch)]))
    except StepFailed as error:
        raise SystemExit(f"full-size: {error}") from None


def steps(out: Path, max_batch: int) -> list[tuple[str, list[str], Path]]:
    """What to run, and the folder that it makes."""
    model, onnx, plans = out / "model", out / f"onnx-{PRECISION}", out / f"plans-{GPU}"
    sdxl = ["-m", "sdxl.cli"]
    exported = ["--model", str(model), "--precision", PRECISION, "--out", str(onnx)]
    built = ["--onnx", str(onnx), "--gpu", GPU, "--backend", BACKEND, "--out", str(plans)]
    return [
        ("random weights", ["-m", "onnx_export.random_weights", str(model)], model),
        # Unchecked: torch and ONNX Runtime each hold it in float32 on a CPU.
        ("export", [*sdxl, "export", *exported, "--unchecked"], onnx),
        ("build", [*sdxl, "build", *built, "--max-batch", str(max_batch)], plans),
    ]


def measure(step: str, arguments: list[str], folder: Path) -> StepCost:
    if folder.exists():
        print(f"{step}: {folder} is there")
        return StepCost(step, 0.0, 0, sizes(folder))
    print(f"{step}: {folder}", flush=True)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise StepFailed(f"{step} ended with {process.returncode}")
    return StepCost(step, time.perf_counter() - start, usage.ru_maxrss * 1024, sizes(folder))


def sizes(folder: Path) -> dict[str, int]:
    """A link to the checkpoint's file counts where it was first."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".onnx", ".plan")
    }


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
