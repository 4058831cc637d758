"""The replicas that answered lately."""

from __future__ import annotations

from serve.fleet.liveness import SILENCE_S, Liveness
from tests.fakes import FakeClock


def test_a_replica_that_does_not_answer_is_silent_until_it_does() -> None:
    clock = FakeClock()
    known = Liveness(clock)
    known.keep({"a", "b"})
    assert not known.is_silent("a")
    clock.now += SILENCE_S / 2
    known.note_answer("b")
    clock.now += SILENCE_S / 2 + 0.1
    assert known.is_silent("a") and not known.is_silent("b") and known.has_any
    known.note_answer("a")
    assert not known.is_silent("a")


def test_lost_replicas_are_forgotten_and_new_ones_have_time_to_answer() -> None:
    clock = FakeClock()
    known = Liveness(clock)
    known.keep({"old"})
    clock.now += 100
    known.keep({"new"})
    assert not known.is_silent("new") and known.has_any
    assert not known.is_silent("unheard of")
    assert not Liveness(clock).has_any


def test_one_failure_makes_a_replica_silent_and_keeps_when_it_last_answered() -> None:
    clock = FakeClock()
    known = Liveness(clock)
    known.note_answer("a")
    clock.now += 0.3
    known.note_lost("a")
    assert known.is_silent("a") and not known.has_any
    assert round(known.unheard_s("a"), 6) == 0.3
    known.note_answer("a")
    assert not known.is_silent("a")


def test_a_leaving_replica_keeps_its_orders_and_gets_no_others() -> None:
    clock = FakeClock()
    known = Liveness(clock)
    known.note_holder("order", "leaving")
    assert known.holders == {"leaving"}
    known.keep({"hangs"}, {"leaving"})
    clock.now += 100
    known.note_answer("leaving")
    assert known.unheard_s("leaving") == 0 and known.unheard_s("hangs") == 100
    assert not known.has_any and known.count == 1
    known.forget("order")
    assert known.holders == set()
