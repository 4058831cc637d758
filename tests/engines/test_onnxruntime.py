"""ONNX Runtime computes the same as PyTorch, into given tensors, without diffusers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engines
from engines import onnxruntime_engine
from engines.cpu import rows_on_cpu
from engines.onnxruntime_engine import OnnxRuntimeEngine, OnnxRuntimeError, load_onnxruntime
from onnx_export.check import example_inputs
from sdxl.engine import Engines, allocate, call
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline, Result
from sdxl.specs import ModelSpec, ShapeError, image_axes
from tests.conftest import psnr
from tests.engines.tiny_export import VOCABULARY, write_export
from tests.fakes import ARCH
from tests.interrupts import at_every_bytecode
from tests.sdxl.their_schedulers import QUICK

ROOT = Path(__file__).parents[2]
INTERRUPTED = Path(__file__).with_name("interrupted_calls.py")
LEAST_PSNR_DB = 45.0
SHORT = "a red circle on a blue background"
LONG = ", ".join([SHORT] * 12)
"""more than 77 tokens"""
AXES = {
    "rows": 2,
    "tokens": 77,
    "latent_h": 8,
    "latent_w": 6,
    "chunks": 2,
    "batch": 1,
    **image_axes(ARCH, 8, 6),
}
DRAWN = (*QUICK, "lcm")
"""Engines do not see the scheduler; with LCM the smallest difference grows."""
SHAPES = (((128, 128), SHORT), ((160, 96), LONG), ((128, 128), LONG), ((160, 96), SHORT))
REQUESTS = [
    GenerationParams(
        prompt, width=width, height=height, steps=6, seed=i, scheduler=name, cache_interval=interval
    )
    for i, ((name, interval), ((width, height), prompt)) in enumerate(
        zip(itertools.product(DRAWN, (1, 2, 1, 2)), itertools.cycle(SHAPES), strict=False)
    )
]
"""each scheduler at intervals 1 and 2, with a square and a wide picture"""


@pytest.fixture(scope="module")
def onnx_mini(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDXL_HOME", str(tmp_path_factory.mktemp("home")))
        return engines.load("mini", "onnxruntime")


@pytest.fixture(scope="module")
def reference(mini: Pipeline) -> list[Result]:
    return mini.generate(REQUESTS)


@pytest.fixture
def tiny_engines(tmp_path: Path) -> Engines:
    return load_onnxruntime(write_export(tmp_path / "tiny"))


def random_inputs(spec: ModelSpec, **axes: int) -> dict[str, Tensor]:
    return example_inputs(spec, AXES | axes, ARCH, VOCABULARY)


def assert_same_images(found: list[Result], expected: list[Result]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is None and theirs.error is None, ours.error or theirs.error
        assert ours.image is not None and theirs.image is not None
        measured = psnr(ours.image, theirs.image)
        assert measured >= LEAST_PSNR_DB, (
            f"{ours.params}: {measured:.1f} dB, needed {LEAST_PSNR_DB}"
        )


@pytest.mark.slow
def test_images_in_flight_together_are_those_of_pytorch(
    onnx_mini: Pipeline, reference: list[Result]
) -> None:
    assert len(REQUESTS) == 4 * len(DRAWN)
    assert_same_images(onnx_mini.generate(REQUESTS), reference)


def test_images_alone_are_those_of_pytorch(onnx_mini: Pipeline, reference: list[Result]) -> None:
    chosen = range(0, len(REQUESTS), 3)
    alone = [onnx_mini.generate([REQUESTS[i]])[0] for i in chosen]
    assert_same_images(alone, [reference[i] for i in chosen])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_outputs_are_written_into_the_given_tensors(tmp_path: Path, dtype: str) -> None:
    found = load_onnxruntime(write_export(tmp_path / dtype, dtype=dtype))
    # One row of each: the session computes the call in one piece, so bits are equal.
    axes = AXES | {"rows": 1, "chunks": 1}
    for engine in found.by_name.values():
        assert isinstance(engine, OnnxRuntimeEngine)
        inputs = random_inputs(engine.spec, rows=1, chunks=1)
        outputs = {t.name: allocate(t, axes) for t in engine.spec.outputs}
        addresses = {name: t.data_ptr() for name, t in outputs.items()}
        engine(inputs, outputs)
        copied = engine.session.run(None, {name: t.numpy() for name, t in inputs.items()})
        for spec, expected in zip(engine.spec.outputs, copied, strict=True):
            assert torch.equal(outputs[spec.name], torch.from_numpy(expected)), spec.name
        assert {name: t.data_ptr() for name, t in outputs.items()} == addresses


def test_what_does_not_fit_is_refused_before_anything_runs(tiny_engines: Engines) -> None:
    deep = tiny_engines["unet_deep"]
    inputs = random_inputs(deep.spec)
    outputs = {t.name: allocate(t, AXES).fill_(7) for t in deep.spec.outputs}

    def refused(message: str, **changes: Tensor) -> None:
        with pytest.raises(ShapeError, match=message):
            deep({**inputs, **changes}, outputs)
        assert all(bool((t == 7).all()) for t in outputs.values())

    refused("'sample' is torch.float16, expected float32", sample=inputs["sample"].half())
    refused("'keys_0' has shape", keys_0=inputs["keys_0"][:1].contiguous())
    gaps = inputs["sample"].to(memory_format=torch.channels_last)
    refused("'sample' is on cpu with strides", sample=gaps)
    with pytest.raises(ShapeError, match="'added' is missing"):
        deep({n: t for n, t in inputs.items() if n != "added"}, outputs)


def test_an_output_of_another_shape_is_an_error(tiny_engines: Engines) -> None:
    deep = tiny_engines["unet_deep"]
    outputs = {t.name: allocate(t, AXES | {"latent_w": 7}) for t in deep.spec.outputs}
    with pytest.raises(OnnxRuntimeError, match="unet_deep: .*shape"):
        deep(random_inputs(deep.spec), outputs)


def run_python(code: str, home: Path, **environment: str) -> list[str]:
    env = {**os.environ, "SDXL_HOME": str(home), **environment}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two threads, because one thread computes no halves."""
    monkeypatch.setattr(onnxruntime_engine, "threads", lambda: 2)


@pytest.mark.usefixtures("two_threads")
def test_halves_of_a_call_are_the_call(tiny_engines: Engines) -> None:
    """Rows of halves equal rows of the whole call, also with an odd number of rows."""
    for name in ("unet_deep", "unet_shallow"):
        engine = tiny_engines[name]
        inputs = random_inputs(engine.spec, rows=5)
        together = call(engine, tiny_engines.arch, inputs)
        for row in range(5):
            part = slice(row, row + 1)
            alone = call(engine, tiny_engines.arch, {n: t[part] for n, t in inputs.items()})
            for output, found in together.items():
                torch.testing.assert_close(found[part], alone[output], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("half", [0, 1])
def test_a_failure_in_either_half_is_the_calls(tiny_engines: Engines, half: int) -> None:
    """Either half may run on either thread."""
    deep = tiny_engines["unet_deep"]
    assert isinstance(deep, OnnxRuntimeEngine)
    session, calls = deep.session, itertools.count()

    class Session:
        io_binding = session.io_binding

        def run_with_iobinding(self, binding: Any) -> None:
            if next(calls) == half:
                raise RuntimeError("no memory")
            session.run_with_iobinding(binding)

    broken = replace(deep, session=Session(), _bound={})
    inputs = random_inputs(deep.spec, rows=4)
    outputs = {t.name: allocate(t, AXES | {"rows": 4}) for t in deep.spec.outputs}
    with pytest.raises(OnnxRuntimeError, match="unet_deep: no memory"):
        broken(inputs, outputs)


PAINTS = """
import sys, time, engines
from sdxl.params import GenerationParams
pipeline = engines.load("mini", "onnxruntime")
(result,) = pipeline.generate([GenerationParams("a red circle", steps=2, seed=0)])
assert result.image is not None, result.error
"""


@pytest.mark.slow
def test_threads_that_wait_cost_nothing(tmp_path: Path) -> None:
    code = """
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""
    (spent,) = run_python(PAINTS + code, tmp_path / "home")
    assert float(spent) < 0.5, f"{spent} s of computing in an idle second"


@pytest.mark.slow
def test_a_picture_needs_neither_diffusers_nor_transformers(tmp_path: Path) -> None:
    code = """
print(*[name for name in ("diffusers", "transformers", "onnx") if name in sys.modules])
"""
    assert run_python(PAINTS + code, tmp_path / "home") == []


def test_a_large_model_keeps_no_memory_between_calls_and_splits_none(
    tiny_engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: Any = tiny_engines["unet_deep"]
    monkeypatch.setattr(onnxruntime_engine, "LARGE_BYTES", 0)
    large: Any = load_onnxruntime(write_export(tmp_path / "export"))["unet_deep"]
    assert usual.session.get_session_options().enable_cpu_mem_arena
    options = large.session.get_session_options()
    assert not options.enable_cpu_mem_arena and not options.enable_mem_pattern
    inputs = random_inputs(usual.spec, rows=4)
    expected, found = (call(each, tiny_engines.arch, inputs) for each in (usual, large))
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items())
    assert [len(halves) for halves in large._bound.values()] == [1]


@pytest.mark.parametrize(
    ("latent_side", "expected"),
    [(16, (1, 2, 4, 8, 16)), (64, (1, 2, 4, 8)), (128, (1, 2)), (512, (1, 2))],
)
def test_large_pictures_take_few_rows(latent_side: int, expected: tuple[int, ...]) -> None:
    arch = replace(ARCH, sample_size=latent_side)
    assert rows_on_cpu(arch, Engines.buckets) == expected


def test_an_interrupt_at_any_bytecode_of_a_call_leaves_its_tensors_alone(
    tiny_engines: Engines,
) -> None:
    deep = tiny_engines["unet_deep"]
    inputs = random_inputs(deep.spec, rows=4)
    outputs = {t.name: allocate(t, AXES | {"rows": 4}) for t in deep.spec.outputs}
    deep(inputs, outputs)
    expected = {name: tensor.clone() for name, tensor in outputs.items()}

    def check() -> None:
        kept = {name: tensor.fill_(7).clone() for name, tensor in outputs.items()}
        time.sleep(0.001)
        assert all(torch.equal(outputs[name], kept[name]) for name in kept), "written to after it"
        deep(inputs, outputs)
        for name, tensor in expected.items():
            torch.testing.assert_close(outputs[name], tensor)

    assert at_every_bytecode(lambda: deep(inputs, outputs), check) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "interrupts", "computing"),
    [
        (1, 60, 0),
        pytest.param(20, 2000, 0, marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
        pytest.param(20, 2000, 4, marks=[pytest.mark.long, pytest.mark.timeout(3500)]),
    ],
)
def test_interrupts_at_any_moment_neither_hang_nor_crash(
    runs: int, interrupts: int, computing: int
) -> None:
    """Other processes use the cores at the same time."""
    spin = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in range(computing):
            stack.callback(stack.enter_context(subprocess.Popen(spin)).kill)
        for run in range(runs):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", str(INTERRUPTED), str(run), str(interrupts)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            print(f"run {run}:", done.stdout.strip())
