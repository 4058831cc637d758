"""The speed and the energy of a LoadGen run."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from eval.mlperf import command
from eval.mlperf.command import Expected, Meter, SystemUnderTest, energy_figures, probe
from eval.mlperf.loadgen import Summary, complete
from eval.service.client import energy_meter
from sdxl.params import GenerationParams

REQUESTS = [GenerationParams(f"caption {i}") for i in range(8)]


def answer_at_once(samples: Sequence[tuple[int, int]]) -> None:
    for response, _ in samples:
        complete(response)


class Replicas:
    """Replicas that make `rows` pictures at once, in simulated time."""

    def __init__(self, count: int, rows: int, picture_s: float) -> None:
        self.at_once, self.picture_s, self.now_s = count * rows, picture_s, 0.0

    def make(self, requests: Sequence[GenerationParams]) -> None:
        self.now_s += math.ceil(len(requests) / self.at_once) * self.picture_s

    def wall_s(self, run: Callable[[], object]) -> float:
        began_s = self.now_s
        run()
        return self.now_s - began_s


def answering(meter: Meter | None) -> Any:
    """Return a `system_of` for a system that makes 10 pictures a second."""

    @contextmanager
    def system_of(*_: object) -> Iterator[SystemUnderTest]:
        yield SystemUnderTest(answer_at_once, {"over": "nothing"}, Expected(0.1, 10.0), meter)

    return system_of


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (1, 16), (8, 16)])
def test_the_probed_rate_is_that_of_all_replicas(
    count: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Replicas(count, rows, picture_s=4.0)
    monkeypatch.setattr(command, "wall_s", replicas.wall_s)
    expected = probe(replicas.make, REQUESTS, replicas.at_once)
    assert expected == Expected(latency_s=4.0, rate=count * rows / 4.0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--scenario", "Offline"], 12.0),
        (["--scenario", "Server"], 6.0),
        (["--scenario", "Offline", "--target-qps", "3"], 3.0),
    ],
)
def test_the_target_rate_is_the_scenarios_share_of_the_probed_rate(
    flags: list[str], expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline gets more than the probed rate, so that its samples last; Server gets less."""
    monkeypatch.setattr(command, "system_of", answering(None))
    run = "eval.mlperf.loadgen.ScenarioRun.start"
    monkeypatch.setattr(run, lambda *_: Summary("Offline", True, 1.0, "images/s"))
    command.measure(command.build_parser().parse_args(flags), REQUESTS, tmp_path)
    loadgen = json.loads((tmp_path / "settings.json").read_text())["loadgen"]
    assert loadgen["offline_expected_qps"] == loadgen["server_target_qps"]
    assert loadgen["server_target_qps"] == pytest.approx(expected)


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, meter: Meter | None) -> dict[str, Any]:
    monkeypatch.setattr(command, "system_of", answering(meter))
    options = command.build_parser().parse_args(["--short"])
    return command.measure(options, REQUESTS, folder)


def test_a_latency_is_no_rate_per_watt() -> None:
    summary = Summary("SingleStream", True, 0.5, "s")
    assert energy_figures(summary, 6000.0, 10.0) == {"joules": 6000.0, "watts": 600.0}


def test_a_run_prints_and_stores_its_own_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = itertools.count(5000.0, 1000.0)
    result = measured(tmp_path / "run", monkeypatch, lambda: next(counter))
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    assert result["joules"] == 1000.0 and result["watts"] > 0
    assert result["samples_per_s_per_watt"] == pytest.approx(result["score"] / result["watts"])
    text = command.describe(result, tmp_path)
    assert ", 1000 J at " in text and text.endswith(f" samples/s/W; logs in {tmp_path}")


@pytest.mark.parametrize("meter", [None, lambda: 7.0])
def test_without_a_rising_meter_there_is_no_energy(
    meter: Meter | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measured(tmp_path / "run", monkeypatch, meter)
    assert not {"joules", "watts", "samples_per_s_per_watt"} & set(result)
    assert command.describe(result, tmp_path).endswith(f" images/s; logs in {tmp_path}")


PAGE = """sdxl_gpu_energy_joules_total{gpu="0",model="sdxl",work="images"} 1.5
sdxl_gpu_energy_joules_total{gpu="1",model="sdxl",work="images"} 2
sdxl_gpu_energy_joules_total{gpu="2",work="llm"} 30
sdxl_gpu_memory_bytes{gpu="2",work="llm"} 5
"""


@pytest.mark.parametrize(
    ("page", "work", "joules"),
    [
        (PAGE, "images", 3.5),
        (PAGE, "llm", 30.0),
        (PAGE.splitlines()[0], "llm", None),
        ("sdxl_images_total 3", "images", None),
    ],
)
def test_the_energy_of_a_services_gpus_is_added_by_work(
    page: str, work: Literal["images", "llm"], joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.service.client.metrics_page", lambda *_: page)
    read = energy_meter("http://service", work)
    assert (read() if read else None) == joules
