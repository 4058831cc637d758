"""The worker's threads: one for each network, a GPU's streams, health, and their end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from engines.cuda.device import CudaDevice
from engines.cuda.recordings import Ticks
from sdxl.cost import Costs
from sdxl.inflight import InFlight
from sdxl.pipeline import Pipeline
from sdxl.policy import Limits
from sdxl.warmup import NotReady
from serve.errors import Problem
from serve.worker.denoiser import Denoiser
from serve.worker.stalls import Unhealthy
from serve.worker.worker import Worker
from tests.engines.cuda_double import BEGIN, FakeCuda
from tests.fakes import FakeClock, fake_engines
from tests.sdxl.sharing import STANDARD
from tests.serve.workers import fake, fake_pipeline, order, picture_of, running

T = TypeVar("T")


def noted(pipeline: Pipeline, fact: Callable[[], T]) -> dict[str, set[T]]:
    """Return a dictionary that collects this fact at each call of each network."""
    seen: dict[str, set[T]] = {name: set() for name in pipeline.engines.by_name}
    for name, facts in seen.items():
        fake(pipeline, name).on_call = partial(lambda facts: facts.add(fact()), facts)
    return seen


def test_promises_include_admitted_prompts_that_wait_to_be_encoded() -> None:
    costs = Costs(encode_s=0.5)
    denoiser = Denoiser(InFlight(fake_engines(), lambda: 0.0, Limits((1, 2), 2), costs))
    promised = [denoiser.admit(replace(STANDARD, id=i)) for i in range(3)]
    assert denoiser.admission().delay_s == pytest.approx(3 * 0.5 + 0.5)
    denoiser.forget(promised[0])
    assert denoiser.admission().delay_s == pytest.approx(2 * 0.5 + 0.5)


def test_a_network_runs_on_its_own_thread_from_the_warm_up_on() -> None:
    """cuDNN and attention have caches by thread."""
    pipeline = fake_pipeline()
    seen = noted(pipeline, lambda: threading.current_thread().name.partition("_")[0])
    with running(pipeline) as worker:
        assert all(seen.values()), f"not warmed up: {seen}"
        asyncio.run(picture_of(worker, order()))
    assert seen == {
        "clip_l": {"encode"},
        "clip_g": {"encode"},
        "unet_prompt": {"denoiser"},
        "unet_deep": {"denoiser"},
        "unet_shallow": {"denoiser"},
        "vae_decoder": {"decode"},
        "vae_encoder": {"encode"},
    }


@pytest.mark.parametrize(("call_s", "rounds"), [(0.0, 2), (30.0, 1)])
def test_slow_calls_on_a_processor_are_timed_once(call_s: float, rounds: int) -> None:
    pipeline, clock = fake_pipeline(buckets=(1, 2)), FakeClock()
    called: list[None] = []

    def take_long() -> None:
        called.append(None)
        clock.now += call_s

    fake(pipeline, "unet_deep").on_call = take_long
    with running(replace(pipeline, clock=clock)):
        pass
    # A picture, with one row and with two: of each the first and third step of four.
    assert len(called) == 3 * 2 * rounds


def on_a_gpu(cuda: FakeCuda, *, captures: bool) -> tuple[Pipeline, CudaDevice]:
    pipeline = fake_pipeline()
    device = CudaDevice(torch.device("cuda", 1))
    functions = device.for_engines() | ({"run_recorded": Ticks(device)} if captures else {})
    return replace(pipeline, engines=replace(pipeline.engines, **functions)), device


def test_nothing_runs_on_cudas_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT would synchronise there at every call, and the streams would wait for each other."""
    cuda = FakeCuda().install(monkeypatch)
    pipeline, device = on_a_gpu(cuda, captures=False)
    seen = noted(pipeline, device.stream)
    with running(pipeline) as worker:
        asyncio.run(picture_of(worker, order()))
    default = cuda.default_stream(torch.device("cuda", 1)).cuda_stream
    loop = {device.loop_stream.cuda_stream}
    assert seen["unet_prompt"] == seen["unet_deep"] == seen["unet_shallow"] == loop
    assert seen["clip_l"] == seen["clip_g"] != seen["vae_decoder"]
    for name in ("clip_l", "vae_decoder"):
        assert len(seen[name]) == 1 and not seen[name] & (loop | {default}), seen


def test_decoding_waits_for_no_further_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has waited for the latents, and its next call is already running."""
    cuda = FakeCuda().install(monkeypatch)
    pipeline, _ = on_a_gpu(cuda, captures=False)
    with running(pipeline) as worker:
        asyncio.run(picture_of(worker, order()))
        decoder: Any = worker._started().writer._stream._stream
    assert not decoder.waits_for


def test_a_service_whose_graphs_are_refused_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(fails=[BEGIN] * 1000).install(monkeypatch)
    pipeline, device = on_a_gpu(cuda, captures=True)
    asked = order("a red ring", seed=5, steps=8)
    with running(pipeline) as worker:
        done = asyncio.run(picture_of(worker, asked))
        found = {s.name: s.value for m in asyncio.run(worker.metrics()) for s in m.samples}
    with running() as worker:
        expected = asyncio.run(picture_of(worker, asked))
    assert done.image == expected.image
    assert found["sdxl_failed_captures_total"] == device.failed_captures > 0
    warnings = [r for r in caplog.records if "CUDA graph was not captured" in r.message]
    assert sum(r.levelname == "WARNING" for r in warnings) == 1


def test_kernels_compiled_after_the_start_are_counted() -> None:
    pipeline, compiled = fake_pipeline(), [7]
    counting = replace(pipeline.engines, compiled_kernels=lambda: compiled[0])
    with running(replace(pipeline, engines=counting)) as worker:
        for total in (7, 9, 9):
            compiled[0] = total
            found = {s.name: s.value for m in asyncio.run(worker.metrics()) for s in m.samples}
            assert found["sdxl_compiled_kernels_total"] == total - 7


def test_a_worker_that_does_not_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    pipeline = fake_pipeline()
    fake(pipeline, "vae_decoder").fault = RuntimeError("no memory")
    with pytest.raises(NotReady, match="no picture: no memory"), running(pipeline):
        pass
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread.name


async def test_a_worker_is_healthy_while_its_loop_advances() -> None:
    pipeline, may_end = fake_pipeline(), threading.Event()
    with running(pipeline, stall_s=0.3) as worker:
        worker.check_health()
        fake(pipeline, "unet_deep").on_call = may_end.wait
        task = asyncio.create_task(picture_of(worker, order()))
        with pytest.raises(Unhealthy, match="not advanced for"):
            while True:
                await asyncio.sleep(0.01)
                worker.check_health()
        may_end.set()
        await task
        worker.check_health()


def test_an_idle_worker_stays_healthy() -> None:
    with running(stall_s=1.0) as worker:
        time.sleep(1.3)
        worker.check_health()


async def test_engines_that_keep_failing_make_it_unhealthy_until_one_works() -> None:
    with running() as worker:
        for _ in range(3):
            worker.check_health()
            fake(worker.pipeline, "unet_deep").fault = RuntimeError("broken")
            with pytest.raises(Problem):
                await picture_of(worker, order())
        with pytest.raises(Unhealthy, match="3 times in a row"):
            worker.check_health()
        await picture_of(worker, order())
        worker.check_health()


def test_closing_leaves_no_thread_and_no_one_waiting() -> None:
    before = set(threading.enumerate())

    async def scenario() -> None:
        worker = Worker(fake_pipeline(tick_s=0.01))
        worker.start()
        task = asyncio.create_task(picture_of(worker, order(steps=1000)))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(worker.close)
        for asked in (task, picture_of(worker, order())):
            with pytest.raises(Problem) as caught:
                await asked
            assert caught.value.status == 503

    asyncio.run(scenario())
    left = set(threading.enumerate()) - before
    assert not left, f"still running: {sorted(thread.name for thread in left)}"
