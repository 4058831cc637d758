"""What a quality's name stands for: the model's own, or a default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdxl.checkpoint import Checkpoint, CheckpointError, find
from sdxl.params import InvalidParams
from sdxl.presets import EXACT, FILE, MEASURED, UNMEASURED, Preset, as_file, preset_named
from sdxl.single_file.folder import MINI_FILES


def test_a_model_without_presets_has_the_default_and_one_with_them_its_own(tmp_path: Path) -> None:
    model = Checkpoint("foreign", tmp_path)
    assert model.presets == UNMEASURED
    own = {name: Preset(n, 1) for n, name in enumerate(MEASURED, 7)} | EXACT
    (tmp_path / FILE).write_bytes(as_file(own, {"task": "a task", "pictures": 5}))
    assert Checkpoint("foreign", tmp_path).presets == own
    assert preset_named(own, "low") == {"steps": 7, "cache_interval": 1}


def test_the_embedded_model_has_its_own_which_go_where_it_goes() -> None:
    assert find("mini").presets["low"] == Preset(10, 1) != UNMEASURED["low"]
    assert FILE in MINI_FILES


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"presets": {}}', '{"presets": {"low": 5}}']
    + [
        json.dumps({"presets": {name: {"steps": s, "cache_interval": 1} for name in MEASURED}})
        for s in (0, "20", 2.5, True, None)
    ],
)
def test_a_file_that_holds_no_presets_is_one_line_that_says_what_it_should_hold(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"presets\.json: needed steps and") as caught:
        _ = Checkpoint("foreign", tmp_path).presets
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_preset_is_refused_by_name() -> None:
    with pytest.raises(InvalidParams, match="quality: 'best' is not allowed; needed one of low"):
        preset_named(UNMEASURED, "best")
