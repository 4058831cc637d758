"""MLPerf's LoadGen around a system under test: its settings, a run, and its summary.

LoadGen contains the benchmark's rules (20 s at the 99th percentile, 600 s, 5000 samples, the
seeds). `is_short` changes only durations and counts.
"""

from __future__ import annotations

import array
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlperf_loadgen as lg

BENCHMARK = "stable-diffusion-xl"
BUILT_IN = 0
"""FromConfig's value for LoadGen's built-in rules"""

SERVER_QUERIES, STREAM_QUERIES = 459, 64
"""the fewest queries with which LoadGen's early stopping accepts a 99th and a 90th percentile"""
TEST01_SAMPLES, TEST01_SEED = 32, 7
TEST04_INDEX = 3
"""the sample that TEST04 repeats, as in the benchmark's audit.config"""


class LoadGenError(RuntimeError):
    """A run that LoadGen did not accept."""


Issue = Callable[[Sequence[tuple[int, int]]], None]
"""takes the samples of a query, each a response id and the index of its caption, and calls
`complete` for each of them later, from any thread"""


@dataclass(frozen=True)
class ScenarioRun:
    """One run of one scenario."""

    scenario: str
    folder: Path
    captions: int
    _: KW_ONLY
    target_qps: float = 1.0
    expected_latency_s: float = 1.0
    is_accuracy: bool = False
    is_short: bool = False
    audit: str | None = None
    """TEST01 or TEST04"""
    benchmark: str = BENCHMARK

    def settings(self) -> Any:
        settings = lg.TestSettings()
        settings.scenario = getattr(lg.TestScenario, self.scenario)
        if settings.FromConfig("", self.benchmark, self.scenario, BUILT_IN):
            raise LoadGenError(f"LoadGen has no settings for {self.benchmark} {self.scenario}")
        mode = lg.TestMode.AccuracyOnly if self.is_accuracy else lg.TestMode.PerformanceOnly
        settings.mode = mode
        settings.offline_expected_qps = settings.server_target_qps = self.target_qps
        settings.single_stream_expected_latency_ns = int(self.expected_latency_s * 1e9)
        settings.performance_sample_count_override = min(
            settings.performance_sample_count_override, self.captions
        )
        if self.is_short:
            queries = {
                "Offline": self.captions,
                "Server": SERVER_QUERIES,
                "SingleStream": STREAM_QUERIES,
            }
            settings.min_query_count, settings.min_duration_ms = queries[self.scenario], 0
        if self.audit == "TEST01":
            settings.accuracy_log_sampling_target = TEST01_SAMPLES
            settings.accuracy_log_rng_seed = TEST01_SEED
        if self.audit == "TEST04":
            settings.performance_issue_same = True
            settings.performance_issue_same_index = min(TEST04_INDEX, self.captions - 1)
        return settings

    def start(self, issue: Issue) -> Summary:
        """Run LoadGen, which writes its logs to the folder."""
        logs = lg.LogSettings()
        logs.log_output.outdir = str(self.folder)
        logs.log_output.copy_summary_to_stdout = False
        settings = self.settings()
        # No query is buffered, and captions are in memory, so flushing and loading do nothing.
        sut = lg.ConstructSUT(
            lambda samples: issue([(s.id, s.index) for s in samples]), lambda: None
        )
        count = settings.performance_sample_count_override
        library = lg.ConstructQSL(self.captions, count, lambda _: None, lambda _: None)
        try:
            lg.StartTestWithLogSettings(sut, library, settings, logs, "")
        finally:
            lg.DestroyQSL(library)
            lg.DestroySUT(sut)
        # The summary of an accuracy run does not name the scenario.
        return replace(Summary.read(self.folder), scenario=self.scenario)


def complete(response: int, data: bytes = b"") -> None:
    """Answer one sample. LoadGen copies the bytes before this returns."""
    buffer = array.array("B", data)
    address, count = buffer.buffer_info()
    lg.QuerySamplesComplete([lg.QuerySampleResponse(response, address, count)])


SCORES = (
    ("Offline", r"Tokens per second", "tokens/s", 1.0),
    ("Server", r"Completed tokens per second", "tokens/s", 1.0),
    ("Offline", r"Samples per second", "images/s", 1.0),
    ("Server", r"Completed samples per second", "images/s", 1.0),
    ("SingleStream", r"Early stopping 90(\.0)?th percentile estimate", "s", 1e-9),
)
"""Scenario, the summary's line with its result, unit, factor. The first line that exists counts;
only a language model's summary has tokens."""


@dataclass(frozen=True)
class Summary:
    """The contents of mlperf_log_summary.txt."""

    scenario: str
    is_valid: bool | None
    """None for an accuracy run: LoadGen does not judge it"""
    score: float | None
    unit: str
    lines: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Summary:
        path = folder / "mlperf_log_summary.txt"
        text = path.read_text(encoding="utf-8", errors="replace")
        pairs = re.findall(r"^\s*\*?\s*([^:\n]+?)\s*:\s*(.+?)\s*$", text, re.MULTILINE)
        lines = dict(pairs)
        scenario = lines.get("Scenario", "").replace(" ", "")
        result = lines.get("Result is")
        for scored, line, unit, factor in SCORES:
            value = next((v for k, v in lines.items() if re.fullmatch(line, k)), None)
            if scored == scenario and value is not None:
                score = float(value.split()[0]) * factor
                return cls(scenario, result == "VALID" if result else None, score, unit, lines)
        return cls(scenario, result == "VALID" if result else None, None, "", lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "valid": self.is_valid,
            "score": self.score,
            "unit": self.unit,
            "summary": self.lines,
        }
