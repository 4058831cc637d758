"""The search for the best options: few trials, none twice, and a file that `sdxl serve` reads."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from eval.llm import tune
from eval.llm.bench import Figures
from eval.llm.client import LIMITS, PROMPTS, StreamedAnswer
from eval.llm.tune import (
    Options,
    OptionsTrial,
    Services,
    Trials,
    find_best_rate,
    format_toml,
    list_splits,
    search,
)
from sdxl.params import InvalidParams

CHOICES = {"max_batch_size": [4, 8, 16, 32], "max_num_tokens": [2048, 4096]}


class Machine:
    """A simulated machine: a formula gives its tokens a second, and it records the trials."""

    def __init__(self, speed: Callable[[Options], float]) -> None:
        self.speed, self.tried = speed, list[Options]()

    def __call__(self, options: Options) -> OptionsTrial:
        self.tried.append(options)
        return OptionsTrial(self.speed(options), 1.0)


def test_a_value_is_raised_while_it_gains() -> None:
    machine = Machine(lambda o: min(o["max_batch_size"], 16) + o["max_num_tokens"] / 4096)
    assert search(machine, [{}], CHOICES) == {"max_batch_size": 16, "max_num_tokens": 4096}
    assert {"max_batch_size": 32, "max_num_tokens": 4096} not in machine.tried


def test_the_fastest_split_that_runs_wins() -> None:
    def speed(options: Options) -> float:
        if options["tensor_parallel_size"] == 1:
            return 0.0
        return 8.0 / options["tensor_parallel_size"] + options["pipeline_parallel_size"]

    splits = list(list_splits(8))
    best = search(Machine(speed), splits, {"max_batch_size": [4]})
    assert (best["tensor_parallel_size"], best["pipeline_parallel_size"]) == (2, 4)


@pytest.mark.parametrize(("gpus", "count"), [(1, 1), (2, 3), (6, 6), (8, 10)])
def test_splits_are_powers_of_two_that_fit(gpus: int, count: int) -> None:
    splits = [(c["tensor_parallel_size"], c["pipeline_parallel_size"]) for c in list_splits(gpus)]
    assert len(set(splits)) == count and all(t * p <= gpus for t, p in splits)


NOT_LOADED = """\
(ServeReplica:default:LlmReplica pid=3460) 2026-11-25 03:45:02,000 ERROR serve.llm.replica: \
the language model does not load
(ServeReplica:default:LlmReplica pid=3460) Traceback (most recent call last):
(ServeReplica:default:LlmReplica pid=3460)   File "serve/llm/replica.py", line 55, in _load
(ServeReplica:default:LlmReplica pid=3460)     speaker = loading.load(self.settings)
(ServeReplica:default:LlmReplica pid=3460) torch.OutOfMemoryError: CUDA out of memory.
sdxl serve: sdxl-mini is loaded
"""
"""the log of `sdxl serve` when a model does not load"""


class SimulatedService:
    """Its rate is limited by the replicas' rows and by the clients. A model split over n GPUs is
    n^0.7 times as fast, so splitting never pays."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        calls = ("first_llm", "concurrent_requests", "Client", "run_streams", "run_poisson")
        for name in ("local_service", "wait_until_loaded", *calls):
            patch.setattr(tune, name, getattr(self, name))

    @contextmanager
    def local_service(self, flags: list[str], log: Path) -> Iterator[str]:
        values = dict(zip(flags[::2], flags[1::2], strict=True))
        options = tomllib.loads(Path(values["--llm-options"]).read_text())
        size = options["tensor_parallel_size"] * options["pipeline_parallel_size"]
        self.rows = int(values["--llm-replicas"]) * options["max_batch_size"]
        self.rate = size**0.7
        yield "http://service"

    def wait_until_loaded(self, *_: object) -> None:
        pass

    def first_llm(self, *_: str) -> str:
        return "model"

    def concurrent_requests(self, *_: str) -> int:
        return self.rows + 8 * 64

    def Client(self, *_: object) -> None:
        return None

    def figures(self, rate: float, seconds: float, first_s: float) -> Figures:
        answer = StreamedAnswer(0.0, first_s, first_s + 0.1, tokens=10, status=200)
        return Figures([answer] * round(rate * seconds), seconds)

    async def run_streams(self, client: None, count: int, seconds: float) -> Figures:
        return self.figures(min(count, self.rows) * self.rate, seconds, 0.1)

    async def run_poisson(self, client: None, rate: float, seconds: float) -> Figures:
        is_too_much = rate > self.rows * self.rate
        return self.figures(rate, seconds, 10.0 if is_too_much else 0.1)


def test_many_replicas_win_if_they_beat_one_large_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    SimulatedService(monkeypatch)
    trial = trial_of(tmp_path, "--gpus", "8")
    best = search(trial, list(list_splits(8)), {"max_batch_size": [4]})
    assert best == {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_batch_size": 4}
    assert trial(best).rate == pytest.approx(8 * 4), "eight replicas of four rows"


@pytest.mark.parametrize("most", [0.1, 3.0, 7.9, 10.0])
def test_the_rate_is_near_the_highest_that_keeps_the_limits(most: float) -> None:
    best = find_best_rate(lambda rate: (rate <= most, 50 * rate), top=10.0)
    assert best.rate <= most and most - best.rate <= 10 / 2**4
    assert best.tokens_per_s == 50 * best.rate


def test_trials_are_saved_and_only_failed_ones_run_again(tmp_path: Path) -> None:
    path, options = tmp_path / "trials.json", {"max_batch_size": 4}
    results = iter([OptionsTrial(0.0, 0.0, "out of memory"), OptionsTrial(4.0, 1.0)])
    first = Trials(path, lambda _: next(results))
    assert first(options) == first(options) and "out of memory" in path.read_text()
    for _ in range(2):
        again = Trials(path, lambda _: next(results))
        assert again(options) == OptionsTrial(4.0, 1.0)


def trial_of(folder: Path, *flags: str) -> Services:
    return Services(tune.build_parser().parse_args(flags), {}, LIMITS["server"], folder, PROMPTS)


def test_a_model_that_does_not_load_is_a_trial_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def without_llm(_: list[str], log: Path) -> Iterator[str]:
        log.write_text(NOT_LOADED)
        yield "http://service"

    unavailable = httpx.Response(200, json={"status": "ready", "llm": "unavailable"})
    monkeypatch.setattr(httpx, "get", lambda *_, **__: unavailable)
    monkeypatch.setattr(tune, "local_service", without_llm)
    log = tmp_path / "max_batch_size_4.log"
    reason = f"0 of 1 replicas loaded: torch.OutOfMemoryError: CUDA out of memory. ({log})"
    assert trial_of(tmp_path)({"max_batch_size": 4}) == OptionsTrial(0.0, 0.0, reason)


def test_a_service_that_answers_no_request_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def refuse(*_: object) -> Figures:
        return Figures([StreamedAnswer(0.0, status=503)] * 9, 1.0)

    SimulatedService(monkeypatch)
    monkeypatch.setattr(tune, "run_streams", refuse)
    error = trial_of(tmp_path)({**next(list_splits(1)), "max_batch_size": 4}).error
    assert error.startswith("none of 9 requests was answered: status 503"), error


def test_trials_of_other_service_settings_are_not_reused(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("queue = 1")
    options = tune.build_parser().parse_args(["--settings", str(file)])
    first = tune.describe_settings(options, {})
    assert tune.describe_settings(options, {}) == first
    file.write_text("queue = 2")
    assert tune.describe_settings(options, {}) != first
    options.settings = str(tmp_path / "gone.toml")
    with pytest.raises(InvalidParams, match="settings must be a readable file .*gone.toml"):
        tune.describe_settings(options, {})


def test_toml_round_trip() -> None:
    values = {
        "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.9},
        "max_batch_size": 8,
        "enable_chunked_prefill": True,
    }
    assert tomllib.loads(format_toml(values)) == values
