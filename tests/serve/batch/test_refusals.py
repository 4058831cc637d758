"""The refusals of `sdxl batch` before it begins, and its message if it is interrupted there."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from sdxl import cli
from sdxl.params import InvalidParams
from serve.batch import command, running
from serve.batch.running import run
from tests.serve.batch.drawers import order_of, parquet, prompts


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": [1]}, "a column of text, got .*: prompt of int64"),
        ({"prompt": [b"a"]}, "a column of text, got .*: prompt of binary"),
        ({"steps": ["3"]}, "a column of whole numbers, got .*: steps of string"),
        ({"steps": [2.5]}, "a column of whole numbers, got .*: steps of double"),
        ({"guidance_scale": [[1.0]]}, "a column of numbers, got .*: guidance_scale of list"),
        ({"deep_steps": [3]}, "a column of lists of whole numbers, got .*: deep_steps of int64"),
        ({"guidance_interval": [["0"]]}, "a column of lists of numbers, got .*l of list"),
        ({"loras": [[7]]}, r"a column of lists of NAME\S+, got .*: loras of list"),
        ({"id": [7]}, "a column of text, got .*: id of int64"),
        ({"stepz": [3]}, "one of the columns prompt, .*: stepz.; did you mean steps.$"),
        ({"text": ["a"]}, "one of the columns prompt, .*: text.$"),
    ],
)
def test_a_wrong_parquet_column_is_refused_before_a_worker_starts(
    columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = parquet(tmp_path, {"prompt": ["a"], **columns})
    with pytest.raises(InvalidParams, match=f"input must be {message}"):
        run(order_of(source, tmp_path / "out"), lambda *_: pytest.fail("started"))


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--n", "0", "n must be 1 to 10000, got 0"),
        ("--format", "bmp", "format must be one of png, jpeg, webp, got 'bmp'"),
        ("--shard-size", "0", "shard_size must be 1 to 4096, got 0"),
        ("--steps", "0", "steps must be a whole number from 1 to 1000, got 0"),
        ("--metrics-port", "99999", "metrics_port must be 1 to 65535, got 99999"),
        ("--metrics-port", "0", "metrics_port must be 1 to 65535, got 0"),
        ("--stall-s", "0", "stall_s must be a number of seconds above 0, got 0"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(
    flag: str, value: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParams, match=message):
        order_of(prompts(tmp_path, 1), tmp_path / "out", flag, value)


@pytest.mark.parametrize(
    "flag",
    [
        *("--vae v", "--backend torch", "--precision fp16", "--engines d", "--unchecked"),
        *("--loras d", "--controlnets d", "--ip-adapters d", "--workers 2", "--mixed-gpus"),
        *("--address h:1", "--stall-s 9", "--provenance off", "--certificate f --private-key f"),
    ],
)
def test_a_flag_for_own_workers_is_refused_with_a_service(flag: str, tmp_path: Path) -> None:
    source, out, flags = prompts(tmp_path, 1), tmp_path / "out", flag.split()
    name = flags[0].removeprefix("--").replace("-", "_")
    with pytest.raises(InvalidParams, match=f"^{name} cannot be used with --through: the service"):
        order_of(source, out, *flags, "--through", "http://there")


def test_a_path_that_is_no_unicode_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    source = prompts(tmp_path, 1, os.fsdecode(b"caf\xe9.txt"))
    with pytest.raises(InvalidParams, match="input must be valid UTF-8"):
        run(order_of(source, tmp_path / "out"), lambda *_: pytest.fail("started"))


def test_columns_of_every_fitting_type_are_read(tmp_path: Path) -> None:
    import pyarrow

    from serve.batch import reading

    columns = {
        "prompt": pyarrow.array(["a", "b"]).dictionary_encode(),
        "steps": pyarrow.array([3, None], pyarrow.int16()),
        "guidance_scale": pyarrow.array([3, 4]),
        "deep_steps": pyarrow.array([[0, 2], None]),
        "guidance_interval": pyarrow.array([[0.0, 0.5], None]),
        "seed": pyarrow.nulls(2),
        "id": pyarrow.array(["x", "y"], pyarrow.large_string()),
    }
    source = parquet(tmp_path, columns)
    assert reading.count([source]) == 2
    first, second = reading.read([source])
    assert first.values["deep_steps"] == [0, 2] and first.values["steps"] == 3
    assert second.values == {"prompt": "b", "guidance_scale": 4, "id": "y"}


@pytest.mark.parametrize(
    ("during", "expected"),
    [
        ("describe", rf"sdxl batch: {command.RESUME_HINT}\n"),
        (
            "on_ray",
            r"sdxl batch: interrupted; .*0 of 2 pictures .*Rerun the same command to resume.*\n",
        ),
    ],
)
def test_ctrl_c_prints_once_how_to_resume(
    during: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C comes before the job has begun, or while workers load."""
    monkeypatch.setattr(running, during, running.interrupt)
    with pytest.raises(KeyboardInterrupt):
        command.make(order_of(prompts(tmp_path, 2), tmp_path / "out"))
    text = capsys.readouterr().err
    assert re.fullmatch(expected, text) and text.count("interrupted") == 1, text


@pytest.mark.parametrize("ended", [-signal.SIGTERM, -signal.SIGSEGV])
def test_a_signal_that_ends_the_supervised_process_prints_how_to_resume(
    ended: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "supervise", lambda *_, signalled: signalled[ended])
    source = prompts(tmp_path, 2)
    assert cli.main(["batch", str(source), "--out", str(tmp_path / "out")]) == cli.INTERRUPTED
    assert capsys.readouterr().err == f"sdxl batch: {command.RESUME_HINT}\n"
