"""`sdxl tune llm`: find the options with which a language model makes the most tokens a second
within limits.

A trial starts the service with some options, searches the highest request rate that keeps both
limits, and counts tokens. All splits of the model over the GPUs are tried. In each, every other
option is raised in turn while that gains speed. Trials are saved; rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from eval.llm.bench import Figures, run_poisson, run_streams
from eval.llm.client import (
    Client,
    LlmPrompt,
    TokenLimits,
    add_answer_options,
    concurrent_requests,
    first_llm,
    limits_named,
    read_prompts,
    wait_until_loaded,
)
from eval.measuring.kept_facts import check_facts
from eval.service.client import local_service
from sdxl.arguments import Parser, add_option, check_positive
from sdxl.digests import sha256_of
from sdxl.files import read_toml, write_atomic, write_json
from sdxl.params import InvalidParams

Options = dict[str, Any]
GAIN = 1.02
"""the least gain of a larger value: more than noise"""
RATES = 5
"""trials of a request rate; each halves the interval"""
GROUP = ("tensor_parallel_size", "pipeline_parallel_size")
BATCHES = [4, 8, 16, 32, 64, 128, 256]
TRIALS, RESULT = "trials.json", "llm_options.toml"


@dataclass(frozen=True)
class OptionsTrial:
    """The most tokens a second within the limits, and the request rate for it."""

    tokens_per_s: float
    rate: float
    error: str = ""
    """the reason if the options did not run"""


Try = Callable[[Options], OptionsTrial]


def find_best_rate(try_rate: Callable[[float], tuple[bool, float]], top: float) -> OptionsTrial:
    """The most tokens a second at a rate that keeps the limits, by bisection below `top`."""
    least, best = 0.0, OptionsTrial(0.0, 0.0)
    rate = top
    for _ in range(RATES):
        is_kept, tokens_per_s = try_rate(rate)
        if is_kept:
            least = rate
            if tokens_per_s > best.tokens_per_s:
                best = OptionsTrial(tokens_per_s, rate)
            if rate == top:
                break
        else:
            top = rate
        rate = (least + top) / 2
    return best


def list_splits(gpus: int) -> Iterator[Options]:
    """Splits of a model over GPUs, in powers of two, by which heads and layers divide."""
    sizes = [2**i for i in range(gpus.bit_length()) if 2**i <= gpus]
    for tensor in sizes:
        for pipeline in sizes:
            if tensor * pipeline <= gpus:
                yield dict(zip(GROUP, (tensor, pipeline), strict=True))


def search(run: Try, splits: Sequence[Options], choices: Mapping[str, Sequence[int]]) -> Options:
    """The best options over all splits. In each, every choice is raised from its smallest value."""
    best, best_speed = Options(), -1.0
    for split in splits:
        options = split | {name: values[0] for name, values in choices.items()}
        speed = run(options).tokens_per_s
        for name, values in choices.items():
            for value in values[1:]:
                raised = run(options | {name: value}).tokens_per_s
                if raised <= speed * GAIN:
                    break
                options, speed = options | {name: value}, raised
        if speed > best_speed:
            best, best_speed = options, speed
    return best


class Trials:
    """Trials saved in a file; `run` makes those that are missing or failed in an earlier run."""

    def __init__(self, path: Path, run: Try) -> None:
        self.path, self.run = path, run
        self.known: dict[str, OptionsTrial] = {}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            trials = {key: OptionsTrial(**value) for key, value in stored.items()}
            self.known = {key: trial for key, trial in trials.items() if not trial.error}

    def __call__(self, options: Options) -> OptionsTrial:
        key = json.dumps(options, sort_keys=True)
        if key not in self.known:
            self.known[key] = self.run(options)
            write_json(self.path, {name: asdict(trial) for name, trial in self.known.items()})
        return self.known[key]


@dataclass(frozen=True)
class Services:
    """Starts a service for each trial and measures it over HTTP."""

    command: argparse.Namespace
    """the command's flags"""
    base: Mapping[str, Any]
    """options of the model that are not searched"""
    limits: TokenLimits
    folder: Path
    prompts: Sequence[LlmPrompt]

    def __call__(self, options: Options) -> OptionsTrial:
        command, size = self.command, math.prod(options.get(name, 1) for name in GROUP)
        replicas, file = max(1, command.gpus // size), self.folder / "trial.toml"
        write_atomic(file, format_toml(dict(self.base) | options).encode())
        flags = ["--llm", command.model, "--llm-backend", command.backend]
        flags += ["--llm-options", str(file), "--llm-replicas", str(replicas)]
        flags += ["--settings", command.settings] if command.settings else []
        named = "-".join(f"{name}_{value}" for name, value in sorted(options.items()))
        log = self.folder / f"{named}.log"
        try:
            with local_service(flags, log) as url:
                wait_until_loaded(url, replicas, log)
                # One batch runs at each replica and one waits, so no row is idle.
                clients = 2 * options.get("max_batch_size", 8) * replicas
                trial = self._measure(url, min(clients, concurrent_requests(url, "")))
        except (RuntimeError, httpx.HTTPError) as error:
            reason = (str(error) or repr(error)).splitlines()[-1]
            trial = OptionsTrial(0.0, 0.0, f"{reason} ({log})")
        print(f"{json.dumps(options)}: {describe(trial)}", flush=True)
        return trial

    def _measure(self, url: str, clients: int) -> OptionsTrial:
        model, seconds = first_llm(url, ""), self.command.seconds

        def run(load: Callable[[Client], Coroutine[Any, Any, Figures]]) -> Figures:
            return asyncio.run(load(Client(url, model, "", self.command.max_tokens, self.prompts)))

        full = run(lambda client: run_streams(client, clients, seconds))
        answered = len(full.answers) - full.failed
        if not answered:
            statuses = ", ".join(sorted({str(answer.status) for answer in full.answers}))
            raise RuntimeError(f"none of {full.failed} requests was answered: status {statuses}")

        def try_rate(rate: float) -> tuple[bool, float]:
            figures = run(lambda client: run_poisson(client, rate, seconds))
            return figures.holds(self.limits), figures.tokens_per_s

        return find_best_rate(try_rate, answered / full.took_s)


def describe(trial: OptionsTrial) -> str:
    if trial.error:
        return f"does not run: {trial.error}"
    if not trial.rate:
        return "keeps the limits at no rate"
    return f"{trial.tokens_per_s:.1f} tokens/s within the limits, at {trial.rate:.2f} requests/s"


def format_toml(values: Mapping[str, Any]) -> str:
    """Plain values come first: TOML requires it."""
    plain = [f"{k} = {json.dumps(v)}" for k, v in values.items() if not isinstance(v, Mapping)]
    tables = [
        f"\n[{k}]\n" + "\n".join(f"{name} = {json.dumps(each)}" for name, each in v.items())
        for k, v in values.items()
        if isinstance(v, Mapping)
    ]
    return "\n".join((*plain, *tables)) + "\n"


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    limits, base = check(options)
    folder = Path(options.out)
    check_facts(folder, "settings.json", describe_settings(options, base), "tuning")
    bench = Services(options, base, limits, folder, read_prompts(options.prompts))
    trials = Trials(folder / TRIALS, bench)
    choices = {"max_batch_size": options.batch}
    splits: list[Options] = [{}]
    if options.backend == "tensorrt-llm":
        splits = list(list_splits(options.gpus))
        choices["max_num_tokens"] = options.tokens
    best = search(trials, splits, choices)
    trial = trials(best)
    if trial.error:
        print(f"No options ran. {json.dumps(best)}: {trial.error}")
        return 1
    if not trial.rate:
        print(f"No options kept {limits} at the 99th percentile.")
        return 1
    write_atomic(folder / RESULT, format_toml(base | best).encode())
    print(
        f"best: {json.dumps(best)}: {describe(trial)}; sdxl serve --llm-options {folder / RESULT}"
    )
    return 0


def describe_settings(options: Any, base: Options) -> dict[str, Any]:
    """The settings that comparable trials share, with the digests of files."""
    searched, files = ("out", "batch", "tokens"), ("options", "settings", "prompts")
    plain = {k: v for k, v in vars(options).items() if k not in (*searched, *files)}
    digests = {f"{name}_sha256": digest_of(name, vars(options)[name]) for name in files[1:]}
    return plain | {"base": base, **digests}


def digest_of(field: str, file: str) -> str:
    try:
        return sha256_of(Path(file)) if file else ""
    except OSError as error:
        raise InvalidParams(field, file, f"must be a readable file ({error})") from error


def build_parser() -> Parser:
    parser = Parser(prog="sdxl tune llm", description="Find a language model's fastest options.")
    add = partial(add_option, parser)
    add("--model", "mini", "folder or hub id")
    add("--backend", "transformers", "transformers or tensorrt-llm")
    add("--options", "", "TOML of options that are not searched", "FILE")
    add("--gpus", 1, "GPUs for all replicas together")
    add("--batch", BATCHES, "values of max_batch_size, rising")
    add("--tokens", [2048, 4096, 8192], "values of max_num_tokens, rising")
    add("--seconds", 20.0, "duration of the load at each rate")
    add_answer_options(parser)
    add("--settings", "", "TOML of settings for `sdxl serve`", "FILE")
    add("--out", "out/tune-llm", "trials and the best options", "DIR")
    return parser


def check(options: Any) -> tuple[TokenLimits, Options]:
    if options.backend not in ("transformers", "tensorrt-llm"):
        raise InvalidParams("backend", options.backend, "must be transformers or tensorrt-llm")
    check_positive(options, "gpus", "seconds", "max_tokens")
    for name in ("batch", "tokens"):
        values = getattr(options, name)
        if sorted(set(values)) != values or values[0] < 1:
            raise InvalidParams(name, values, "must be whole numbers from 1, each larger")
    # Names are not checked: `sdxl serve` refuses unknown ones at the first trial.
    base = read_toml("options", options.options) if options.options else {}
    return limits_named(options.limits), base
