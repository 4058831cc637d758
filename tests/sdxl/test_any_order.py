"""The loop under any order of events: every image has one outcome, and its own latents."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sdxl.flight import Priority, State
from sdxl.inflight import Event, Failed, Finished, Request
from sdxl.scheduler_names import SCHEDULERS
from sdxl.specs import Architecture
from tests.fakes import ARCH, fake_engines
from tests.sdxl.flights import (
    EMBEDDING,
    INPAINTING,
    assert_same,
    engine,
    loop,
    masked_source,
    request,
)
from tests.sdxl.reference import denoise

STEPS = st.integers(1, 6)


class AnyOrder(RuleBasedStateMachine):
    """Admit, cancel, fail and tick in any order; urgent images pause others."""

    @initialize(
        cap=st.sampled_from([0, 2, 16]),
        rows=st.sampled_from([2, 3, 8]),
        arch=st.sampled_from([ARCH, INPAINTING, EMBEDDING]),
    )
    def begin(self, cap: int, rows: int, arch: Architecture) -> None:
        self.flight = loop(fake_engines(arch=arch), rows, paused_cache_rows=cap)
        self.open: dict[int, Request] = {}
        self.closed: set[int] = set()
        self.seeds = itertools.count()

    @rule(
        steps=STEPS,
        interval=st.integers(1, 4),
        scheduler=st.sampled_from([*SCHEDULERS]),
        guidance=st.sampled_from([0.0, 5.0]),
        side=st.sampled_from([8, 10]),
        tokens=st.sampled_from([77, 154]),
        priority=st.sampled_from(Priority),
        guided_steps=st.none() | st.sets(st.integers(0, 5)),
    )
    def submit(self, **kwargs: Any) -> None:
        seed, side = next(self.seeds), kwargs["side"]
        if self.flight.engines.arch.masked_channels:
            kwargs["source"] = masked_source(seed, side, side + 2)
        made = request(seed, arch=self.flight.engines.arch, **kwargs)
        self.open[self.flight.submit(made)] = made

    @rule()
    def tick(self) -> None:
        self.collect(self.flight.tick())

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.open)))
        self.flight.cancel(id_)
        self.close(id_)

    @rule(network=st.sampled_from(["unet_deep", "unet_shallow"]))
    def fail(self, network: str) -> None:
        broken = engine(self.flight, network)
        broken.fault = RuntimeError("planted")
        before = len(broken.calls)
        events = self.flight.tick()
        if len(broken.calls) > before:
            assert any(isinstance(e, Failed) for e in events)
        broken.fault = None
        self.collect(events)

    def collect(self, events: list[Event]) -> None:
        for event in events:
            made = self.open[event.id]
            self.close(event.id)
            if isinstance(event, Finished):
                assert_same(event.latents, denoise(self.flight.engines, made))
            else:
                assert str(event.cause) == "planted"

    def close(self, id_: int) -> None:
        assert id_ not in self.closed, f"image {id_} ended twice"
        self.closed.add(id_)
        del self.open[id_]

    @invariant()
    def nothing_is_lost_and_few_caches_wait(self) -> None:
        assert {f.id for f in self.flight.flights} == set(self.open)
        waiting = [f for f in self.flight.flights if f.state is State.PAUSED and f.needs_cache]
        held = sum(f.next_step.rows for f in waiting)
        assert held <= self.flight.limits.paused_cache_rows

    def teardown(self) -> None:
        if not hasattr(self, "flight"):
            return
        bound = sum(len(r.plan) * 5 for r in self.open.values()) + 5
        for _ in range(bound):
            self.collect(self.flight.tick())
        assert not self.open, f"starved: {sorted(self.open)}"
        assert self.flight.is_idle


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
