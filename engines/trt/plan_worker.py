"""Builds one plan in its own process: `python -m engines.trt.plan_worker JOB`.

A separate process is needed because Polygraphy chooses one of the two TensorRTs when it is
imported, and because the end of a process frees all memory of a build. The worker reads a job,
writes the plan, and prints its progress as JSON lines.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.control_graphs import variant_graph
from engines.folders.manifest import spec_from_dict
from sdxl.memory import peak_bytes
from sdxl.specs import ModelSpec, plain_name

SWITCH = "POLYGRAPHY_USE_TENSORRT_RTX"
PR_SET_PDEATHSIG = 1
MAX_MESSAGE = 500
DTYPES = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64"}
"""TensorRT's names of types, by the specs' names"""


class BuildError(RuntimeError):
    """A plan was not built. The message names its graph and has TensorRT's messages."""


@dataclass(frozen=True)
class PlanJob:
    """One plan to build. `module` is the library's module. `architecture` is tensorrt-rtx's target;
    None means the local GPU."""

    name: str
    onnx: str
    plan: str
    module: str
    architecture: str | None
    profiles: list[dict[str, Any]]
    spec: dict[str, Any]
    timing_cache: str | None
    is_sparse: bool

    @property
    def is_rtx(self) -> bool:
        return self.module == "tensorrt_rtx"


@dataclass
class BuildProgress:
    """Converts TensorRT's nested phases, the outermost first, into one share of the build."""

    say: Callable[[float], None]
    last: int = -1
    _phases: dict[str, list[int]] = field(default_factory=dict)

    def start(self, phase: str, steps: int) -> None:
        self._phases[phase] = [0, max(steps, 1)]

    def step(self, phase: str, step: int) -> None:
        if phase in self._phases:
            self._phases[phase][0] = step + 1
        share, weight = 0.0, 1.0
        for done, steps in self._phases.values():
            share += weight * min(done, steps) / steps
            weight /= steps
        if (percent := int(100 * min(share, 1.0))) > self.last:
            self.last = percent
            self.say(percent / 100)

    def finish(self, phase: str) -> None:
        self._phases.pop(phase, None)


def run_worker(job: PlanJob, log: Path, on_share: Callable[[float], None]) -> dict[str, Any]:
    """Build a plan in a worker and return its cost. TensorRT's messages go to `log`."""
    job_file = log.with_suffix(".job")
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "engines.trt.plan_worker", str(job_file)]
    last: dict[str, Any] = {}
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as worker,
    ):
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                last = json.loads(line)
                if "share" in last:
                    on_share(last["share"])
        except BaseException:
            worker.kill()
            raise
    code = worker.returncode
    if code == 0:
        return last
    if last.get("errno"):
        raise OSError(last["errno"], last["error"])
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; out of memory, most likely" if -code == signal.SIGKILL else ""
        raise BuildError(f"{job.onnx}: building its plan was ended by {name}{hint} (see {log})")
    messages = errors_in(log.read_text(encoding="utf-8", errors="replace"))
    error = last.get("error", f"exit code {code}")
    raise BuildError(f"{job.onnx}: {error}: {messages}"[:MAX_MESSAGE])


def errors_in(text: str) -> str:
    """Return TensorRT's errors in a log. Errors about a missing GPU are left out, because a build
    may not need one."""
    lines = [
        line.strip().removeprefix("[E]").strip() for line in text.splitlines() if "[E]" in line
    ]
    relevant = [line for line in lines if "cudaError" not in line and "CUDA driver" not in line]
    return " ".join(dict.fromkeys(relevant)) or "nothing else"


def main(argv: list[str]) -> int:
    die_with_parent()
    # Messages for the parent go to stdout; the libraries' output goes to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    job = PlanJob(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")

    start = time.perf_counter()
    try:
        plan = build(job, lambda share: say(share=share))
        with Path(job.plan).open("wb") as file:
            file.write(memoryview(plan))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        say(errno=error.errno, error=str(error))
        return 1
    except Exception as error:
        say(error=" ".join(str(error).split()) or type(error).__name__)
        return 1
    say(seconds=round(time.perf_counter() - start, 2), peak_bytes=peak_bytes())
    return 0


def die_with_parent() -> None:
    """End this worker when its build is killed. It must not write into the next build's folder."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def build(job: PlanJob, on_progress: Callable[[float], None]) -> Any:
    """Return the plan's bytes in TensorRT's buffer."""
    os.environ[SWITCH] = "1" if job.is_rtx else "0"
    from polygraphy.backend.trt import EngineBytesFromNetwork

    spec = spec_from_dict(job.name, job.spec)
    builder, network, parser = parse_network(job, spec)
    check_tensors(network, spec)
    let_attention_decompose(network, importlib.import_module(job.module))
    return EngineBytesFromNetwork(
        (builder, network, parser), _config(job, on_progress), save_timing_cache=job.timing_cache
    )()


def parse_network(job: PlanJob, spec: ModelSpec) -> tuple[Any, Any, Any]:
    """Parse the job's graph, with LoRAs, residuals and image prompts if its network has them."""
    from polygraphy.backend.trt import CreateNetwork, NetworkFromOnnxPath, get_trt_logger

    if job.name == plain_name(job.name):
        parsed: tuple[Any, Any, Any] = NetworkFromOnnxPath(job.onnx, strongly_typed=True)()
        return parsed
    graph, _ = variant_graph(Path(job.onnx).read_bytes(), spec)
    builder, network = CreateNetwork(strongly_typed=True)()
    parser = importlib.import_module(job.module).OnnxParser(network, get_trt_logger())
    if not parser.parse(graph, job.onnx):
        raise BuildError(f"{job.name}: TensorRT cannot parse it: {parser.get_error(0)}")
    return builder, network, parser


def check_tensors(network: Any, spec: ModelSpec) -> None:
    """Check that TensorRT reads the spec's tensors. A wrong graph must fail now, not in a
    service."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    for specs, tensors in ((spec.all_inputs, inputs), (spec.outputs, outputs)):
        needed = {t.name: DTYPES[t.dtype] for t in specs}
        if needed != {t.name: t.dtype.name for t in tensors}:
            found = {t.name: (t.dtype.name, tuple(t.shape)) for t in tensors}
            raise BuildError(f"{spec.name}: TensorRT reads {found}, expected {needed}")


def let_attention_decompose(network: Any, library: Any) -> None:
    """Let TensorRT use several kernels if it has none for a whole attention."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == library.LayerType.ATTENTION_INPUT:
            layer.__class__ = library.IAttentionInputLayer
            layer.attention.decomposable = True


def _config(job: PlanJob, on_progress: Callable[[float], None]) -> Any:
    settings = {
        "profiles": [_profile(ranges) for ranges in job.profiles],
        "sparse_weights": job.is_sparse,
        "load_timing_cache": job.timing_cache,
        "progress_monitor": _monitor(job.module, on_progress),
    }
    if not job.is_rtx:
        from polygraphy.backend.trt import CreateConfig

        # Without TF32, float32 products take several times as long.
        return CreateConfig(tf32=True, **settings)
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
    from polygraphy.backend.trt import PostprocessConfig

    if job.architecture is None:
        config = CreateConfigRTX(use_gpu=True, **settings)
    else:
        digits = job.architecture.removeprefix("SM")
        capability = (int(digits[:-1]), int(digits[-1]))
        config = CreateConfigRTX(compute_capabilities=[capability], **settings)
    return PostprocessConfig(config, _make_capturable)


def _make_capturable(builder: Any, network: Any, config: Any) -> None:
    """Forbid tensorrt-rtx to allocate while it runs. A CUDA graph cannot contain allocations."""
    library = importlib.import_module("tensorrt_rtx")
    config.set_flag(library.BuilderFlag.REQUIRE_USER_ALLOCATION)


def _profile(ranges: dict[str, Any]) -> Any:
    from polygraphy.backend.trt import Profile

    profile = Profile()
    for name, (low, usual, high) in ranges.items():
        profile.add(name, min=tuple(low), opt=tuple(usual), max=tuple(high))
    return profile


def _monitor(module: str, on_progress: Callable[[float], None]) -> Any:
    library = importlib.import_module(module)
    progress = BuildProgress(on_progress)

    class Monitor(library.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            progress.start(name, steps)

        def step_complete(self, name: str, step: int) -> bool:
            progress.step(name, step)
            return True

        def phase_finish(self, name: str) -> None:
            progress.finish(name)

    return Monitor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
