"""How a calibration's progress is told."""

from __future__ import annotations

import pytest

from onnx_export.calibration_progress import in_words, progress_line


def test_what_is_left_takes_as_long_as_what_is_done() -> None:
    assert progress_line(2, 32, 60.0) == "calibrated 2 of 32 prompts, about 15 minutes left"
    assert progress_line(32, 32, 900.0) == "calibrated 32 of 32 prompts"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (120, "2 minutes"), (7199, "120 minutes"), (9000, "2.5 hours")],
)
def test_a_time_is_told_in_the_unit_that_fits(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
