"""`sdxl eval` reports a bad flag in one line, before a model is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from PIL import Image

import engines
from eval.command import main
from eval.quality.inputs import BENCHMARK_FILES
from sdxl import cli
from sdxl.params import InvalidParams
from tests.eval.conftest import Noise

TSV = "id\timage_id\tcaption\n1\t2\tA city at night.\n2\t3\tA clock.\n"


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("engines were loaded before the request was checked")

    monkeypatch.setattr(engines, "load", refuse)
    monkeypatch.chdir(tmp_path)


def write_pictures(folder: Path, count: int, side: int) -> None:
    folder.mkdir()
    for i, picture in enumerate(Noise(side).pictures(range(count))):
        Image.fromarray(picture).save(folder / f"{i:06}.png")


def refused(*argv: str) -> str:
    with pytest.raises(InvalidParams) as error:
        main(argv)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["nodir", "file"])
@pytest.mark.parametrize("flag", ["--images", "--against"])
def test_a_path_that_is_not_a_folder_is_refused_before_heavy_imports(
    flag: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "eval.quality.evaluation", None)
    assert refused(flag, name) == f"{flag[2:]} must be a folder of pictures, got '{name}'"


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that gives the benchmark's flags; a test can replace a valid file."""

    def flags(**changed: Path | None) -> list[str]:
        (tmp_path / "captions.tsv").write_text(TSV)
        (tmp_path / "clip").mkdir(exist_ok=True)
        (tmp_path / "inception.pth").write_bytes(b"")
        np.savez(tmp_path / "val2014.npz", mu=np.zeros(2048), sigma=np.zeros((2048, 2048)))
        names = ("captions.tsv", "inception.pth", "clip", "val2014.npz")
        paths = dict(zip(BENCHMARK_FILES, (tmp_path / name for name in names), strict=True))
        given = {**paths, **changed}
        return ["--count", "2", *(x for n, p in given.items() if p for x in (f"--{n}", str(p)))]

    return flags


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,caption\n1,A clock\n", "a column 'caption'; found id,caption"),
        (TSV + "3\t4\t\n", "line 4 has no caption"),
        ("\n".join(TSV.splitlines()[:2]), "must hold 2 captions; found 1"),
    ],
)
def test_a_wrong_captions_file_is_refused(
    text: str, message: str, files: Callable[..., list[str]], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.tsv"
    wrong.write_text(text)
    error = refused(*files(captions=wrong))
    assert error.startswith("captions must ") and message in error, error


@pytest.mark.parametrize("name", BENCHMARK_FILES)
def test_a_missing_file_is_refused(
    name: str, files: Callable[..., list[str]], tmp_path: Path
) -> None:
    error = refused(*files(**{name: tmp_path / "nowhere"}))
    assert error.startswith(f"{name} must be an existing file or folder")
    assert f"{name} must be given for this model" in refused(*files(**{name: None}))


def test_unreadable_weights_are_refused(files: Callable[..., list[str]]) -> None:
    assert "inception must" in (error := refused(*files())) and "pt_inception-2015-12-05" in error


def test_too_few_pictures_and_other_sizes_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "few", 2, 128)
    error = refused("--count", "3", "--images", str(tmp_path / "few"))
    assert "with 2 pictures" in error and "one picture for each of the 3 captions" in error
    write_pictures(tmp_path / "small", 2, 64)
    error = refused("--count", "2", "--images", str(tmp_path / "small"))
    assert "000000.png of 64×64" in error and "must be 128×128" in error


@pytest.mark.parametrize(
    "flags",
    [
        *(["--precision", "int8"], ["--url", "u"], ["--accuracy-log", "f"], ["--against", "exact"]),
        *(["--save", "d"], ["--json"], ["--steps", "4"], ["--scheduler", "dpmpp_2m"]),
        *(["--cache-interval", "2"], ["--deep-steps", "0,2"], ["--images", "d"]),
        *(["--engines", "d"], ["--guided-steps", "0,1,2"]),
    ],
)
def test_a_sweep_refuses_flags_without_effect(flags: list[str]) -> None:
    error, name = refused("--sweep", *flags), flags[0][2:].replace("-", "_")
    assert error.startswith(name) and "--sweep, which has its own settings" in error, error


@pytest.mark.parametrize("source", ["--images", "--url", "--accuracy-log"])
@pytest.mark.parametrize(
    "flags", [["--precision", "int8"], ["--backend", "torch"], ["--engines", "d"], ["--unchecked"]]
)
def test_other_sources_refuse_the_flags_of_engines(source: str, flags: list[str]) -> None:
    error = refused(source, "there", *flags)
    assert error.startswith(flags[0][2:]) and f"{source}, which loads no engines" in error, error


def test_the_command_scores_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.quality.task.REFERENCE_PICTURES", 50)
    write_pictures(tmp_path / "pictures", 4, 128)
    flags = ["--count", "4", "--images", str(tmp_path / "pictures"), "--bootstrap", "5", "--json"]
    assert cli.main(["eval", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pictures"] == 4 and {"FID", "CLIP"} <= set(report["figures"])
    assert "never with published figures" in report["note"]
    assert "images/s" not in report, "reading files is not a model's speed"
    assert cli.main(["eval", *flags[:-1]]) == 0
    text = capsys.readouterr().out
    assert "images/s" not in text and "compare only runs with the same --count" in text
