"""`sdxl bench` runs its benchmarks by name; wrong flags of bench and tune are one line."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from eval.bench_command import BENCHMARKS
from sdxl import cli


def test_every_benchmark_exists_and_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    page = capsys.readouterr().out
    for name, (module, _) in BENCHMARKS.items():
        assert find_spec(f"eval.{module}") and f"  {name} " in page, name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench speed", "benchmark: 'speed' is not allowed; needed one of peers, floor"),
        ("bench mlperf --scenario Ofline", "scenario: 'Ofline' is not allowed; needed one of"),
        ("bench mlperf --model org/name", "captions: None is not allowed; org/name needed"),
        ("bench mlperf --audit TEST05", "audit: 'TEST05' is not allowed; needed one of TEST01"),
        ("bench mlperf --url u --precision int8", "precision: 'int8' is not allowed; needed"),
        ("bench mlperf --url u --backend torch", "backend: 'torch' is not allowed; needed"),
        ("bench mlperf --url u --deterministic", "deterministic: True is not allowed; needed"),
        ("bench load --url u --secs 5", "flags: '--secs 5' is not allowed; needed none"),
        ("bench floor --rows 0", "rows: 0 is not allowed; needed at least 1"),
        ("bench h200 --sections all", "sections: 'all' is not allowed; needed one of peers"),
        ("bench robustness all --count 0", "count: 0 is not allowed; needed more than 0"),
        ("tune --steps 3", "steps: 3 is not allowed; needed at least 4"),
        ("tune --scheduler best", "scheduler: 'best' is not allowed; needed one of"),
        ("tune --guided-until 0", "guided_until: 0.0 is not allowed; needed a share above 0"),
        ("tune --budget 0.5 0.4 0.9", "budget: (0.5, 0.4, 0.9) is not allowed; needed rising"),
        ("tune --check-prompts 1", "check_prompts: 1 is not allowed; needed at least 2"),
        ("tune --seconds 0", "seconds: 0.0 is not allowed; needed more than 0"),
        ("tune llm --limits hasty", "limits: 'hasty' is not allowed; needed one of server"),
        ("tune llm --batch 8 4", "batch: [8, 4] is not allowed; needed whole numbers from 1"),
        ("tune llm --gpus 0", "gpus: 0 is not allowed"),
        ("tune llm --backend vllm", "backend: 'vllm' is not allowed; needed transformers or"),
    ],
)
def test_a_wrong_value_is_reported_in_one_line(
    line: str, message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*line.split())
