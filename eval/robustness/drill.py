"""`make full-size-drill`: random-weight SDXL 1.0 through the whole product, on this machine.

Render, serve, a batch job that is killed, export and ONNX Runtime, each at the size that a CPU
bears. Each step is timed, its processes' memory is watched, and what it did is checked. A step that
is done is not done again, so an interrupted drill goes on where it was.
`python -m eval.robustness.drill --model mini --side 128 --small-side 128` rehearses it in minutes.
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

from eval.measuring.system_description import processor
from eval.robustness.processes import repeating
from eval.service.client import local_service, metric_values
from eval.service.load import GENERATE
from sdxl.files import write_json

GIB = 2**30
PATIENT_S = 7200.0
"""What a CPU may take for one picture of the full size."""
BESIDE = ("--llm", "none", "--deadline-s", str(PATIENT_S), "--max-deadline-s", str(PATIENT_S))
PROMPT = "a lighthouse on a cliff at dusk"


class DrillFailed(RuntimeError):
    """A step did something else than it should."""


@dataclass
class Drill:
    out: Path
    model: str
    side: int
    small_side: int
    """what ONNX Runtime draws at"""
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    """of each step its seconds, the GiB of all its processes together at most (what they share
    counts for each), and what it says"""

    @property
    def file(self) -> Path:
        return self.out / "drill.json"

    def run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            self._check(stored)
            self.done = stored["steps"]
        for name, step in STEPS.items():
            if name in self.done:
                print(f"{name}: done before", flush=True)
                continue
            print(f"{name} …", flush=True)
            began_s = time.perf_counter()
            with peak_memory() as peak:
                facts = step(self)
            seconds = round(time.perf_counter() - began_s, 1)
            peak_gib = round(peak[0] / GIB, 2)
            self.done[name] = {"seconds": seconds, "peak_gib": peak_gib, "facts": facts}
            self._save()
            print(f"{name}: {seconds} s, {peak[0] / GIB:.1f} GiB {facts or ''}", flush=True)

    @property
    def asked(self) -> dict[str, Any]:
        return {"model": self.model, "side": self.side, "small_side": self.small_side}

    def _check(self, stored: Mapping[str, Any]) -> None:
        """A rehearsal's steps are not those of the drill."""
        for name, value in self.asked.items():
            if stored.get(name) != value:
                shown = f"{name} {stored.get(name)!r}, asked for {value!r}"
                raise DrillFailed(f"{self.file} is of {shown}; needed another --out")

    def _save(self) -> None:
        whole = {"cpu": processor(), **self.asked, "steps": self.done}
        write_json(self.file, whole, end="")

    @property
    def folder(self) -> str:
        """Where the model is, or its name."""
        return self.model or str(self.out / "model")

    def sdxl(self, *arguments: str) -> str:
        """What a command printed on stderr and stdout."""
        return told([sys.executable, "-m", "sdxl.cli", *arguments])

    def sized(self, side: int) -> tuple[str, ...]:
        return "--width", str(side), "--height", str(side)


def write_model(drill: Drill) -> dict[str, Any]:
    if not drill.model:
        told([sys.executable, "-m", "onnx_export.random_weights", drill.folder])
    return {}


def render(steps: int) -> Callable[[Drill], dict[str, Any]]:
    def step(drill: Drill) -> dict[str, Any]:
        out = drill.out / f"render-{steps}"
        common = ("--model", drill.folder, "--backend", "torch", "--seed", "1")
        drawn = (*drill.sized(drill.side), "--steps", str(steps), "--out", str(out))
        drill.sdxl("render", PROMPT, *common, *drawn)
        return check_pictures(out, 1, drill.side)

    return step


def serve(drill: Drill) -> dict[str, Any]:
    """One picture, two at once, one streamed, one whose client leaves; then it ends as told."""
    began_s = time.perf_counter()
    flags = ("--model", drill.folder, "--backend", "torch", *BESIDE)
    facts: dict[str, Any] = {}
    body = {"prompt": PROMPT, "steps": 2, "seed": 1, "size": f"{drill.side}x{drill.side}"}
    log = drill.out / "serve.log"
    with local_service(flags, log) as url, httpx.Client(base_url=url, timeout=PATIENT_S) as http:
        facts["ready_s"] = since(began_s)
        for name, more in (("one_s", {}), ("two_s", {"n": 2})):
            began_s = time.perf_counter()
            answer = http.post(GENERATE, json={**body, **more})
            need(answer.status_code == 200, f"{name}: {answer.status_code} {answer.text[:300]}")
            need(len(answer.json()["data"]) == more.get("n", 1), f"{name}: too few pictures")
            facts[name] = since(began_s)
        began_s, events = time.perf_counter(), []
        streamed = {**body, "stream": True, "partial_images": 1}
        with http.stream("POST", GENERATE, json=streamed) as response:
            events = [line[7:] for line in response.iter_lines() if line.startswith("event: ")]
        need(bool(events) and events[-1].endswith("completed"), f"streamed: {events}")
        facts |= {"streamed_s": since(began_s), "events": events}
        facts["left_s"] = leave(http, body)
        ended_s = time.perf_counter()
    return {**facts, "end_s": since(ended_s)}


def leave(http: httpx.Client, body: dict[str, Any]) -> float:
    """Seconds until nothing runs any more after a client has left in the middle of a picture."""
    # With progress: the first word of a stream without any is its picture.
    long = {**body, "steps": 50, "stream": True, "progress": True}
    with http.stream("POST", GENERATE, json=long) as response:
        need(response.status_code == 200, f"left: {response.status_code}")
        next(response.iter_lines())
    began_s = time.perf_counter()
    while sum(metric_values(http.get("/metrics").text, "sdxl_images_running")):
        need(time.perf_counter() - began_s < PATIENT_S, "a picture that nobody waits for runs on")
        time.sleep(0.2)
    return since(began_s)


def batch(drill: Drill) -> dict[str, Any]:
    """Four rows; killed once the first is there; the next start makes the rest and no more."""
    source, out = drill.out / "rows.txt", drill.out / "batch"
    source.write_text("".join(f"{PROMPT}, number {i}\n" for i in range(4)), encoding="utf-8")
    arguments = ("batch", str(source), "--out", str(out), "--model", drill.folder, "--quiet")
    whole = (*arguments, "--backend", "torch", "--steps", "1", *drill.sized(drill.side))
    patient = (*whole, "--shard-size", "1", "--stall-s", str(PATIENT_S))
    command = [sys.executable, "-m", "sdxl.cli", *patient]
    with (drill.out / "batch.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    while not (made := sorted(out.glob("images/*/*.png"))) and process.poll() is None:
        time.sleep(0.2)
    before = {path: path.read_bytes() for path in made}
    process.send_signal(signal.SIGKILL)
    process.wait()
    drill.sdxl(*patient)
    drill.sdxl("batch", "--verify", str(out))
    need(bool(before) and all(p.read_bytes() == b for p, b in before.items()), "made twice")
    pictures = sorted(out.glob("images/*/*.png"))
    need(len(pictures) == 4, f"{len(pictures)} pictures, needed 4")
    return {"made_before_the_kill": len(before)}


def export(drill: Drill) -> dict[str, Any]:
    # Unchecked: PyTorch and ONNX Runtime would each hold it in float32.
    out = drill.out / "onnx"
    shutil.rmtree(out, ignore_errors=True)
    named = ("--model", drill.folder, "--precision", "fp16", "--out", str(out))
    drill.sdxl("export", *named, "--unchecked")
    return {}


def onnxruntime(drill: Drill) -> dict[str, Any]:
    out = drill.out / "render-onnxruntime"
    named = ("--model", drill.folder, "--backend", "onnxruntime", "--unchecked")
    place = ("--engines", str(drill.out / "onnx"), "--out", str(out))
    drill.sdxl("render", PROMPT, *named, *place, *drill.sized(drill.small_side), "--steps", "2")
    return check_pictures(out, 1, drill.small_side)


STEPS: dict[str, Callable[[Drill], dict[str, Any]]] = {
    "model": write_model,
    "render, one step": render(1),
    "render, two steps": render(2),
    "serve": serve,
    "batch": batch,
    "export": export,
    "onnxruntime": onnxruntime,
}


def check_pictures(out: Path, count: int, side: int) -> dict[str, Any]:
    found = sorted(out.rglob("*.png"))
    need(len(found) == count, f"{out}: {len(found)} pictures, needed {count}")
    for path in found:
        with Image.open(path) as image:
            image.load()
            need(image.size == (side, side), f"{path}: {image.size}, needed {side}")
    return {"bytes": [path.stat().st_size for path in found]}


def told(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stderr + done.stdout
    need(done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{said[-2000:]}")
    return said


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DrillFailed(otherwise)


def since(began_s: float) -> float:
    return round(time.perf_counter() - began_s, 1)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The most bytes that all processes below this one held together."""
    peak = [0]

    def look() -> None:
        peak[0] = max(peak[0], sum(map(resident, psutil.Process().children(recursive=True))))

    with repeating(look, 0.5):
        yield peak


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eval.robustness.drill", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/full-size-drill"))
    parser.add_argument("--model", default="", help="instead of random weights at full size")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--small-side", type=int, default=256, help="with ONNX Runtime")
    options = parser.parse_args(argv)
    drill = Drill(options.out, options.model, options.side, options.small_side)
    try:
        drill.run()
    except DrillFailed as error:
        print(f"full-size-drill: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
