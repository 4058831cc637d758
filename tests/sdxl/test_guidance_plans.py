"""Guidance in a part of the steps: the plan for a request's fields, less work for fewer rows, and
pictures equal to a plain loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sdxl import deepcache
from sdxl.cost import project
from sdxl.deepcache import Step, StepPlan, plan, plan_of
from sdxl.flight import Flight, State
from sdxl.params import GenerationParams, Sizes
from sdxl.pipeline import Pipeline
from sdxl.policy import Limits, plan_tick
from sdxl.work import standard_images
from tests.conftest import assert_picture
from tests.fakes import axes, fake_engines
from tests.sdxl.flights import assert_same, engine, latents_of, loop
from tests.sdxl.reference import denoise
from tests.sdxl.sharing import device_costs
from tests.sdxl.test_inflight import MIX
from tests.sdxl.test_pipeline import PROMPT
from tests.sdxl.their_schedulers import diffusers_image

SHAPE = axes(64, 64)


def guided(asked: StepPlan) -> list[int]:
    return [number for number, step in enumerate(asked) if step.is_guided]


def asked(**fields: Any) -> list[int]:
    return guided(plan_of(GenerationParams(**{"cache_interval": 1, **fields})))


def test_guidance_in_every_step_equals_the_default_plan() -> None:
    usual = plan_of(GenerationParams())
    assert usual == tuple(Step(number % 2 == 0, True) for number in range(20))
    for same in ({"guidance_interval": (0.0, 1.0)}, {"guided_steps": tuple(range(20))}):
        assert plan_of(GenerationParams(**same)) == usual
    assert guided(plan_of(GenerationParams(guidance=1.0, guidance_interval=(0.0, 1.0)))) == []


@given(st.integers(1, 60), st.integers(0, 100), st.integers(0, 100))
def test_an_interval_has_the_steps_of_diffusers_guiders(steps: int, begin: int, end: int) -> None:
    """diffusers' guiders compare the step's number with int(share * steps)."""
    if begin >= end:
        return
    # Computed in whole hundredths, without float rounding.
    first, last = begin * steps // 100, end * steps // 100
    found = asked(steps=steps, guidance_interval=(begin / 100, end / 100))
    assert found == list(range(first, last))


def test_guidance_that_would_begin_at_a_shallow_step_begins_at_the_next_deep_one() -> None:
    found = asked(steps=9, cache_interval=3, guided_steps=tuple(range(1, 8)))
    assert found == [3, 4, 5, 6, 7]
    assert asked(steps=9, cache_interval=3, guided_steps=(0, 2, 4, 7)) == [0]
    assert asked(steps=6, deep_steps=(0, 4), guidance_interval=(0.5, 1.0)) == [4, 5]


def test_an_edit_is_guided_at_the_same_noise_as_a_picture_from_text() -> None:
    whole = asked(steps=20, guidance_interval=(0.2, 0.7))
    edit = asked(steps=20, guidance_interval=(0.2, 0.7), strength=0.5)
    assert whole == list(range(4, 14)) and edit == [step - 10 for step in whole if step >= 10]


def test_a_plan_that_reads_missing_features_is_refused() -> None:
    with pytest.raises(ValueError, match="first step"):
        StepPlan([Step(False)])
    with pytest.raises(ValueError, match="step 2 is shallow"):
        StepPlan([Step(True), Step(False, False), Step(False, True)])


@given(st.integers(1, 30), st.integers(1, 5), st.sets(st.integers(0, 29)))
def test_a_plans_reported_steps_equal_its_counted_ones(
    steps: int, interval: int, wanted: set[int]
) -> None:
    made = plan(steps, interval, guided_steps=wanted)
    rows = [step.rows for step in made]
    for number in range(steps):
        assert made.room[number] == max(rows[number:])
        until = next(n for n in range(number + 1, steps + 1) if made.room[n] != made.room[number])
        assert made.steady[number] == until - number
        assert made.rows_before[number] == sum(rows[:number])
    assert made.rows(is_deep=True) + made.rows(is_deep=False) == sum(rows)


def test_work_is_counted_in_the_rows_that_run() -> None:
    own = Sizes(128, 64, 512)
    half = standard_images(GenerationParams(guidance_interval=(0.0, 0.5)), own)
    assert half == pytest.approx(0.75)
    assert standard_images(GenerationParams(guidance=1.0), own) == pytest.approx(0.5)
    costs, limits = device_costs(), Limits((1, 2, 4, 8), 8)
    whole_s, half_s = (
        costs.work_s(Flight(0, SHAPE, plan(20, 2, guided_steps=steps)), limits)
        for steps in (None, range(10))
    )
    assert half_s == pytest.approx(0.75 * whole_s)


def test_an_image_whose_guidance_has_ended_makes_room_and_the_estimate_knows() -> None:
    limits, costs = Limits((1, 2), 2), device_costs()
    short = plan(8, 1, guided_steps=range(4))
    first = Flight(0, SHAPE, short, state=State.RUNNING)
    second = Flight(1, SHAPE, plan(4, 1, guided_steps=()))
    for step in range(8):
        found = plan_tick([replace(first, step=step), second], limits, 0.0)
        assert found.admitted == (() if step < 4 else (1,)), f"at step {step}"
        assert sum(group.bucket for group in found.groups) == 2
    two_s = 0.010 + 2 * 0.010
    expected = {0: pytest.approx(8 * two_s), 1: pytest.approx(8 * two_s)}
    assert project([first, second], limits, costs, 0.0) == expected
    alone = project([first], limits, costs, 0.0)[0]
    assert alone == pytest.approx(4 * two_s + 4 * 0.020)


def test_calls_have_no_row_for_an_unused_negative_prompt() -> None:
    flight = loop()
    flight.submit(replace(MIX[0], plan=plan(4, 2, guided_steps=range(2))))
    flight.drain()
    for network in ("unet_deep", "unet_shallow"):
        assert [call["sample"][0] for call in engine(flight, network).calls] == [2, 1]


def test_a_recorded_tick_is_right_for_all_requests_with_its_key() -> None:
    """A GPU replays the recorded work of the first request with a key on that request's tensors."""
    recorded: dict[Hashable, Callable[[], None]] = {}

    def replay(network: str, key: Hashable, work: Callable[[], None]) -> bool:
        recorded.setdefault(key, work)()
        return True

    flight = loop(replace(fake_engines(), run_recorded=replay))
    wanted = [r for r in MIX if (r.latent_h, r.conditioning.tokens) == (8, 77)]
    for requests in (wanted, wanted[::-1], wanted[2:]):
        ids = [flight.submit(r) for r in requests]
        found = latents_of(flight.drain())
        for id_, request in zip(ids, requests, strict=True):
            assert_same(found[id_], denoise(fake_engines(), request))
    assert len(recorded) < flight.steps_taken


def test_guidance_that_ends_early_equals_diffusers(mini: Pipeline, diffusers_mini: Any) -> None:
    asked = GenerationParams(PROMPT, seed=5, steps=10, cache_interval=1)
    (result,) = mini.generate([replace(asked, guidance_interval=(0.0, 0.5))])
    names = ["prompt_embeds", "add_text_embeds", "add_time_ids"]

    def end(pipe: Any, step: int, _: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Switch diffusers' guidance off after five steps."""
        if step != 4:
            return {}
        pipe._guidance_scale = 1.0
        return {name: tensors[name][1:] for name in names}

    more: dict[str, Any] = {
        "callback_on_step_end": end,
        "callback_on_step_end_tensor_inputs": names,
    }
    assert_picture(result, diffusers_image(diffusers_mini, result.params, **more))


def test_the_plan_of_a_request_needs_a_negative_prompt_where_it_is_guided() -> None:
    with pytest.raises(ValueError, match="negative prompt"):
        replace(MIX[2], plan=deepcache.plan(1, 1))
