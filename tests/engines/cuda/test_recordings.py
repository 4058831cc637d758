"""Ticks are run, recorded and replayed by their key, and what is kept is bounded."""

from __future__ import annotations

from collections.abc import Callable

from engines.cuda.recordings import MAX_TICKS, Ticks
from tests.engines.trt_double import FakeDevice


def counting(device: FakeDevice, ran: list[str], name: str) -> Callable[[], None]:
    """Work that, while the device captures, is noted and not done."""

    def work() -> None:
        if device.recorded is None:
            ran.append(name)
        else:
            device.recorded.append(lambda: ran.append(name))

    return work


def test_a_tick_runs_is_recorded_and_is_replayed() -> None:
    device, ran = FakeDevice(), list[str]()
    ticks = Ticks(device)
    for _ in range(4):
        ticks("key", counting(device, ran, "tick"))
    assert (device.captures, device.replays, ran) == (1, 3, ["tick"] * 4)


def test_another_key_is_another_recording() -> None:
    device, ran = FakeDevice(), list[str]()
    ticks = Ticks(device)
    for key in ("deep", "shallow", "deep", "shallow"):
        ticks(key, counting(device, ran, key))
    assert (device.captures, device.replays) == (2, 2)
    assert ran == ["deep", "shallow"] * 2


def test_the_oldest_recording_goes_first() -> None:
    device = FakeDevice()
    ticks = Ticks(device)
    for number in range(MAX_TICKS + 3):
        ticks(number, counting(device, [], "tick"))
    assert list(ticks.recordings) == list(range(3, MAX_TICKS + 3))
