"""Engine calls that never return are detected by the durations of earlier calls."""

from __future__ import annotations

import threading

import pytest

from sdxl.flight import CallKey
from sdxl.inflight import InFlight
from sdxl.policy import Group, Limits
from serve.errors import Problem
from serve.worker.denoiser import Denoiser
from serve.worker.replica import ImageReplica
from serve.worker.stalls import FIRST_S, TIMES, Calls, Unhealthy, patience_s
from tests.fakes import fake_engines
from tests.serve.workers import fake, fake_pipeline, order, running

SMALL, LARGE = ((("latent_h", side), ("latent_w", side)) for side in (64, 128))


@pytest.mark.parametrize("network", ["clip_g", "unet_deep", "unet_shallow", "vae_decoder"])
async def test_an_order_inside_a_call_that_never_returns_is_given_back(network: str) -> None:
    """The replica whose engine hangs returns the order, for another replica to make."""
    pipeline, may_end = fake_pipeline(), threading.Event()
    with running(pipeline, stall_s=0.3) as worker:
        replica = ImageReplica.__new__(ImageReplica)
        replica.worker = worker
        fake(pipeline, network).on_call = may_end.wait
        try:
            *_, last = [update async for update in replica.generate(order(deadline_s=60))]
            with pytest.raises(Unhealthy):
                await replica.record_routing_stats()
        finally:
            may_end.set()
        del replica.worker
    assert isinstance(last, Problem) and last.code == "unhealthy", last


def test_the_limit_of_a_call_follows_measured_times() -> None:
    assert patience_s(None, 3) == FIRST_S
    assert patience_s(0.02, 3) == 3
    assert patience_s(60, 3) == 60 * TIMES
    assert patience_s(None, 3, alike_s=0.1) == FIRST_S
    assert patience_s(None, 3, alike_s=60) == 60 * TIMES


def test_a_call_is_judged_by_its_own_kind() -> None:
    now = 0.0
    calls = Calls("a call", lambda: now, 3.0)
    calls.expect("small", 0.1)
    with calls.watch("large"):
        now += FIRST_S - 1
        calls.check()
    with calls.watch("small"):
        now += 3.1
        with pytest.raises(Unhealthy, match=r"a call has not ended after 3\.1 s"):
            calls.check()
    calls.check()
    with calls.watch("large"):
        now += 2 * FIRST_S
        calls.check()
    with calls.watch("larger"):
        now += 4 * FIRST_S
        calls.check()


def test_a_size_that_is_new_on_a_slow_machine_may_take_its_time() -> None:
    """On a processor a call of SDXL's own size takes minutes, and nothing was timed before."""
    now = 0.0
    denoiser = Denoiser(InFlight(fake_engines(), lambda: now, Limits((1, 2), 2)))
    known, new = (Group(CallKey("unet_deep", size), (), 2) for size in (SMALL, LARGE))
    denoiser.loop.costs.observe(known, 90.0)
    for group in (known, new):
        denoiser.loop.call = group, now
        now += 600
        denoiser.check()
    now += 10_000
    with pytest.raises(Unhealthy, match="the loop has not advanced"):
        denoiser.check()


def test_a_call_of_minutes_that_has_just_ended_is_no_stall() -> None:
    now = 0.0
    denoiser = Denoiser(InFlight(fake_engines(), lambda: now, Limits((1, 2), 2)))
    now += 2 * FIRST_S
    with pytest.raises(Unhealthy, match="the loop has not advanced"):
        denoiser.check()
    denoiser.loop.settled_s = now
    denoiser.check()
