"""An audit needs a valid run with the same settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from eval.mlperf import command, compliance
from eval.mlperf.compliance import check_same
from eval.quality.accuracy_log import FILE
from sdxl.params import GenerationParams, InvalidParams


def described(folder: Path, precision: str = "fp32", **settings: Any) -> Path:
    folder.mkdir()
    usual = {"scenario": "Offline", "short": False, "captions": "c", "request": {"steps": 20}}
    engines = {"precision": precision, "passed_over": {"tensorrt": folder.name}}
    (folder / "settings.json").write_text(json.dumps(usual | settings))
    (folder / "system.json").write_text(json.dumps({"over": "process", "engines": engines}))
    return folder


def summarised(folder: Path, verdict: str = "VALID", rate: float = 10.0) -> Path:
    folder.mkdir(exist_ok=True)
    text = f"Scenario : Offline\nSamples per second: {rate}\nResult is : {verdict}\n"
    (folder / "mlperf_log_summary.txt").write_text(text)
    return folder


def logged(folder: Path, **pictures: str) -> Path:
    lines = [json.dumps({"qsl_idx": int(k[1:]), "data": data}) for k, data in pictures.items()]
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text("\n".join(lines))
    return folder


def test_runs_with_the_same_settings_compare(tmp_path: Path) -> None:
    check_same(
        described(tmp_path / "a", audit="TEST04", loadgen={"offline_expected_qps": 2}),
        described(tmp_path / "b", audit=None, loadgen={"offline_expected_qps": 1}),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"precision": "int8"}, "out must hold a run with precision 'fp32', not 'int8'"),
        ({"short": True}, "out must hold a run with short False, not True"),
        ({"request": {"steps": 4}}, "out must hold a run with steps 20, not 4"),
    ],
)
def test_a_run_with_other_settings_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParams, match=message):
        check_same(described(tmp_path / "TEST04"), described(tmp_path / "performance", **changed))


@pytest.mark.parametrize(("rate", "passes"), [(9.0, True), (10.9, True), (11.2, False)])
def test_test04_allows_a_repeated_sample_to_be_a_tenth_faster(
    rate: float, passes: bool, tmp_path: Path
) -> None:
    performance, audited = summarised(tmp_path / "a"), summarised(tmp_path / "b", rate=rate)
    result = compliance.test04(performance, audited)
    assert result.passed is passes, result.text


@pytest.mark.parametrize("verdicts", [("INVALID", "VALID"), ("VALID", "INVALID")])
def test_an_invalid_run_fails_the_audit(verdicts: tuple[str, str], tmp_path: Path) -> None:
    runs = (summarised(tmp_path / str(i), verdict) for i, verdict in enumerate(verdicts))
    result = compliance.test04(*runs)
    name = verdicts.index("INVALID")
    assert not result.passed and f"INVALID: {name}" in result.text, result.text


def test_a_missing_or_different_picture_fails_the_audit(tmp_path: Path) -> None:
    accuracy = logged(tmp_path / "accuracy", _1="0102", _2="0304")
    performance = summarised(tmp_path / "performance")
    audited = summarised(logged(tmp_path / "TEST01", _2="0304"))
    assert compliance.test01(accuracy, performance, audited).passed
    result = compliance.test01(accuracy, performance, logged(audited, _2="0304", _70="05"))
    assert not result.passed and "2 pictures, 1 the same bytes" in result.text
    assert not compliance.test01(accuracy, performance, logged(audited, _2="ffff")).passed


def test_only_an_invalid_run_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def measure(_: object, __: object, folder: Path, references: Any = ()) -> None:
        made.append(folder.name)
        assert not references or [each.name for each in references] == ["performance"]
        summarised(folder)

    monkeypatch.setattr(command, "measure", measure)
    options = argparse.Namespace(scenario="Offline", audit="TEST04")
    for valid in (True, False):
        performance = summarised(tmp_path / str(valid)).joinpath("Offline", "performance")
        performance.mkdir(parents=True)
        summarised(performance)
        (performance / "result.json").write_text(json.dumps({"valid": valid}))
        assert command.audit(options, [GenerationParams()], tmp_path / str(valid)) == 0
    assert made == ["TEST04", "performance", "TEST04"]
