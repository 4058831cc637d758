"""Builds one plan, in a process of its own: `python -m engines.trt.plan_worker JOB`.

A process each, because Polygraphy chooses between the two TensorRTs when it is imported, and
because what a build allocates is gone with it. It reads a job, writes the plan, and says on stdout,
as JSON lines, how far it is.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.folders.spec_json import spec_from_dict
from sdxl.memory import peak_bytes
from sdxl.specs import ModelSpec

SWITCH = "POLYGRAPHY_USE_TENSORRT_RTX"
PR_SET_PDEATHSIG = 1
DTYPES = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64"}
"""the specs' names and TensorRT's"""


class BuildFailed(RuntimeError):
    """A graph that TensorRT does not take: which, and what it says."""


@dataclass(frozen=True)
class PlanJob:
    """One plan to build. `module` is the library's; `architecture` is what tensorrt-rtx builds
    for, None being the GPU that is here."""

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

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class BuildProgress:
    """The phases that are under way, outermost first, as one share of the whole."""

    say: Callable[[float], None]
    last: int = -1

    def __post_init__(self) -> None:
        self._phases: dict[str, list[int]] = {}

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


def main(argv: list[str]) -> int:
    die_with_parent()
    # stdout is for the parent alone; what the libraries print there goes to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    job = PlanJob(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")

    start = time.perf_counter()
    try:
        plan = build(job, lambda share: say(share=share))
        write(Path(job.plan), plan)
    except OSError as error:
        say(errno=error.errno, error=str(error))
        return 1
    except Exception as error:
        say(error=" ".join(str(error).split()) or type(error).__name__)
        return 1
    say(seconds=round(time.perf_counter() - start, 2), peak_bytes=peak_bytes())
    return 0


def die_with_parent() -> None:
    """A killed build leaves no worker behind that writes into the folder of the next one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def build(job: PlanJob, on_progress: Callable[[float], None]) -> Any:
    """The plan's bytes, in whatever buffer TensorRT hands out."""
    os.environ[SWITCH] = "1" if job.is_rtx else "0"
    from polygraphy.backend.trt import EngineBytesFromNetwork, NetworkFromOnnxPath

    builder, network, parser = NetworkFromOnnxPath(job.onnx, strongly_typed=True)()
    check_tensors(network, spec_from_dict(job.name, job.spec))
    let_attention_decompose(network, importlib.import_module(job.module))
    return EngineBytesFromNetwork(
        (builder, network, parser), _config(job, on_progress), save_timing_cache=job.timing_cache
    )()


def check_tensors(network: Any, spec: ModelSpec) -> None:
    """TensorRT read the tensors that the specs state; a wrong graph fails here, not in service."""

    def facts(tensors: list[Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {t.name: (t.dtype.name, tuple(t.shape)) for t in tensors}

    found = facts([network.get_input(i) for i in range(network.num_inputs)])
    outputs = facts([network.get_output(i) for i in range(network.num_outputs)])
    for wanted, there in ((spec.inputs, found), (spec.outputs, outputs)):
        needed = {t.name: DTYPES[t.dtype] for t in wanted}
        if needed != {name: dtype for name, (dtype, _) in there.items()}:
            raise BuildFailed(f"{spec.name}: TensorRT reads {there}, needed {needed}")


def let_attention_decompose(network: Any, library: Any) -> None:
    """Where TensorRT has no kernel for one as a whole it takes several, instead of failing."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == library.LayerType.ATTENTION_INPUT:
            layer.__class__ = library.IAttentionInputLayer
            layer.attention.decomposable = True


def write(path: Path, plan: Any) -> None:
    with path.open("wb") as file:
        file.write(memoryview(plan))
        file.flush()
        os.fsync(file.fileno())


def _config(job: PlanJob, on_progress: Callable[[float], None]) -> Any:
    settings = {
        "profiles": [_profile(ranges) for ranges in job.profiles],
        "sparse_weights": job.is_sparse,
        "load_timing_cache": job.timing_cache,
        "progress_monitor": _monitor(job.module, on_progress),
    }
    if not job.is_rtx:
        from polygraphy.backend.trt import CreateConfig

        # What an export in float32 multiplies would take several times as long without.
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
    """Memory that tensorrt-rtx takes by itself while it runs cannot be part of a CUDA graph."""
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
