"""A failed capture slows only the captured work; the loop has its own streams."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engines.cuda.device import CudaDevice, local_target, numbered
from engines.cuda.recordings import MOST_TICKS, CaptureFailed, Ticks
from tests.engines.cuda_double import MIDDLE, MOMENTS, FakeCuda, FakeStream

SECOND = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


def work_of(cuda: FakeCuda, ran: list[str], name: str) -> Callable[[], None]:
    def work() -> None:
        if cuda.capturing is None:
            ran.append(name)
        else:
            cuda.capturing.launch(lambda: ran.append(name))

    return work


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_failed_capture_runs_uncaptured_and_the_next_one_is_captured(
    moment: str, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    device, ran = CudaDevice(SECOND), list[str]()
    ticks = Ticks(device)
    ticks("unet_deep", "first", work_of(cuda, ran, "first"))
    cuda.fails = [moment]
    for _ in range(3):
        ticks("unet_deep", "first", work_of(cuda, ran, "first"))
    assert ran == ["first"] * 4 and cuda.captures == 1
    for _ in range(3):
        ticks("unet_deep", "second", work_of(cuda, ran, "second"))
    assert ran[4:] == ["second"] * 3, "the next capture is affected"
    assert cuda.captures == 2 and not cuda.recording_pools
    assert device.failed_captures == 1
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "runs uncaptured: CUDA error" in warning.message and "\n" not in warning.message


def test_earlier_captures_stay_and_only_the_first_failure_is_a_warning(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    device, ran = CudaDevice(SECOND), list[str]()
    ticks = Ticks(device)
    for _ in range(2):
        ticks("unet_deep", "good", work_of(cuda, ran, "good"))
    for key in ("bad", "worse"):
        ticks("unet_deep", key, work_of(cuda, ran, key))
        cuda.fails = [MIDDLE]
        ticks("unet_deep", key, work_of(cuda, ran, key))
    ticks("unet_deep", "good", work_of(cuda, ran, "good"))
    assert ran == ["good"] * 2 + ["bad"] * 2 + ["worse"] * 2 + ["good"]
    assert device.failed_captures == 2 and len(set(cuda.released)) == 2
    assert sum(r.levelno == logging.WARNING for r in caplog.records) == 1


def test_captures_start_a_new_pool_when_all_graphs_are_gone(cuda: FakeCuda) -> None:
    """A decoder's few recordings are all dropped when other sizes come."""
    device, ran = CudaDevice(SECOND), list[str]()
    for name in ("first", "second"):
        ticks = Ticks(device)
        for _ in range(3):
            ticks("unet_deep", name, work_of(cuda, ran, name))
        del ticks
    assert ran == ["first"] * 3 + ["second"] * 3
    assert cuda.captures == 2 and not device.failed_captures


def test_no_thread_waits_for_the_device_during_a_capture(cuda: FakeCuda) -> None:
    """CUDA refuses such a wait in any thread."""
    loop, decoder = CudaDevice(SECOND), CudaDevice(SECOND)
    has_begun, waited = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.wait()
        decoder.synchronize()
        waited.set()

    def work() -> None:
        has_begun.set()
        assert not waited.wait(0.05)
        assert cuda.capturing is not None
        cuda.capturing.launch(lambda: None)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        loop.capture(lambda _: work())
        waiting.result()


def test_an_error_of_the_work_itself_is_raised(cuda: FakeCuda) -> None:
    """The work runs uncaptured and raises its error."""

    def work() -> None:
        raise ValueError("a shape")

    device = CudaDevice(SECOND)
    with pytest.raises(CaptureFailed, match="a shape"):
        device.capture(lambda _: work())
    ticks = Ticks(device)
    ticks("unet_deep", "key", lambda: None)
    with pytest.raises(ValueError, match="a shape"):
        ticks("unet_deep", "key", work)


def test_the_loop_has_its_own_stream_on_its_own_gpu(cuda: FakeCuda) -> None:
    device = CudaDevice(SECOND)
    default = cuda.default_stream(SECOND)
    assert device.stream() == default.cuda_stream
    with device.on_stream():
        assert device.stream() == device.loop_stream.cuda_stream != default.cuda_stream
        assert cuda.thread_device == 1, "Triton takes the thread's device, not the tensors'"
        captured: list[FakeStream] = []
        device.capture(lambda _: captured.append(cuda.current_stream(SECOND)))
    assert captured[0].cuda_stream == device.capturing_stream
    streams = (device.capturing_stream, default.cuda_stream, device.loop_stream.cuda_stream)
    assert len(set(streams)) == 3


def test_a_chosen_stream_is_kept(cuda: FakeCuda) -> None:
    device, own = CudaDevice(SECOND), cuda.Stream(SECOND)
    with cuda.stream(own), device.on_stream():
        assert cuda.current_stream(SECOND) is own


def test_the_named_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 141 << 30

    def properties_of(device: torch.device) -> type[Properties]:
        asked.append(device)
        return Properties

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    found = local_target(SECOND)
    assert found is not None and found.key == "h200" and asked == [SECOND]
    assert numbered(torch.device("cuda")) == torch.device("cuda", 0)
    assert numbered(SECOND) == SECOND


def test_only_the_first_tick_of_a_network_runs_unrecorded(cuda: FakeCuda) -> None:
    """The first tick prepares the libraries. Only replays take the usual time."""
    ticks, ran = Ticks(CudaDevice(SECOND)), list[str]()
    keys = ["deep 8", "deep 8", "deep 4", "deep 4", "shallow 8", "deep 8"]
    usual = [ticks(key.split()[0], key, work_of(cuda, ran, key)) for key in keys]
    assert usual == [False, False, False, True, False, True] and ran == keys
    assert ticks.counts == {"unrecorded": 2, "captured": 2, "replayed": 2}


def test_nothing_is_recorded_at_once_while_first_runs_measure(cuda: FakeCuda) -> None:
    ticks, ran = Ticks(CudaDevice(SECOND), is_measuring=True), list[str]()
    for key in ("8 rows", "4 rows"):
        ticks("unet_deep", key, work_of(cuda, ran, key))
    assert ticks.counts == {"unrecorded": 2}


def test_the_oldest_recording_is_dropped_first(cuda: FakeCuda) -> None:
    ticks = Ticks(CudaDevice(SECOND))
    for number in range(MOST_TICKS + 3):
        ticks("unet_deep", number, lambda: None)
    assert list(ticks.recordings) == list(range(3, MOST_TICKS + 3))
