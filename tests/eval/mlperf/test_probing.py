"""LoadGen expects what all replicas make together, not what one makes of one picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from eval.mlperf import command, probing
from eval.mlperf.command import SystemUnderTest
from eval.mlperf.probing import Expected, probe
from sdxl.params import GenerationParams
from tests.eval.mlperf.test_energy import REQUESTS, Answering


class Replicas:
    """So many, each making so many pictures at once, in simulated time."""

    def __init__(self, count: int, rows: int, picture_s: float) -> None:
        self.at_once, self.picture_s, self.now_s = count * rows, picture_s, 0.0

    def make(self, requests: Sequence[GenerationParams]) -> None:
        self.now_s += math.ceil(len(requests) / self.at_once) * self.picture_s

    def wall_s(self, run: Callable[[], object]) -> float:
        began_s = self.now_s
        run()
        return self.now_s - began_s


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (1, 16), (8, 16)])
def test_the_rate_is_of_all_replicas_at_once(
    count: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Replicas(count, rows, picture_s=4.0)
    monkeypatch.setattr(probing, "wall_s", replicas.wall_s)
    found = probe(replicas.make, REQUESTS, replicas.at_once)
    assert found == Expected(latency_s=4.0, rate=count * rows / 4.0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--scenario", "Offline"], 12.0),
        (["--scenario", "Server"], 6.0),
        (["--scenario", "Offline", "--target-qps", "3"], 3.0),
    ],
)
def test_loadgen_is_told_a_share_of_the_rate_that_its_scenario_stands(
    flags: list[str], expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than Offline makes, so that its samples last; less than Server can take."""

    @contextmanager
    def system_of(*_: object) -> Iterator[SystemUnderTest]:
        yield SystemUnderTest(Answering(), {}, Expected(0.1, 10.0), None)

    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    monkeypatch.setattr(command, "system_of", system_of)
    monkeypatch.setattr("eval.mlperf.loadgen.ScenarioRun.start", stop)
    with pytest.raises(Stopped):
        command.measure(command.build_parser().parse_args(flags), REQUESTS, tmp_path)
    told = json.loads((tmp_path / "settings.json").read_text())["loadgen"]
    assert told["offline_expected_qps"] == told["server_target_qps"] == pytest.approx(expected)
