"""LoadGen accepts runs on the real loop and the real REST service, over fake engines.
Long tests run the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.measuring.timing import wall_s
from eval.mlperf import compliance
from eval.mlperf.loadgen import ScenarioRun, Summary, complete
from eval.mlperf.systems import Arrivals, InProcess, OverHttp
from eval.quality.accuracy_log import FILE, AccuracyLog, read_samples
from eval.quality.sources import request_picture
from eval.quality.task import QualityTask
from sdxl import cli
from sdxl.images import to_pixels
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from tests.serve.servers import listening
from tests.serve.workers import fake, fake_pipeline

SCENARIOS = ("Offline", "Server", "SingleStream")
CAPTIONS = 16
REQUESTS = [
    GenerationParams(
        f"caption {i}", seed=i, steps=2, cache_interval=2, width=64, height=64, guidance=1.0
    )
    for i in range(CAPTIONS)
]


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return fake_pipeline(buckets=(1, 2, 4, 8))


@contextmanager
def in_process(pipeline: Pipeline) -> Iterator[InProcess]:
    system = InProcess(pipeline, REQUESTS, complete)
    yield system
    system.close()


def start(
    system: Arrivals, folder: Path, scenario: str, qps: float = 100.0, **more: object
) -> Summary:
    folder.mkdir(exist_ok=True)
    facts: dict[str, object] = {"target_qps": qps, "expected_latency_s": 0.02, **more}
    run = ScenarioRun(scenario, folder, CAPTIONS, is_short=True, **facts)  # type: ignore[arg-type]
    return run.start(system.issue)


def one_by_one(make: Callable[[], object]) -> float:
    """Pictures a second without concurrency: a rate that even a busy machine sustains."""
    make()
    return 3 / wall_s(lambda: [make() for _ in range(3)])


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A performance run of each scenario, and an accuracy run of Offline."""
    root = tmp_path_factory.mktemp("loadgen")
    with in_process(pipeline) as system:
        qps = one_by_one(lambda: pipeline.generate(REQUESTS[:1]))
        for scenario in SCENARIOS:
            start(system, root / scenario, scenario, qps)
        start(system, root / "accuracy", "Offline", is_accuracy=True)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_short_runs_are_valid(scenario: str, runs: Path) -> None:
    summary = Summary.read(runs / scenario)
    assert summary.is_valid, summary.lines
    assert summary.scenario == scenario and summary.score and summary.score > 0
    assert (runs / scenario / "mlperf_log_detail.txt").stat().st_size > 0


@pytest.mark.slow
def test_the_server_scenario_over_http_is_valid(tmp_path: Path) -> None:
    with listening(fake_pipeline(buckets=(1, 2, 4, 8)), queue=512) as (url, _):
        system = OverHttp(url, REQUESTS, complete)
        qps = one_by_one(lambda: request_picture(system.http, REQUESTS[0]))
        summary = start(system, tmp_path / "run", "Server", qps)
        system.close()
    assert summary.is_valid, summary.lines


def test_eval_reads_the_accuracy_log(runs: Path, task: QualityTask, pipeline: Pipeline) -> None:
    small = replace(task, captions=tuple(r.prompt for r in REQUESTS), side=64)
    pictures = AccuracyLog(runs / "accuracy" / FILE, small).pictures([11, 3])
    for index, picture in zip((11, 3), pictures, strict=True):
        (result,) = pipeline.generate([REQUESTS[index]])
        assert result.image is not None
        error = np.abs(picture.astype(int) - to_pixels(result.image)).max()
        assert error <= 1, f"picture {index} differs by {error}, allowed 1"


def test_a_full_run_has_the_benchmarks_settings() -> None:
    settings = ScenarioRun("Server", Path(), 5000).settings()
    assert settings.server_target_latency_ns == 20_000_000_000
    assert settings.server_target_latency_percentile == pytest.approx(0.99)
    assert settings.min_duration_ms == 600_000
    assert ScenarioRun("Offline", Path(), 5000).settings().min_query_count == 5000
    assert settings.performance_sample_count_override == 5000
    assert settings.sample_index_rng_seed and settings.schedule_rng_seed
    assert settings.qsl_rng_seed


def test_test01_compares_pictures(pipeline: Pipeline, runs: Path, tmp_path: Path) -> None:
    with in_process(pipeline) as system:
        start(system, tmp_path / "audit", "Offline", audit="TEST01")
    pictures = dict(read_samples(tmp_path / "audit" / FILE))
    assert pictures, "performance mode logs some of the pictures"
    verdict = compliance.test01(runs / "accuracy", runs / "Offline", tmp_path / "audit")
    assert "PSNR at least inf" in verdict.text, verdict.text


def test_test04_repeats_one_sample(pipeline: Pipeline, tmp_path: Path) -> None:
    indices: set[int] = set()

    class Watching(InProcess):
        def issue(self, samples: Sequence[tuple[int, int]]) -> None:
            indices.update(index for _, index in samples)
            super().issue(samples)

    system = Watching(pipeline, REQUESTS, complete)
    start(system, tmp_path / "run", "SingleStream", audit="TEST04")
    system.close()
    assert len(indices) == 1, indices


def test_a_failing_picture_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    pipeline = fake_pipeline()
    system = InProcess(pipeline, REQUESTS, complete)
    fake(pipeline, "unet_deep").fault = RuntimeError("out of memory")
    start(system, tmp_path / "run", "SingleStream")
    with pytest.raises(RuntimeError, match="out of memory"):
        system.close()


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "over"), [("Offline", "process"), ("Server", "http")])
def test_the_embedded_model_is_valid(scenario: str, over: str, tmp_path: Path) -> None:
    flags = ["--scenario", scenario, "--over", over, "--short", "--steps", "2"]
    assert cli.main(["bench", "mlperf", *flags, "--out", str(tmp_path)]) == 0
    folder = tmp_path / scenario / "performance"
    assert json.loads((folder / "result.json").read_text())["valid"] is True
    assert json.loads((folder / "system.json").read_text())["processor"]


@pytest.mark.long
@pytest.mark.parametrize(("audit", "least"), [("TEST01", 0.9), ("TEST04", 0.0)])
def test_the_verdict_of_an_audit_follows_from_the_speed(
    audit: str, least: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other work on the machine changes the speed, so either verdict may be correct."""
    flags = ["--audit", audit, "--short", "--steps", "2", "--deterministic"]
    status = cli.main(["bench", "mlperf", *flags, "--out", str(tmp_path)])
    line = re.search(rf"{audit} (\w+): (.*) ([\d.]+) of the perf", capsys.readouterr().out)
    assert line
    passes = least <= float(line[3]) <= 1.1
    assert (status, line[1]) == ((0, "passed") if passes else (1, "FAILED"))
    assert audit == "TEST04" or "PSNR at least inf" in line[2]


def test_a_system_that_fails_answers_every_sample_and_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline, answered = fake_pipeline(), set[int]()

    def broken(_: object) -> None:
        raise RuntimeError("no encoder")

    monkeypatch.setattr(pipeline, "encode", broken)
    system = InProcess(pipeline, REQUESTS, lambda response, _: answered.add(response))
    system.issue([(response, 0) for response in range(5)])
    with pytest.raises(RuntimeError, match="no encoder"):
        system.close()
    assert answered == set(range(5))
