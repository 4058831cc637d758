"""`sdxl eval watermark`: each family is measured, and what was found before stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from eval.command import main
from eval.quality.watermark import MODEL, PLAIN, SCENES, measure_unmarked, pictures
from sdxl.params import InvalidParams
from sdxl.watermark import mark


def test_families_are_measured_one_by_one_into_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "found.json", tmp_path / "pictures"
    folder.mkdir()
    Image.fromarray(next(pictures(SCENES, folder))).save(folder / "0.png")
    for family, more in ((PLAIN, ()), (MODEL, ("--images", str(folder)))):
        argv = ("watermark", "--family", family, "--most", "2", "--out", str(out), *more)
        assert main(argv) == 0
    report = json.loads(out.read_text())
    assert [*report] == [PLAIN, MODEL]
    assert report[PLAIN]["marked"]["found"]["jpeg_75"] == report[PLAIN]["marked"]["count"] == 2
    assert report[MODEL]["marked"]["least_psnr_db"] >= 40
    assert report[MODEL]["unmarked"]["taken_for_marked"] == 0
    assert "half_the_size          found in 1" in capsys.readouterr().out


def test_marked_pictures_among_the_unmarked_are_counted() -> None:
    originals = pictures(SCENES, Path())
    result = measure_unmarked(iter([mark(next(originals)), next(originals)]))
    assert (result.count, result.taken_for_marked) == (2, 1)


def test_a_models_pictures_are_in_a_folder() -> None:
    with pytest.raises(InvalidParams, match="images"):
        main(("watermark", "--family", MODEL, "--out", "found.json"))
