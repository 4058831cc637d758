"""What the GPUs used is told where a meter counts it, and nowhere else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from eval.mlperf import command
from eval.mlperf.command import MeasuredRun, SystemUnderTest
from eval.mlperf.energy import EnergyUse, Meter, metered
from eval.mlperf.loadgen import Summary, complete
from eval.mlperf.probing import Expected
from eval.service.gpu_energy import meter_of
from sdxl.params import GenerationParams
from tests.http_servers import Quiet, serving

OFFLINE = Summary("Offline", True, 20.0, "images/s")
ALONE = Summary("SingleStream", True, 0.5, "s")
REQUESTS = [GenerationParams(f"caption {i}") for i in range(8)]


class Answering:
    """A system that answers at once."""

    def issue(self, samples: Sequence[tuple[int, int]]) -> None:
        for response, _ in samples:
            complete(response)

    def flush(self) -> None: ...


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, meter: Meter | None) -> MeasuredRun:
    @contextmanager
    def system_of(*_: object) -> Iterator[SystemUnderTest]:
        yield SystemUnderTest(Answering(), {"over": "nothing"}, Expected(0.1, 10.0), meter)

    monkeypatch.setattr(command, "system_of", system_of)
    options = command.build_parser().parse_args(["--short"])
    return command.measure(options, REQUESTS, folder)


def test_joules_are_of_the_run_alone_and_give_watts() -> None:
    counter = itertools.count(5000.0, 250.0)
    found, energy = metered(lambda: next(counter), lambda: "made")
    assert found == "made" and energy is not None and energy.joules == 250.0
    use = EnergyUse(joules=6000.0, took_s=10.0)
    figures = use.of(OFFLINE)
    assert figures == {"joules": 6000.0, "watts": 600.0, "samples_per_s_per_watt": 20 / 600}
    assert use.of(ALONE) == {"joules": 6000.0, "watts": 600.0}, "a latency is no rate"


def test_a_run_tells_and_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count(0.0, 1000.0)
    found = measured(tmp_path / "run", monkeypatch, lambda: next(counter))
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["joules"] == 1000.0 and kept["watts"] > 0
    assert kept["samples_per_s_per_watt"] == pytest.approx(kept["score"] / kept["watts"])
    assert ", 1000 J at " in command.text(found, tmp_path)
    assert command.text(found, tmp_path).endswith(f" samples/s/W; logs in {tmp_path}")


@pytest.mark.parametrize("meter", [None, lambda: 7.0])
def test_without_a_meter_that_counts_nothing_is_told(
    meter: Meter | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(tmp_path / "run", monkeypatch, meter)
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert not {"joules", "watts", "samples_per_s_per_watt"} & set(kept)
    assert command.text(found, tmp_path).endswith(f" images/s; logs in {tmp_path}")


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
def test_a_services_gpus_that_do_this_work_are_added(
    page: str, work: Literal["images", "llm"], joules: float | None
) -> None:
    class Metrics(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

    with serving(Metrics) as url:
        read = meter_of(url, work)
        assert (read() if read else None) == joules
