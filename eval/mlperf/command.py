"""`sdxl bench mlperf`: the official LoadGen on engines in this process, or on all replicas of a
service.

A run writes LoadGen's summary and logs, the system's description and the settings into a folder.
Without --url, `--over http` starts a service here. Full runs need the benchmark's captions;
`--short` is the shortest run that LoadGen calls VALID.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.measuring.timing import wall_s
from eval.quality.inputs import LOADED, load_pipeline
from sdxl.arguments import (
    MODEL,
    Parser,
    add_generation_flags,
    add_option,
    given_params,
    number,
    refuse,
)
from sdxl.params import GenerationParams, InvalidParams

if TYPE_CHECKING:
    from eval.mlperf.loadgen import Issue, ScenarioRun, Summary

COMMON_FLAGS = (
    *("--scenario", "--model", "--backend", "--precision", "--over", "--url", "--captions"),
    *("--accuracy", "--short", "--out", "--json", "--steps", "--scheduler", "--cache-interval"),
)
SCENARIOS = ("Offline", "Server", "SingleStream")
AUDITS = ("TEST01", "TEST04")
SHORT_CAPTIONS = 64
SHARES = {"Offline": 1.2, "Server": 0.6}
"""the default of --target-qps as a share of the measured rate. LoadGen derives Offline's sample
count from it, and a run of less than ten minutes is INVALID."""
PROBE_WAVES = 2
"""A probe makes this many times the pictures in flight. Fewer are in flight at the end of a wave,
and with a single wave the end would weigh too much."""
RATE = "images/s"
"""the unit of scores that are rates"""
Make = Callable[[Sequence[GenerationParams]], object]
Meter = Callable[[], float]
"""reads joules"""


@dataclass(frozen=True)
class Expected:
    latency_s: float
    """of one picture alone"""
    rate: float
    """pictures a second, at full load"""


def probe(make: Make, requests: Sequence[GenerationParams], at_once: int) -> Expected:
    """Measure the speed for LoadGen's settings, after a warm-up."""
    make(requests[:1])
    latency_s = wall_s(lambda: make(requests[:1]))
    many = list(itertools.islice(itertools.cycle(requests), PROBE_WAVES * at_once))
    return Expected(latency_s, len(many) / wall_s(lambda: make(many)))


@dataclass(frozen=True)
class SystemUnderTest:
    """A system with its description, its measured speed and its meter of joules."""

    issue: Issue
    facts: dict[str, Any]
    expected: Expected
    meter: Meter | None


def energy_figures(summary: Summary, joules: float, seconds: float) -> dict[str, float]:
    """Joules and watts, and the rate per watt if the score is a rate; empty without joules."""
    if joules <= 0:
        return {}
    figures = {"joules": joules, "watts": joules / seconds}
    if summary.unit == RATE and summary.score is not None:
        figures["samples_per_s_per_watt"] = summary.score / figures["watts"]
    return figures


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    check(options)
    requests = read_requests(options)
    root = Path(options.out)
    if options.audit:
        return audit(options, requests, root)
    name = "accuracy" if options.is_accuracy else "performance"
    result = measure(options, requests, root / options.scenario / name)
    print(json.dumps(result) if options.is_json else describe(result, root))
    return 1 if result["valid"] is False else 0


def build_parser() -> Parser:
    from engines.flags import add_folder_flags

    parser = Parser(
        prog="sdxl bench mlperf", description="Run MLPerf's LoadGen.", common=COMMON_FLAGS
    )
    add = partial(add_option, parser)
    add("--scenario", "Offline", ", ".join(SCENARIOS))
    add("--model", "mini", MODEL)
    add("--backend", "auto", "of engines here, or of a service started here")
    add("--precision", None, "default: the backend's choice")
    add_folder_flags(parser)
    add("--over", "process", "process: engines here; http: a service")
    add("--url", None, "of a running service; its replicas share the load")
    add("--replicas", 1, "of a service started here")
    text = "the benchmark's captions; default: drawn scenes, for the embedded model only"
    add("--captions", None, text, "TSV")
    text = "requests a second of Server; the expected rate of Offline (default: measured first)"
    add("--target-qps", None, text, "X", type=number)
    text = "an accuracy run, whose log `sdxl eval` reads"
    add("--accuracy", False, text, dest="is_accuracy")
    add("--audit", None, f"a compliance test: {', '.join(AUDITS)}", "TEST")
    add("--short", False, "the shortest run that LoadGen calls VALID", dest="is_short")
    add("--deterministic", False, "each picture's bytes are independent of the batch")
    add("--out", "out/mlperf", "folder of the runs", "DIR")
    add("--json", False, "print the result as one JSON object", dest="is_json")
    add_generation_flags(parser)
    return parser


def check(options: argparse.Namespace) -> None:
    for field, allowed in (("scenario", SCENARIOS), ("over", ("process", "http"))):
        if getattr(options, field) not in allowed:
            raise InvalidParams.unknown(field, getattr(options, field), allowed)
    if options.audit not in (None, *AUDITS):
        raise InvalidParams.unknown("audit", options.audit, AUDITS)
    if options.target_qps is not None and options.target_qps <= 0:
        raise InvalidParams("target_qps", options.target_qps, "must be a number above 0")
    if options.url:
        needed = "cannot be used with --url: that service has its own"
        refuse(build_parser(), options, (*LOADED, "deterministic"), needed)
    if options.captions is None and options.model != "mini":
        raise InvalidParams(
            "captions", None, f"must be the benchmark's captions for {options.model}"
        )


def read_requests(options: argparse.Namespace) -> list[GenerationParams]:
    """The benchmark's requests for its captions; the model's defaults for drawn scenes."""
    from eval.quality import protocol
    from eval.quality.captions import escape_brackets, read_captions, scene_captions

    given = given_params(options)
    if options.captions is None:
        captions = scene_captions(SHORT_CAPTIONS if options.is_short else protocol.CAPTIONS)
        first = replace(GenerationParams(seed=0), **given)
    else:
        captions = [escape_brackets(caption) for caption in read_captions(Path(options.captions))]
        captions = captions[: SHORT_CAPTIONS if options.is_short else protocol.CAPTIONS]
        first = replace(protocol.REQUEST, **given)
    return [replace(first, prompt=caption) for caption in captions]


def audit(options: argparse.Namespace, requests: list[GenerationParams], root: Path) -> int:
    """Make the missing runs that a compliance test compares with, then run the test."""
    from eval.mlperf import compliance

    folder = root / options.scenario
    names = ("performance", *(("accuracy",) if options.audit == "TEST01" else ()))
    for name in names:
        if not is_usable(folder / name):
            changed = {"audit": None, "is_accuracy": name == "accuracy"}
            measure(argparse.Namespace(**vars(options) | changed), requests, folder / name)
    measure(options, requests, folder / options.audit, [folder / name for name in names])
    if options.audit == "TEST01":
        verdict = compliance.test01(folder / "accuracy", folder / "performance", folder / "TEST01")
    else:
        verdict = compliance.test04(folder / "performance", folder / "TEST04")
    print(f"{options.audit} {'passed' if verdict.passed else 'FAILED'}: {verdict.text}")
    return 0 if verdict.passed else 1


def is_usable(run: Path) -> bool:
    """True if the run has ended and LoadGen does not call it INVALID."""
    path = run / "result.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["valid"] is not False


def measure(
    options: argparse.Namespace,
    requests: list[GenerationParams],
    folder: Path,
    references: Sequence[Path] = (),
) -> dict[str, Any]:
    """Run LoadGen with the settings of `references`; return its summary and the energy."""
    from eval.measuring.system_description import describe_system
    from eval.mlperf.compliance import check_same
    from eval.mlperf.loadgen import ScenarioRun
    from sdxl.files import prepare_folder, write_json

    prepare_folder(folder)
    write = partial(write_json, sort_keys=True)
    with system_of(options, requests) as tested:
        rate = tested.expected.rate * SHARES.get(options.scenario, 1)
        run = ScenarioRun(
            options.scenario,
            folder,
            len(requests),
            target_qps=options.target_qps or rate,
            expected_latency_s=tested.expected.latency_s,
            is_accuracy=options.is_accuracy,
            is_short=options.is_short,
            audit=options.audit,
        )
        write(folder / "system.json", describe_system() | tested.facts)
        write(folder / "settings.json", describe_settings(run, requests))
        for reference in references:
            check_same(folder, reference)
        read = tested.meter or (lambda: 0.0)
        joules, began_s = read(), time.perf_counter()
        summary = run.start(tested.issue)
        seconds = time.perf_counter() - began_s
        result = summary.as_dict() | energy_figures(summary, read() - joules, seconds)
    write(folder / "result.json", result)
    return result


@contextmanager
def system_of(
    options: argparse.Namespace, requests: list[GenerationParams]
) -> Iterator[SystemUnderTest]:
    from eval.mlperf.loadgen import complete
    from eval.mlperf.systems import InProcess, OverHttp, in_process_at_once

    if options.url or options.over == "http":
        from eval.service.client import energy_meter

        with service_of(options) as url:
            over = OverHttp(url, requests, complete)
            facts = {"over": "http", "model": over.model.get("id")}
            facts |= {"engines": over.model.get("engines")}
            if not options.url:
                facts |= {"replicas": options.replicas, "deterministic": options.deterministic}
            try:
                expected = probe(over.make, requests, over.connections)
                yield SystemUnderTest(over.issue, facts, expected, energy_meter(url, "images"))
            finally:
                over.close()
        return
    from eval.measuring.energy import open_meter

    pipeline = load_pipeline(options, options.precision, is_deterministic=options.deterministic)
    expected = probe(pipeline.generate, requests, in_process_at_once(pipeline, requests[0]))
    system = InProcess(pipeline, requests, complete)
    facts = {"over": "process", "model": options.model, "deterministic": options.deterministic}
    facts |= {"engines": dict(pipeline.engines.description)}
    try:
        yield SystemUnderTest(system.issue, facts, expected, open_meter())
    finally:
        system.close()


@contextmanager
def service_of(options: argparse.Namespace) -> Iterator[str]:
    from eval.service.client import local_service

    if options.url:
        yield options.url.rstrip("/")
        return
    flags = ["--queue", "128", "--llm", "none"]
    for name in ("model", "backend", "replicas", "precision", "engines"):
        if value := getattr(options, name):
            flags += [f"--{name}", str(value)]
    flags += ["--unchecked"] if options.takes_unchecked else []
    flags += ["--deterministic"] if options.deterministic else []
    with local_service(flags) as url:
        yield url


def describe_settings(run: ScenarioRun, requests: list[GenerationParams]) -> dict[str, Any]:
    from eval.quality.captions import digest_captions

    settings = run.settings()
    names = (n for n in dir(settings) if not n.startswith("_"))
    plain = {n: v for n in names if isinstance(v := getattr(settings, n), int | float | bool)}
    request = {k: v for k, v in requests[0].as_dict().items() if k != "prompt"}
    return {
        "scenario": run.scenario,
        "short": run.is_short,
        "audit": run.audit,
        "captions": digest_captions([r.prompt for r in requests]),
        "request": request,
        "loadgen": plain,
    }


def describe(result: Mapping[str, Any], root: Path) -> str:
    verdict = {True: "VALID", False: "INVALID", None: "not judged: an accuracy run"}
    text = f"{result['scenario']}: {verdict[result['valid']]}"
    if result["score"] is not None:
        text += f", {result['score']:.3f} {result['unit']}"
    if "joules" in result:
        text += f", {result['joules']:.0f} J at {result['watts']:.1f} W"
    if "samples_per_s_per_watt" in result:
        text += f", {result['samples_per_s_per_watt']:.4g} samples/s/W"
    return f"{text}; logs in {root}"
