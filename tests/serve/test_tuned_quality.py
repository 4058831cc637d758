"""A quality with a tuned plan: over REST, in a job, and in the service's list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from sdxl import checkpoint
from sdxl.params import GenerationParams, Sizes
from sdxl.presets import EXACT, MEASURED, Preset, presets_of
from sdxl.source import GivenImage
from serve.batch.intake import Intake
from serve.batch.reading import Record
from serve.front.edits import prepare_edit
from serve.front.image_orders import orders_of, params_of
from serve.front.openai_images import ImageLimits, ImageRequest
from serve.orders import ModelCard
from serve.render.command import build_parser, read_order
from serve.settings import ServeSettings
from tests.serve.test_edits import hole, png

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
def test_other_steps_or_schedulers_drop_the_plan_s_deep_steps(fields: dict[str, Any]) -> None:
    found = asked(quality="low", **fields)
    assert found.deep_steps is None
    assert all(getattr(found, name) == value for name, value in fields.items())


@pytest.mark.parametrize("is_masked", [False, True])
def test_an_edit_of_all_steps_has_the_plan(is_masked: bool) -> None:
    request = ImageRequest(prompt="a ring", quality="low", size="128x128")
    image = GivenImage.read(png(128, 128), hole() if is_masked else None)
    wanted, _ = prepare_edit(request, image, CARD, ServeSettings())
    (order,) = orders_of(wanted, CARD, ServeSettings(), 0, 60.0)
    assert (order.params.taken_steps, order.params.cache_interval) == (20 if is_masked else 16, 3)
    assert order.params.deep_steps == (TUNED.deep_steps if is_masked else None)


def test_an_image_that_is_only_upscaled_has_a_quality_without_its_plan() -> None:
    request = ImageRequest(prompt="a ring", quality="low", upscale=1.5, size="128x128")
    wanted, _ = prepare_edit(request, GivenImage.read(png()), CARD, ServeSettings())
    (order,) = orders_of(wanted, CARD, ServeSettings(), 0, 60.0)
    assert (order.params.strength, order.params.deep_steps) == (0.4, None)


@pytest.mark.parametrize(("flags", "is_kept"), [((), False), (("--strength", "1"), True)])
def test_a_rendered_edit_has_the_plan_where_it_takes_all_steps(
    flags: tuple[str, ...], is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "find", lambda model: CARD)
    source = tmp_path / "a.png"
    source.write_bytes(png())
    asked = ["a ring", "--quality", "low", "--image", str(source), "--out", str(tmp_path), *flags]
    (request,) = read_order(build_parser().parse_args(asked)).requests
    assert request.deep_steps == (TUNED.deep_steps if is_kept else None)


@pytest.mark.parametrize(
    ("values", "is_kept"),
    [
        ({}, True),
        ({"steps": 8}, False),
        ({"scheduler": "ddim"}, False),
        ({"image": "a.png"}, False),
        ({"image": "a.png", "mask": "b.png"}, True),
        ({"image": "a.png", "strength": 1.0}, True),
        ({"image": "a.png", "strength": 0.5}, False),
    ],
)
def test_rows_of_a_job_follow_the_plan(values: dict[str, Any], is_kept: bool) -> None:
    intake = Intake(TUNED.beside({}), 1, CARD.id, CARD.sizes, "png", CARD.presets)
    (row,) = intake.rows([Record("a.jsonl:1", {"prompt": "a ring", **values}, folder="/")])
    assert row.params is not None, row.error
    assert row.params.deep_steps == (TUNED.deep_steps if is_kept else None)
    assert row.params.guidance_interval == TUNED.guidance_interval
    flags = {**TUNED.beside({}), "deep_steps": (0, 5)}
    (row,) = replace(intake, defaults=flags).rows(
        [Record("a.jsonl:1", {"prompt": "a ring", **values}, folder="/")]
    )
    assert row.params is not None and row.params.deep_steps == (0, 5), "as a flag said"


def test_a_service_of_fewer_steps_has_none_of_the_plans_deep_steps() -> None:
    found = asked(ServeSettings(max_steps=12), quality="low")
    assert (found.steps, found.deep_steps) == (12, None)


def test_a_services_list_of_qualities_can_be_read_again() -> None:
    limits = ImageLimits.of(CARD, ServeSettings())
    shown = TypeAdapter(dict[str, Any]).validate_json(limits.model_dump_json())
    assert presets_of(shown["presets"]) == CARD.presets
