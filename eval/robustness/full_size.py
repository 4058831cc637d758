"""`make full-size`: random-weight SDXL 1.0 through the whole product, on this machine.

It renders, serves, runs a batch job that is killed, exports and checks every precision, builds
plans with TensorRT-RTX (which needs no GPU) and renders with ONNX Runtime. Each step's time, memory
and results are recorded in full-size.json; rerun the same command to resume.
`python -m eval.robustness.full_size --model mini --side 128 --small-side 128` rehearses it in
minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from engines.folders.export_folder import ExportFolder
from engines.folders.targets import TARGETS
from engines.parity.bounds import EIGHT_BIT_NETWORKS, STEP_BOUNDS
from engines.parity.calls import StepError, worst
from engines.trt.flavours import TENSORRT_RTX
from eval.measuring.system_description import processor
from eval.robustness.processes import repeating
from eval.service.client import local_service, metric_values
from eval.service.load import GENERATE
from onnx_export.recipes import RECIPES
from sdxl.files import write_json

GIB = 2**30
TIMEOUT_S = 7200.0
"""for one picture of full size on a CPU"""
SERVE_FLAGS = ("--llm", "none", "--deadline-s", str(TIMEOUT_S), "--max-deadline-s", str(TIMEOUT_S))
PROMPT = "a lighthouse on a cliff at dusk"
PRECISIONS = ("fp16", *RECIPES)
GPU, LARGEST, OTHER_SMS = "l40s", "unet_deep", ("SM120",)
NOISE_BOUNDS = STEP_BOUNDS
"""of the noise of a deep and a shallow step, as relative L2 from float32"""


class StepFailed(RuntimeError):
    """A step failed, or its result is wrong."""


@dataclass
class FullSizeRun:
    out: Path
    model: str
    side: int
    small_side: int
    """of ONNX Runtime's picture, in pixels; half the side of an export's check"""
    precisions: Sequence[str] = PRECISIONS
    max_batch: int = TARGETS[GPU].max_batch
    other_sms: Sequence[str] = OTHER_SMS
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by step: seconds, the peak GiB of all its processes together (shared memory counts for
    each), and its results"""

    @property
    def file(self) -> Path:
        return self.out / "full-size.json"

    @property
    def folder(self) -> str:
        """The model's folder or name."""
        return self.model or str(self.out / "model")

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "side": self.side, "small_side": self.small_side}

    def run(self, steps: Mapping[str, Step]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            self._check(stored)
            self.done = stored["steps"]
        for name, step in steps.items():
            if name in self.done:
                print(f"{name}: done before", flush=True)
                continue
            print(f"{name} …", flush=True)
            began_s = time.perf_counter()
            with peak_memory() as peak:
                results = step(self)
            seconds = seconds_since(began_s)
            peak_gib = round(peak[0] / GIB, 2)
            self.done[name] = {"seconds": seconds, "peak_gib": peak_gib, "facts": results}
            report = {"cpu": processor(), **self.settings, "steps": self.done}
            write_json(self.file, report, end="")
            print(f"{name}: {seconds} s, {peak_gib} GiB {results or ''}", flush=True)

    def _check(self, stored: Mapping[str, Any]) -> None:
        for name, value in self.settings.items():
            if stored.get(name) != value:
                shown = f"{name} {stored.get(name)!r}, not {value!r}"
                raise StepFailed(f"{self.file} has {shown}; needed another --out")


Step = Callable[[FullSizeRun], dict[str, Any]]


def steps_of(run: FullSizeRun) -> dict[str, Step]:
    steps: dict[str, Step] = {
        "model": write_model,
        "render, one step": lambda run: render(run, 1),
        "render, two steps": lambda run: render(run, 2),
        "serve": serve,
        "batch": batch,
    }
    for precision in run.precisions:
        steps[f"export, {precision}"] = lambda run, p=precision: export(run, p)  # type: ignore[misc]
        steps[f"build, {precision}"] = lambda run, p=precision: build(run, p)  # type: ignore[misc]
    return {**steps, "onnxruntime": onnxruntime}


def write_model(run: FullSizeRun) -> dict[str, Any]:
    if not run.model:
        run_python("-m", "onnx_export.random_weights", run.folder)
    return {}


def render(run: FullSizeRun, steps: int) -> dict[str, Any]:
    out = run.out / f"render-{steps}"
    flags = ("--model", run.folder, "--backend", "torch", "--seed", "1", "--steps", str(steps))
    run_sdxl("render", PROMPT, *flags, *size_flags(run.side), "--out", str(out))
    return check_pictures(out, 1, run.side)


def serve(run: FullSizeRun) -> dict[str, Any]:
    """One picture, two at once, one streamed, one whose client disconnects; then SIGTERM."""
    began_s = time.perf_counter()
    flags = ("--model", run.folder, "--backend", "torch", *SERVE_FLAGS)
    results: dict[str, Any] = {}
    body = {"prompt": PROMPT, "steps": 2, "seed": 1, "size": f"{run.side}x{run.side}"}
    log = run.out / "serve.log"
    with local_service(flags, log) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        results["ready_s"] = seconds_since(began_s)
        for name, more in (("one_s", {}), ("two_s", {"n": 2})):
            began_s = time.perf_counter()
            answer = http.post(GENERATE, json={**body, **more})
            check(answer.status_code == 200, f"{name}: {answer.status_code} {answer.text[:300]}")
            check(len(answer.json()["data"]) == more.get("n", 1), f"{name}: too few pictures")
            results[name] = seconds_since(began_s)
        began_s, events = time.perf_counter(), []
        streamed = {**body, "stream": True, "partial_images": 1}
        with http.stream("POST", GENERATE, json=streamed) as response:
            events = [line[7:] for line in response.iter_lines() if line.startswith("event: ")]
        check(bool(events) and events[-1].endswith("completed"), f"streamed: {events}")
        results |= {"streamed_s": seconds_since(began_s), "events": events}
        results["cancelled_s"] = disconnect(http, body)
        ended_s = time.perf_counter()
    return {**results, "end_s": seconds_since(ended_s)}


def disconnect(http: httpx.Client, body: dict[str, Any]) -> float:
    """Disconnect in the middle of a picture. Return the seconds until nothing runs."""
    # Without progress events the first line would come with the picture.
    long = {**body, "steps": 50, "stream": True, "progress": True}
    with http.stream("POST", GENERATE, json=long) as response:
        check(response.status_code == 200, f"disconnect: {response.status_code}")
        next(response.iter_lines())
    began_s = time.perf_counter()
    while sum(metric_values(http.get("/metrics").text, "sdxl_images_running")):
        check(time.perf_counter() - began_s < TIMEOUT_S, "a cancelled picture still runs")
        time.sleep(0.2)
    return seconds_since(began_s)


def batch(run: FullSizeRun) -> dict[str, Any]:
    """Kill a job of four rows after its first picture; a second start makes only the rest."""
    source, out = run.out / "rows.txt", run.out / "batch"
    source.write_text("".join(f"{PROMPT}, number {i}\n" for i in range(4)), encoding="utf-8")
    flags = ["--out", str(out), "--model", run.folder, "--backend", "torch", "--steps", "1"]
    flags += (*size_flags(run.side), "--shard-size", "1", "--stall-s", str(TIMEOUT_S), "--quiet")
    job = ("batch", str(source), *flags)
    with (run.out / "batch.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "sdxl.cli", *job], stdout=log, stderr=log)
    while not (pictures := sorted(out.glob("images/*/*.png"))) and process.poll() is None:
        time.sleep(0.2)
    before = {path: path.read_bytes() for path in pictures}
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_sdxl(*job)
    run_sdxl("batch", "--verify", str(out))
    is_unchanged = bool(before) and all(p.read_bytes() == data for p, data in before.items())
    check(is_unchanged, "the second start made a finished picture again")
    pictures = sorted(out.glob("images/*/*.png"))
    check(len(pictures) == 4, f"{len(pictures)} pictures, needed 4")
    return {"made_before_the_kill": len(before)}


def export_of(run: FullSizeRun, precision: str) -> Path:
    return run.out / f"onnx-{precision}"


def export(run: FullSizeRun, precision: str) -> dict[str, Any]:
    """Export, checked on a deep and a shallow step of one picture."""
    out = export_of(run, precision)
    shutil.rmtree(out, ignore_errors=True)
    flags = ["--model", run.folder, "--precision", precision, "--out", str(out)]
    flags += ("--check-prompts", "1", "--check-steps", "2", "--check-size", str(2 * run.small_side))
    if precision in RECIPES:
        # Half the arithmetic of two prompts at 512², and other prompts than the check's.
        flags += ("--calibration-count", "4", "--calibration-size", str(run.small_side))
    run_sdxl("export", *flags)
    return {"files": file_sizes(out), "noise": noise_errors(out)}


def noise_errors(onnx: Path) -> dict[str, float]:
    """The largest error of each UNet; raises if one is beyond its bound."""
    folder = ExportFolder.read(onnx)
    bound = NOISE_BOUNDS[folder.precision]
    errors = [StepError(**error) for error in folder.parity["step_errors"]]
    largest = {n: worst(e.noise for e in errors if e.network == n) for n in EIGHT_BIT_NETWORKS}
    shown = ", ".join(f"{name} {error:.4f}" for name, error in largest.items())
    check(
        all(error <= bound for error in largest.values()),
        f"{folder.precision}: noise, relative L2 from float32: {shown}; bound {bound}",
    )
    return largest


def build(run: FullSizeRun, precision: str) -> dict[str, Any]:
    """All plans for an L40S, and the largest one for other architectures."""
    out = run.out / f"plans-{precision}"
    shutil.rmtree(out, ignore_errors=True)
    flags = ("--onnx", str(export_of(run, precision)), "--max-batch", str(run.max_batch), "--out")
    backend = ("--gpu", GPU, "--backend", TENSORRT_RTX.name)
    out.mkdir()
    run_sdxl("build", *backend, *flags, str(out / GPU))
    for sm in run.other_sms:
        one = ("-m", "engines.trt.one_plan", "--network", LARGEST, "--sm", sm)
        run_python(*one, *flags, str(out / sm.lower()))
    return {"max_batch": run.max_batch, "files": file_sizes(out)}


def onnxruntime(run: FullSizeRun) -> dict[str, Any]:
    out = run.out / "render-onnxruntime"
    engines = ("--backend", "onnxruntime", "--engines", str(export_of(run, run.precisions[0])))
    flags = (*engines, *size_flags(run.small_side), "--steps", "2", "--out", str(out))
    run_sdxl("render", PROMPT, "--model", run.folder, *flags)
    return check_pictures(out, 1, run.small_side)


def file_sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".onnx", ".plan")
    }


def check_pictures(out: Path, count: int, side: int) -> dict[str, Any]:
    pictures = sorted(out.rglob("*.png"))
    check(len(pictures) == count, f"{out}: {len(pictures)} pictures, needed {count}")
    for path in pictures:
        with Image.open(path) as image:
            image.load()
            check(image.size == (side, side), f"{path}: {image.size}, needed {side}")
    return {"bytes": [path.stat().st_size for path in pictures]}


def size_flags(side: int) -> tuple[str, ...]:
    return "--width", str(side), "--height", str(side)


def run_sdxl(*arguments: str) -> None:
    run_python("-m", "sdxl.cli", *arguments)


def run_python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    output = (done.stderr + done.stdout)[-2000:]
    check(done.returncode == 0, f"{' '.join(arguments)} ended with {done.returncode}:\n{output}")


def check(holds: bool, message: str) -> None:
    if not holds:
        raise StepFailed(message)


def seconds_since(began_s: float) -> float:
    return round(time.perf_counter() - began_s, 1)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield the peak of the bytes that all child processes hold together."""
    peak = [0]

    def sample() -> None:
        children = psutil.Process().children(recursive=True)
        peak[0] = max(peak[0], sum(map(resident_bytes, children)))

    with repeating(sample, 0.5):
        yield peak


def resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eval.robustness.full_size", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/full-size"), help="results (%(default)s)")
    add("--model", default="", help="instead of random weights of full size")
    add("--side", type=int, default=1024, help="of pictures, in pixels (%(default)s)")
    add("--small-side", type=int, default=256, help="of ONNX Runtime's picture (%(default)s)")
    add("--precision", nargs="+", default=PRECISIONS, choices=PRECISIONS, help="default: all")
    add("--max-batch", type=int, default=TARGETS[GPU].max_batch, help="of plans (%(default)s)")
    add("--others", nargs="*", default=OTHER_SMS, choices=TENSORRT_RTX.architectures)
    add("--skip", nargs="+", default=(), metavar="STEP", help="names of steps, such as build")
    options = parser.parse_args(argv)
    run = FullSizeRun(
        options.out,
        options.model,
        options.side,
        options.small_side,
        options.precision,
        options.max_batch,
        options.others,
    )
    steps = steps_of(run)
    try:
        run.run({n: s for n, s in steps.items() if n.partition(",")[0] not in options.skip})
    except StepFailed as error:
        print(f"full-size: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
