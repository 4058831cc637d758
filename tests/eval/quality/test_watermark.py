"""`sdxl eval watermark` measures each family and keeps the others in its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from eval.command import main
from eval.quality.watermark import MODEL, PLAIN, SCENES, make_pictures, measure_unmarked
from sdxl.params import InvalidParams
from sdxl.watermark import mark


def test_families_are_added_to_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "report.json", tmp_path / "pictures"
    folder.mkdir()
    Image.fromarray(next(make_pictures(SCENES, folder))).save(folder / "0.png")
    for family, more in ((PLAIN, ()), (MODEL, ("--images", str(folder)))):
        argv = ("watermark", "--family", family, "--most", "2", "--out", str(out), *more)
        assert main(argv) == 0
    report = json.loads(out.read_text())
    assert [*report] == [PLAIN, MODEL]
    assert report[PLAIN]["marked"]["found"]["jpeg_75"] == report[PLAIN]["marked"]["count"] == 2
    assert report[MODEL]["marked"]["least_psnr_db"] >= 40
    assert report[MODEL]["unmarked"]["taken_for_marked"] == 0
    assert "half_the_size          found in 1" in capsys.readouterr().out


def test_a_marked_picture_among_unmarked_ones_is_counted() -> None:
    originals = make_pictures(SCENES, Path())
    result = measure_unmarked(iter([mark(next(originals)), next(originals)]))
    assert (result.count, result.taken_for_marked) == (2, 1)


def test_the_family_model_needs_a_folder() -> None:
    with pytest.raises(InvalidParams, match="images"):
        main(("watermark", "--family", MODEL, "--out", "report.json"))
