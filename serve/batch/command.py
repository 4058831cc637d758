"""`sdxl batch`: a million prompts to pictures, over days and kills, nothing lost, nothing twice.

Here flags become a job; what is wrong is said before anything is loaded.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from engines.flags import add_engine_flags
from sdxl.arguments import (
    Parser,
    add_picture_flags,
    given_params,
    given_provenance,
    model_with,
    number,
    whole,
)
from sdxl.params import GenerationParams, InvalidParams
from sdxl.provenance import PROVENANCES, Provenance
from serve.batch.batch_spec import API_KEY, RANGES, BatchSpec
from serve.render.destination import SUFFIXES
from serve.supervision import STRUCK, supervise

DEFAULT_SHARD = 128
HAS_PROBLEMS = 1
END_S = 20.0
"""How long a job that was told to end may take to note what it has."""
INTERRUPTED, UNTOLD = 128 + signal.SIGINT, -1
ENDS: Mapping[int, int] = dict.fromkeys((*STRUCK, -signal.SIGSEGV, -signal.SIGABRT), UNTOLD)
"""A job that was told to end and ended like this was interrupted. Ray's threads may crash while the
process ends; what is in the ledger counts, and the next start goes on there."""


UNBEGUN = "interrupted; the same command begins it, or goes on with what is there"
"""said where it is not known how far the job was"""


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    if options.status is not None:
        return show_status(options.status, options.is_quiet)
    if options.verify is not None:
        return verify(options.verify)
    order = read_order(options)
    if order.through:
        # One that asks a service starts no Ray, and has nothing to leave behind.
        return make(order)
    code = supervise(partial(make, order), END_S, say, struck=ENDS)
    if code == UNTOLD:
        say(UNBEGUN)
        return INTERRUPTED
    return code


def make(order: BatchSpec) -> int:
    # Here and not above: a typo in a flag need not wait for what loads slowly.
    try:
        from serve.batch.running import ToldInterrupt, run
    except KeyboardInterrupt:
        say(UNBEGUN)
        raise
    try:
        return run(order)
    except KeyboardInterrupt as error:
        if not isinstance(error, ToldInterrupt):
            say(UNBEGUN)
        raise


def say(text: str) -> None:
    print(f"sdxl batch: {text}", file=sys.stderr, flush=True)


def build_parser() -> Parser:
    parser = Parser(prog="sdxl batch", description="Make pictures of every row of a file.")
    add: Callable[..., Any] = parser.add_argument
    flag = partial(add, action="store_true")
    add("inputs", nargs="*", metavar="INPUT", help=".txt, .jsonl, .csv or .parquet, or a pattern")
    add("--out", metavar="DIR", help="a folder, or an fsspec URL such as s3://bucket/job")
    add("--n", type=whole, default=1, metavar="N", help="pictures a row (default %(default)s)")
    add("--format", default="png", help=f"{', '.join(SUFFIXES)} (default %(default)s)")
    flag("--tar", dest="is_tarred", help="a tar in WebDataset's form a shard, not single files")
    add("--shard-size", type=whole, default=DEFAULT_SHARD, metavar="N", help="rows (%(default)s)")
    flag("--retry-dead", dest="retries_dead", help="try the dead letters of an earlier run again")
    flag("--read-back", dest="reads_back", help="read every finished picture, not a sample")
    group = parser.add_argument_group("who makes them")
    add = group.add_argument
    flag = partial(add, action="store_true")
    add_engine_flags(group, "(mini); with --through one of the service's (its first)")
    add("--workers", type=whole, default=0, metavar="N", help="one a GPU, or one, unless given")
    flag("--mixed-gpus", dest="is_mixed", help="workers with GPUs of several kinds")
    add("--address", metavar="HOST:PORT", help="a Ray cluster that runs; else one of its own")
    add("--through", metavar="URL", help=f"a service that runs, at low priority; key in {API_KEY}")
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the same bytes whatever runs beside a picture (default)",
    )
    add("--stall-s", type=number, default=120.0, metavar="S", help="a worker that does not advance")
    group = parser.add_argument_group("what it says")
    add = group.add_argument
    flag = partial(add, action="store_true")
    flag("--quiet", dest="is_quiet", help="JSON lines on stdout instead of the live display")
    add("--metrics-port", type=whole, metavar="PORT", help="for Prometheus, on loopback")
    add("--status", metavar="DIR", help="how far a job is, and no more")
    add("--verify", metavar="DIR", help="audit a job's output, and no more")
    add_picture_flags(parser)
    return parser


def read_order(options: argparse.Namespace) -> BatchSpec:
    """A flag's `dest` is its field in BatchSpec."""
    if not options.inputs:
        raise InvalidParams("input", None, "needed at least one file")
    if not options.out:
        raise InvalidParams("out", options.out, "needed a folder or an fsspec URL")
    if options.format not in SUFFIXES:
        raise InvalidParams("format", options.format, f"needed one of {', '.join(SUFFIXES)}")
    for name, (low, high) in {**RANGES, "workers": (0, 4096)}.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise InvalidParams(name, value, f"needed {low} to {high}")
    if options.stall_s <= 0:
        raise InvalidParams("stall_s", options.stall_s, "needed seconds above 0")
    if options.through and options.address:
        raise InvalidParams("address", options.address, "--through needs no cluster")
    if options.through and options.vae:
        raise InvalidParams("vae", options.vae, "the service at --through has its own")
    provenance = given_provenance(options)
    if provenance.is_signed and options.deterministic and not options.through:
        kinds = ", ".join(kind for kind in PROVENANCES if not Provenance(kind).is_signed)
        needed = f"a manifest has random salts: needed --no-deterministic, or one of {kinds}"
        raise InvalidParams("provenance", provenance.kind, needed)
    parameters = given_params(options)
    GenerationParams(**parameters)
    given = {f.name: getattr(options, f.name) for f in fields(BatchSpec) if f.name in options}
    given |= {"inputs": tuple(options.inputs), "parameters": parameters, "provenance": provenance}
    model = options.model or ("" if options.through else "mini")
    return BatchSpec(**{**given, "model": model_with(model, options.vae)})


def show_status(place: str, is_json: bool) -> int:
    from serve.batch.job import need_job
    from serve.batch.places import open_store
    from serve.batch.status import describe, read_status
    from serve.batch.store import token

    store = open_store(place, token())
    status = read_status(store, need_job(store, place))
    print(json.dumps(status, ensure_ascii=False) if is_json else describe(status))
    return 0


def verify(place: str) -> int:
    from serve.batch.audit import audit
    from serve.batch.displays import counted
    from serve.batch.job import need_job
    from serve.batch.places import open_store
    from serve.batch.store import token

    store = open_store(place, token())
    found = audit(store, need_job(store, place))
    for problem in found.problems:
        print(f"sdxl batch: {problem}", file=sys.stderr)
    told = f"{counted(found.rows, 'row')}: {counted(found.images, 'picture')}"
    dead, wrong = counted(found.dead_letters, "dead letter"), len(found.problems)
    print(f"{told}, {dead}, {counted(wrong, 'problem') if wrong else 'no problems'}")
    if found.problems:
        say("the job's own command with --read-back makes again what is missing or damaged")
    return HAS_PROBLEMS if found.problems else 0
