"""Guidance in a part of the steps works equally by flag, REST field, batch column and metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from starlette.datastructures import FormData

from sdxl.arguments import given_params
from sdxl.images import stored_fields
from sdxl.params import PARAMETERS, GenerationParams, Sizes
from serve.batch.intake import Intake
from serve.batch.reading import read
from serve.front.edits import fields_of
from serve.front.openai_images import FormControl, ImageRequest
from serve.render.command import build_parser

WANTED = {"guidance_interval": (0.0, 0.6), "guided_steps": (0, 1, 4)}
MADE = GenerationParams("a star", seed=3, width=64, height=64, **WANTED)  # type: ignore[arg-type]


def test_flags_and_fields_give_the_same_parameters() -> None:
    flags = ["a star", "--guidance-interval", "0,0.6", "--guided-steps", "0,1,4"]
    asked = given_params(build_parser().parse_args(flags))
    assert {name: asked[name] for name in WANTED} == WANTED
    body = '{"prompt": "a star", "guidance_interval": [0, 0.6], "guided_steps": [0, 1, 4]}'
    request = ImageRequest.model_validate_json(body)
    assert {name: tuple(getattr(request, name)) for name in WANTED} == WANTED
    assert MADE.as_rest()["guidance_interval"] == (0.0, 0.6)
    with pytest.raises(ValidationError, match="guided_steps"):
        ImageRequest.model_validate_json('{"prompt": "a", "guided_steps": [0.5]}')


def test_a_form_of_an_edit_gives_the_same_parameters() -> None:
    form = FormData([("guidance_interval", "0,0.6"), ("guided_steps", "0,1,4")])
    assert fields_of(form) == {name: list(value) for name, value in WANTED.items()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'prompt,guidance_interval,guided_steps\na star,"0,0.6","0,1,4"\n'),
        (
            "a.jsonl",
            '{"prompt": "a star", "guidance_interval": [0, 0.6], "guided_steps": [0, 1, 4]}\n',
        ),
    ],
)
def test_columns_of_a_batch_give_the_same_parameters(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    intake = Intake({}, 1, "sdxl-mini", Sizes(128, 64, 512), "png")
    (row,) = intake.rows(read([tmp_path / name]))
    assert row.params is not None, row.error
    assert {each: getattr(row.params, each) for each in WANTED} == WANTED


def test_a_picture_stores_the_guided_steps_only_if_requested() -> None:
    plain = GenerationParams("a star", seed=3, width=64, height=64)
    stored = [set(stored_fields(each.as_dict())) & set(WANTED) for each in (plain, MADE)]
    assert stored == [set(), set(WANTED)]


def test_the_form_receives_the_types_of_its_lists_items() -> None:
    controls = {name: FormControl.of(PARAMETERS[name]) for name in (*WANTED, "deep_steps", "steps")}
    assert [each.items for each in controls.values()] == ["number", "integer", "integer", None]
