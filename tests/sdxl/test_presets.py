"""A quality's name means the model's own preset, or a default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdxl.checkpoint import Checkpoint, CheckpointError, find
from sdxl.params import InvalidParams
from sdxl.presets import (
    EXACT,
    FILE,
    MEASURED,
    UNMEASURED,
    Preset,
    as_file,
    load_presets,
    preset_named,
)
from sdxl.single_file.folder import MINI_FILES


def test_a_model_without_presets_has_the_default_and_one_with_them_its_own(tmp_path: Path) -> None:
    model = Checkpoint("foreign", tmp_path)
    assert model.presets == UNMEASURED
    own = {name: Preset(n, 1) for n, name in enumerate(MEASURED, 7)} | EXACT
    (tmp_path / FILE).write_bytes(as_file(own, {"task": "a task", "pictures": 5}))
    assert Checkpoint("foreign", tmp_path).presets == own
    assert preset_named(own, "low").values() == {"steps": 7, "cache_interval": 1}


def test_the_embedded_model_has_presets_among_its_files() -> None:
    assert find("mini").presets["high"] == Preset(20, 1) != UNMEASURED["high"]
    assert FILE in MINI_FILES


def with_presets(**fields: object) -> str:
    preset = {"steps": 20, "cache_interval": 1, **fields}
    return json.dumps({"presets": dict.fromkeys(MEASURED, preset)})


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"presets": {}}', '{"presets": {"low": 5}}'),
        *(with_presets(steps=steps) for steps in (0, "20", 2.5, True, None)),
        *(with_presets(deep_steps=deep) for deep in ([1, 2], [0, 20], [0, 0], "0,1", [0, 1.5], [])),
    ],
)
def test_invalid_presets_are_one_line_that_says_what_the_file_needs(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text(text)
    expected = r"presets\.json: needs steps and cache_interval"
    with pytest.raises(CheckpointError, match=expected) as caught:
        _ = Checkpoint("foreign", tmp_path).presets
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_preset_is_refused_by_name() -> None:
    with pytest.raises(InvalidParams, match="quality must be one of low, .*, got 'best'"):
        preset_named(UNMEASURED, "best")


# -- of tuned plans -------------------------------------------------------------------------

TUNED = Preset(20, 3, "euler", (0, 1, 3, 6, 10, 15), (0.0, 0.6))


def test_a_tuned_plan_is_stored_and_read_for_its_own_model_alone(tmp_path: Path) -> None:
    own = dict.fromkeys(MEASURED, TUNED) | EXACT
    (tmp_path / FILE).write_bytes(as_file(own, {"task": "a task"}, "a" * 64))
    assert load_presets(tmp_path, lambda: "a" * 64) == own
    with pytest.raises(CheckpointError, match="measured on the model aaaaaaaaaaaa, expected bbbb"):
        load_presets(tmp_path, lambda: "b" * 64)


def test_request_fields_override_and_a_plan_for_other_steps_is_left_out() -> None:
    assert TUNED.beside({})["deep_steps"] == TUNED.deep_steps
    same = TUNED.beside({"steps": 20, "scheduler": "euler", "guidance": 7.0, "seed": None})
    assert same["deep_steps"] == TUNED.deep_steps and same["guidance"] == 7.0
    assert "seed" not in same, "the request leaves it open"
    for other in ({"steps": 10}, {"scheduler": "ddim"}, {"cache_interval": 2}, {"strength": 0.5}):
        fields = TUNED.beside(other)
        assert "deep_steps" not in fields and fields.items() >= other.items()
    assert TUNED.beside({"steps": 10, "deep_steps": (0, 4)})["deep_steps"] == (0, 4)


def test_an_edit_that_names_no_strength_has_no_plan_for_more_steps_than_it_takes() -> None:
    """An edit with a mask takes all of its steps."""
    assert "deep_steps" not in TUNED.beside({"strength": None}, edit_strength=0.8)
    assert TUNED.beside({}, edit_strength=1.0)["deep_steps"] == TUNED.deep_steps
    assert TUNED.beside({"strength": 1.0}, edit_strength=0.8)["deep_steps"] == TUNED.deep_steps
    assert TUNED.beside({"deep_steps": (0, 4)}, edit_strength=0.8)["deep_steps"] == (0, 4)
    assert "strength" not in TUNED.beside({}, edit_strength=0.8), "the edit fills it"


def test_a_plan_without_a_scheduler_is_for_the_default_one() -> None:
    preset = Preset(20, 3, deep_steps=(0, 5))
    assert preset.beside({"scheduler": "euler"})["deep_steps"] == (0, 5)
    assert "deep_steps" not in preset.beside({"scheduler": "ddim"})


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        ({}, 2),
        ({"steps": 30}, 2),
        ({"steps": 4}, None),
        ({"upscale": 2.0, "upscale_steps": 4}, None),
        ({"steps": 4, "cache_interval": 3}, 3),
    ],
)
def test_the_default_preset_sets_no_interval_for_few_steps(
    given: dict[str, Any], interval: int | None
) -> None:
    preset = Preset(20, 2)
    assert preset.beside(given, is_named=False).get("cache_interval") == interval
    assert preset.beside(given)["cache_interval"] == (interval or 2), "a named one does"


def test_a_preset_of_few_steps_keeps_its_interval() -> None:
    few = Preset(6, 2)
    assert few.beside({"steps": 6}, is_named=False)["cache_interval"] == 2
    assert "cache_interval" not in few.beside({"steps": 5}, is_named=False)


def test_the_page_of_models_names_the_presets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    cells = [
        line.strip("| ").split(" | ") for line in page.splitlines() if " steps, interval" in line
    ]
    shown = {row[0].split(",")[0]: row[1:] for row in cells if len(row) == 3}
    for column, presets in enumerate((find("mini").presets, UNMEASURED)):
        table = {name: shown[name][column].replace("the same", shown[name][0]) for name in presets}
        assert table == {name: preset.describe() for name, preset in presets.items()}
