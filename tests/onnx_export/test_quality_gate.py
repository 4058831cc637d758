"""int8 at interval 2 keeps its quality. The test is in this folder because the exports are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from sdxl.checkpoint import find
from tests.onnx_export.exports import Exports
from tests.onnx_export.quality_gate import Band, measure

BAND = Path(__file__).with_name("quality_band.json")
RECORD = "python -m tests.onnx_export.quality_gate tests/onnx_export/quality_band.json"


@pytest.fixture(scope="module")
def band() -> Band:
    return Band.read(BAND)


def test_the_band_belongs_to_these_weights(band: Band) -> None:
    assert band.weights == find("mini").digest, f"the weights have changed; run: {RECORD}"


@pytest.mark.long
def test_int8_and_interval_2_keep_their_quality(band: Band, exports: Exports) -> None:
    measured = measure(exports("int8"))
    assert not (wrong := band.outside(measured)), "; ".join(wrong) + f"; all: {measured}"


@pytest.mark.parametrize("what", ["exact", "fast"])
@pytest.mark.parametrize(("name", "factor"), [("FID", 1.05), ("CLIP", 0.99)])
def test_a_score_outside_the_band_is_named(what: str, name: str, factor: float, band: Band) -> None:
    worse = copy.deepcopy(band.recorded)
    worse[what][name] *= factor
    (wrong,) = band.outside(worse)
    assert wrong.startswith(f"{what} {name}: measured ")
