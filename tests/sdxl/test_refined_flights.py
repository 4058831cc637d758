"""Plans, calls and costs of pictures whose last steps a refiner takes, on plain data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdxl.cost import CostKey, Costs, all_ready_s, project
from sdxl.deepcache import Step, StepPlan, plan
from sdxl.flight import CallKey, Flight, Network, State, Variant
from sdxl.policy import Limits, groups_of
from tests.fakes import axes

SHAPE = axes(8, 8)
LIMITS = Limits(buckets=(2, 4), rows=4)
REFINED = Flight(0, SHAPE, plan(6, 2, refined_from=3), state=State.RUNNING)


def costs(**seconds: float) -> Costs:
    """Seconds of a call in any bucket, by network; the refiner's names begin with `refined_`."""
    known: dict[CostKey, float] = {}
    for name, each in seconds.items():
        network: Network = "unet_deep" if name.endswith("deep") else "unet_shallow"
        call = CallKey(network, SHAPE, is_refined=name.startswith("refined"))
        known |= {CostKey(call, bucket): each for bucket in LIMITS.buckets}
    return Costs(known)


def test_both_models_are_in_the_work_and_in_the_eta() -> None:
    known = costs(deep=1.0, shallow=0.1, refined_deep=10.0, refined_shallow=3.0)
    expected = 2 * 1.0 + 0.1 + 2 * 10.0 + 3.0
    alone = replace(LIMITS, buckets=(2,), rows=2)
    assert known.work_s(REFINED, alone) == pytest.approx(expected)
    assert project([REFINED], LIMITS, known, 0.0)[0] == pytest.approx(expected)
    assert all_ready_s([REFINED], LIMITS, known, 0.0) == float("inf")


def test_a_refiner_that_was_never_measured_costs_as_the_model_does() -> None:
    known = costs(deep=1.0, shallow=0.1)
    assert project([REFINED], LIMITS, known, 0.0)[0] == pytest.approx(4 * 1.0 + 2 * 0.1)


def test_calls_of_two_models_are_apart() -> None:
    flights = [replace(REFINED, step=step, id=step) for step in (0, 2, 3, 5)]
    found = [(g.call.network, g.call.is_refined, g.ids) for g in groups_of(flights, LIMITS)]
    assert found == [
        ("unet_deep", False, (0, 2)),
        ("unet_deep", True, (3, 5)),
    ]


def test_images_wait_only_for_deep_steps_of_the_same_model() -> None:
    shallow = replace(REFINED, plan=plan(6, 2, refined_from=4), step=3)
    assert shallow.to_deep == 1
    assert shallow.batch_key == replace(shallow, step=4).batch_key
    assert shallow.batch_key != replace(shallow, step=0).batch_key


def test_what_a_request_adds_to_the_model_does_not_act_in_the_refiner() -> None:
    with_loras = replace(REFINED, variant=Variant("lora", 1))
    assert with_loras.step_variant == Variant("lora", 1)
    assert with_loras.advanced(3).step_variant == Variant()


def test_a_refiner_begins_with_a_deep_step() -> None:
    with pytest.raises(ValueError, match="step 1 is shallow: the refiner begins"):
        StepPlan([Step(True), Step(False, is_refined=True)])
