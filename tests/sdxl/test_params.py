"""Every field of a request is checked once; the error names field, value and allowed values."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdxl.admission import Refused
from sdxl.attachments import Lora
from sdxl.files import OutputError
from sdxl.params import GenerationParams, InvalidParams, Sizes

SIZES = Sizes(default=128, minimum=64, maximum=512)


INVALID: dict[str, list[Any]] = {
    "steps": [0, 10_000, 2.5, True],
    "guidance": [math.nan, -1.0, "5"],
    "seed": [-1, 2**64],
    "scheduler": ["magic"],
    "cache_interval": [0],
    "deep_steps": [[1, 2], [0, 20], [0, 0], 3, ["a"]],
    "guidance_interval": [[0.5], [0.6, 0.2], [0.0, 1.5], [0.0, math.nan], "0,1"],
    "guided_steps": [[3, 2], [0.5], [20]],
    "prompt": [None, "x" * 10_001, "\ud800"],
    "negative_prompt": [7],
    "colour": ["red"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in INVALID.items() for value in values]
)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidParams) as error:
        GenerationParams.from_dict({field: value})
    assert error.value.field == field
    assert error.value.allowed


@pytest.mark.parametrize("name", ["deep_steps", "guided_steps"])
def test_an_edits_steps_are_numbered_from_the_first_that_is_taken(name: str) -> None:
    half: dict[str, Any] = {"steps": 20, "strength": 0.5}
    GenerationParams(**half | {name: (0, 9)})
    with pytest.raises(InvalidParams, match=f"{name} must be .* numbers from 0 to 9, got .*10"):
        GenerationParams(**half | {name: (0, 10)})
    with pytest.raises(InvalidParams, match=r"^strength must be at least 0\.05 .* got 0\.049"):
        GenerationParams(**half | {"strength": 0.049, name: (0, 10)})


@pytest.mark.parametrize("side", ["width", "height"])
@pytest.mark.parametrize("value", [0, 100, 56, 520, 12.0, True])
def test_sizes_are_the_models(side: str, value: Any) -> None:
    asked = GenerationParams.from_dict({side: value})
    with pytest.raises(InvalidParams, match=rf"{side} must be a multiple of 8 from 64 to 512"):
        asked.resolve(SIZES, lambda: 0)


@pytest.mark.parametrize(
    "error",
    [
        InvalidParams("steps", 0, "must be 1"),
        OutputError(Path("x"), OSError(28, "full"), "space"),
        Refused("too late", 2.5, "too_late"),
    ],
)
def test_errors_can_be_sent_between_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert vars(again).keys() == vars(error).keys()


def test_missing_fields_are_filled() -> None:
    found = GenerationParams("a", width=64).resolve(SIZES, lambda: 42)
    assert found == GenerationParams("a", width=64, height=128, seed=42, cache_interval=2)


@given(
    st.builds(
        GenerationParams,
        prompt=st.text(max_size=50),
        steps=st.integers(5, 1000),
        guidance=st.floats(0, 100),
        seed=st.integers(0, 2**63 - 1),
        deep_steps=st.one_of(st.none(), st.just((0, 3))),
        guidance_interval=st.one_of(st.none(), st.just((0.25, 0.7))),
        guided_steps=st.one_of(st.none(), st.just((1, 2))),
        loras=st.one_of(st.none(), st.just((Lora("a", 0.5), Lora("b", 1.0, 0.0)))),
    )
)
def test_a_request_survives_a_round_trip(params: GenerationParams) -> None:
    assert GenerationParams.from_dict(params.as_dict()) == params


@pytest.mark.parametrize(
    ("asked", "interval"),
    [
        ({"steps": 7}, 1),
        ({"steps": 8}, 2),
        ({}, 2),
        ({"steps": 4, "cache_interval": 2}, 2),
        ({"steps": 4, "strength": 1.0}, 1),
        # The two steps taken of twenty are as close together as all twenty.
        ({"steps": 20, "strength": 0.1}, 2),
        ({"steps": 20, "upscale": 2.0, "upscale_strength": 0.1}, 2),
        ({"steps": 4, "upscale": 2.0, "upscale_steps": 20}, 1),
        ({"steps": 20, "upscale": 2.0, "upscale_steps": 5}, 1),
    ],
)
def test_few_steps_are_all_deep_by_default(asked: dict[str, Any], interval: int) -> None:
    params = GenerationParams(seed=1, **asked)
    resolved = params.resolve(SIZES, lambda: 0)
    assert resolved.cache_interval == params.interval == interval
    assert all(leg.interval == interval for leg in resolved.legs)
    again = GenerationParams.from_dict(resolved.as_dict())
    assert again.resolve(SIZES, lambda: 0) == resolved, "what a picture says makes it again"
    assert params.as_rest()["cache_interval"] == interval, "a service may have other defaults"


def test_an_image_that_is_only_upscaled_counts_the_upscaling_steps() -> None:
    asked = GenerationParams(steps=4, upscale=2.0, upscale_steps=20)
    assert asked.for_edit(has_mask=False).interval == 2
