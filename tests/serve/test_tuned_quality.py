"""A quality that stands for a tuned plan: over REST, in a job, and as a service tells it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from sdxl.params import GenerationParams, Sizes
from sdxl.presets import EXACT, MEASURED, Preset, presets_of
from serve.front.image_orders import params_of
from serve.front.openai_images import ImageLimits, ImageRequest
from serve.orders import ModelCard
from serve.settings import ServeSettings

TUNED = Preset(20, 3, "euler", (0, 1, 3, 6, 10, 15), (0.0, 0.6))
CARD = ModelCard(
    "a-model", Sizes(128, 64, 512), presets={**dict.fromkeys(MEASURED, TUNED), **EXACT}
)


def asked(settings: ServeSettings | None = None, **fields: Any) -> GenerationParams:
    request = ImageRequest(prompt="a ring", **fields)
    return params_of(request, CARD, settings or ServeSettings())


def test_a_quality_brings_its_whole_plan() -> None:
    found = asked(quality="low")
    assert (found.steps, found.scheduler, found.deep_steps) == (20, "euler", TUNED.deep_steps)
    assert found.guidance_interval == (0.0, 0.6)


@pytest.mark.parametrize("fields", [{"steps": 10}, {"scheduler": "ddim"}, {"cache_interval": 2}])
def test_a_request_that_names_another_course_has_no_part_of_the_plans_deep_steps(
    fields: dict[str, Any],
) -> None:
    found = asked(quality="low", **fields)
    assert found.deep_steps is None
    assert all(getattr(found, name) == value for name, value in fields.items())


def test_a_service_of_fewer_steps_has_none_of_the_plans_deep_steps() -> None:
    found = asked(ServeSettings(max_steps=12), quality="low")
    assert (found.steps, found.deep_steps) == (12, None)


def test_what_a_service_tells_of_its_qualities_can_be_read_again() -> None:
    limits = ImageLimits.of(CARD, ServeSettings())
    told = TypeAdapter(dict[str, Any]).validate_json(limits.model_dump_json())
    assert presets_of(told["presets"]) == CARD.presets
