"""`sdxl batch`: makes a picture of every row of a file. A job can be interrupted and resumed.

It checks the flags before it imports anything slow.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial

from engines.flags import add_engine_flags
from sdxl.arguments import (
    Parser,
    add_count_flag,
    add_option,
    add_picture_flags,
    given_params,
    given_provenance,
    model_with,
    refuse,
    whole,
)
from sdxl.model_names import name_of
from sdxl.params import GenerationParams, InvalidParams
from sdxl.provenance import PROVENANCES, Provenance
from serve.batch.batch_spec import API_KEY, RANGES, BatchSpec, ReportedInterrupt, check_ranges
from serve.render.destination import SUFFIXES
from serve.supervision import SIGNALLED, supervise

DEFAULT_SHARD = 128
COMMON_FLAGS = (
    *("--out", "--n", "--format", "--model", "--through", "--status", "--verify"),
    *("--negative-prompt", "--width", "--height", "--steps", "--guidance", "--scheduler"),
    "--quality",
)
LOCAL = (
    *("vae", "backend", "precision", "engines", "takes_unchecked"),
    *("lora_folder", "control_folder", "image_folder"),
    *("workers", "is_mixed", "address", "stall_s"),
    *("provenance", "certificate", "private_key"),
)
"""Flags for workers of its own."""
HAS_PROBLEMS = 1
END_S = 20.0
"""After an interrupt a job has this long to record its last pictures."""
INTERRUPTED, UNREPORTED = 128 + signal.SIGINT, -1
ENDS: Mapping[int, int] = dict.fromkeys((*SIGNALLED, -signal.SIGSEGV, -signal.SIGABRT), UNREPORTED)
"""Exit codes of an interrupted job. Ray's threads may crash while the process ends, which does no
harm: the ledger records the finished rows."""
RESUME_HINT = "interrupted; rerun the same command to start or resume it"
"""Printed if the job's progress is unknown."""


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    if options.status is not None:
        return print_status(options.status, options.is_quiet)
    if options.verify is not None:
        return verify(options.verify)
    order = read_order(options)
    if order.through:
        # Without Ray there are no processes to supervise.
        return make(order)
    code = supervise(partial(make, order), END_S, report, signalled=ENDS)
    if code == UNREPORTED:
        report(RESUME_HINT)
        return INTERRUPTED
    return code


def make(order: BatchSpec) -> int:
    try:
        # Imported here so that a typo in a flag is reported at once.
        from serve.batch.running import run

        return run(order)
    except ReportedInterrupt:
        raise
    except KeyboardInterrupt:
        report(RESUME_HINT)
        raise


def report(text: str) -> None:
    print(f"sdxl batch: {text}", file=sys.stderr, flush=True)


def build_parser() -> Parser:
    parser = Parser(
        prog="sdxl batch", description="Make pictures of every row of a file.", common=COMMON_FLAGS
    )
    add = partial(add_option, parser)
    text = ".txt, .jsonl, .csv or .parquet, or a pattern"
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help=text)
    text = "a folder, or an fsspec URL such as s3://bucket/job"
    parser.add_argument("-o", "--out", metavar="DIR", help=text)
    add_count_flag(parser, "pictures a row")
    add("--format", "png", ", ".join(SUFFIXES))
    add("--tar", False, "write a WebDataset tar for each shard", dest="is_tarred")
    add("--shard-size", DEFAULT_SHARD, "rows of a shard")
    add("--retry-dead", False, "retry the dead letters of earlier runs", dest="retries_dead")
    text = "check every finished picture instead of a sample"
    add("--read-back", False, text, dest="reads_back")
    group = parser.add_argument_group("workers")
    add = partial(add_option, group)
    add_engine_flags(group, "(default mini); with --through, one of the service's models")
    add("--workers", 0, "number of workers; 0: one for each GPU, or one")
    add("--mixed-gpus", False, "allow GPUs of several kinds", dest="is_mixed")
    add("--address", None, "a running Ray cluster (default: start one)", "HOST:PORT")
    add("--through", None, f"use a running service, at low priority; key in {API_KEY}", "URL")
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a picture has the same bytes whatever else is rendered (default)",
    )
    add("--stall-s", 120.0, "replace a worker without progress for so many seconds", "S")
    add = partial(add_option, parser.add_argument_group("monitoring"))
    add("--quiet", False, "JSON lines on stdout instead of a display", dest="is_quiet")
    add("--metrics-port", None, "serve metrics for Prometheus on loopback", "PORT", type=whole)
    add("--status", None, "print the progress of a job and exit", "DIR")
    add("--verify", None, "check the output of a job and exit", "DIR")
    add_picture_flags(parser)
    return parser


def read_order(options: argparse.Namespace) -> BatchSpec:
    """Check the flags. A flag's `dest` is its field in BatchSpec."""
    if not options.inputs:
        raise InvalidParams("input", None, "needs at least one file")
    if not options.out:
        raise InvalidParams("out", options.out, "must be a folder or an fsspec URL")
    if options.format not in SUFFIXES:
        raise InvalidParams.unknown("format", options.format, SUFFIXES)
    check_ranges(options, {**RANGES, "workers": (0, 4096)})
    if options.metrics_port is not None:
        check_ranges(options, {"metrics_port": (1, 65535)})
    if options.stall_s <= 0:
        raise InvalidParams("stall_s", options.stall_s, "must be a number of seconds above 0")
    if options.through:
        needed = "cannot be used with --through: the service has its own"
        refuse(build_parser(), options, LOCAL, needed)
    provenance = given_provenance(options)
    if provenance.is_signed and options.deterministic:
        kinds = ", ".join(kind for kind in PROVENANCES if not Provenance(kind).is_signed)
        needed = f"needs --no-deterministic, or one of {kinds}: a manifest has random salts"
        raise InvalidParams("provenance", provenance.kind, needed)
    parameters = given_params(options)
    if options.through and "refiner" in parameters:
        # The service has the refiner's name and no paths.
        parameters["refiner"] = name_of(parameters["refiner"])
    GenerationParams(**parameters)
    given = {f.name: getattr(options, f.name) for f in fields(BatchSpec) if f.name in options}
    given |= {"inputs": tuple(options.inputs), "parameters": parameters, "provenance": provenance}
    model = options.model or ("" if options.through else "mini")
    return BatchSpec(**{**given, "model": model_with(model, options.vae)})


def print_status(place: str, is_json: bool) -> int:
    from serve.batch.job import open_job
    from serve.batch.progress import describe, read_status

    status = read_status(*open_job(place))
    print(json.dumps(status, ensure_ascii=False) if is_json else describe(status))
    return 0


def verify(place: str) -> int:
    from serve.batch.audit import audit
    from serve.batch.job import open_job
    from serve.batch.progress import counted

    result = audit(*open_job(place))
    for problem in result.problems:
        report(problem)
    rows, images = counted(result.rows, "row"), counted(result.images, "picture")
    dead = counted(result.dead_letters, "dead letter")
    problems = counted(len(result.problems), "problem") if result.problems else "no problems"
    print(f"{rows}: {images}, {dead}, {problems}")
    if not result.problems:
        return 0
    report("rerun the job's command with --read-back to make missing and damaged pictures again")
    return HAS_PROBLEMS
