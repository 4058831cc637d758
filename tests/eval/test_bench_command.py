"""`sdxl bench` runs its benchmarks by name; wrong flags of bench, eval and tune are one line."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from eval.bench_command import BENCHMARKS
from sdxl import cli

WITH_URL = "cannot be used with --url: "


def test_every_benchmark_exists_and_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for name, (module, _) in BENCHMARKS.items():
        assert find_spec(f"eval.{module}") and f"  {name} " in text, name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench speed", "benchmark must be one of peers, floor"),
        ("bench mlperf --scenario Ofline", "scenario must be one of"),
        ("bench mlperf --model org/name", "captions must be the benchmark's captions for org/name"),
        ("bench mlperf --audit TEST05", "audit must be one of TEST01"),
        ("bench mlperf --url u --precision int8", f"precision {WITH_URL}that service has its own"),
        ("bench mlperf --url u --backend torch", f"backend {WITH_URL}that service has its own"),
        ("bench mlperf --url u --engines d", f"engines {WITH_URL}that service has its own"),
        ("bench mlperf --url u --unchecked", f"unchecked {WITH_URL}that service has its own"),
        ("bench mlperf --url u --deterministic", f"deterministic {WITH_URL}that service has its"),
        ("bench load --url u --secs 5", f"flags {WITH_URL}they are for the `sdxl serve`"),
        ("bench floor --rows 2 0", "rows must be even and at least 2: an image has two, got 0"),
        ("bench floor --rows 2 3", "rows must be even and at least 2: an image has two, got 3"),
        ("bench fleet --replicas 8 0", "replicas must be at least 1, got 0"),
        ("bench gpu --sections all", "sections must be one of start"),
        ("eval --images a --url b", "name one source of pictures, got '--images and --url'"),
        ("tune --precision fp32 int8 --engines d", "engines needs one --precision, the folder's"),
        ("tune --steps 3", "steps must be at least 4"),
        ("tune --scheduler best", "scheduler must be one of"),
        ("tune --guided-until 0", "guided_until must be a share above 0"),
        ("tune --budget 0.5 0.4 0.9", "budget must be rising"),
        ("tune --check-prompts 1", "check_prompts must be at least 2"),
        ("tune --seconds 0", "seconds must be more than 0"),
        ("tune llm --limits hasty", "limits must be one of server"),
        ("tune llm --batch 8 4", "batch must be whole numbers from 1"),
        ("tune llm --gpus 0", "gpus must"),
        ("tune llm --backend vllm", "backend must be transformers or"),
    ],
)
def test_a_wrong_value_is_reported_in_one_line(
    line: str, message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*line.split())
