"""`sdxl tune llm`: the options with which a language model makes the most tokens a second within
given limits, found by trials.

A trial starts the service with these options, looks for the most answers a second that keep both
limits, and counts tokens. Sizes of GPU groups are all tried; the other options are climbed, one
after the other, as long as a larger value gains. Trials are kept; another run goes on with them.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from engines.folders.digests import sha256_of
from eval.llm.bench import Figures, poisson, streams
from eval.llm.client import Client, at_once, llm_of
from eval.llm.limits import LIMITS, TokenLimits, limits_named
from eval.llm.loaded import wait_until_loaded
from eval.llm.prompts import OWN, LlmPrompt, add_prompts_flag, read_prompts
from eval.service.local_service import local_service
from sdxl.arguments import Parser, check_positive, number, whole
from sdxl.files import prepare_folder, write_atomic, write_json
from sdxl.params import InvalidParams

Options = dict[str, Any]
GAIN = 1.02
"""Less than that is noise, and the smaller value stays."""
RATES = 5
"""trials of an arrival rate, each halving what is left"""
GROUP = ("tensor_parallel_size", "pipeline_parallel_size")
BATCHES = [4, 8, 16, 32, 64, 128, 256]
TRIALS, FOUND = "trials.json", "llm_options.toml"


@dataclass(frozen=True)
class OptionsTrial:
    """What options gave: the most tokens a second within the limits, and at which arrivals."""

    tokens_per_s: float
    rate: float
    error: str = ""
    """why they did not run"""


class TrialFailed(RuntimeError):
    """A service that runs and answers nothing."""


Try = Callable[[Options], OptionsTrial]


def most_within(try_rate: Callable[[float], tuple[bool, float]], top: float) -> OptionsTrial:
    """The most tokens a second at a rate that keeps the limits; `top`: what no rate can exceed."""
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


def groups(gpus: int) -> Iterator[Options]:
    """Ways to cut a model over GPUs: powers of two, as its heads and layers are."""
    sizes = [2**i for i in range(gpus.bit_length()) if 2**i <= gpus]
    for tensor in sizes:
        for pipeline in sizes:
            if tensor * pipeline <= gpus:
                yield dict(zip(GROUP, (tensor, pipeline), strict=True))


def search(tried: Try, cuts: Sequence[Options], choices: Mapping[str, Sequence[int]]) -> Options:
    """The best options of all cuts, each with every choice climbed from its smallest value."""
    best, most = Options(), -1.0
    for cut in cuts:
        options = cut | {name: values[0] for name, values in choices.items()}
        found = tried(options).tokens_per_s
        for name, values in choices.items():
            for value in values[1:]:
                more = tried(options | {name: value}).tokens_per_s
                if more <= found * GAIN:
                    break
                options, found = options | {name: value}, more
        if found > most:
            best, most = options, found
    return best


class Trials:
    """Those that were made, in a file; `make` makes the others. What failed in an earlier run is
    tried anew: what it failed of may be mended."""

    def __init__(self, path: Path, settings: Mapping[str, Any], make: Try) -> None:
        self.path, self.settings, self.make = path, dict(settings), make
        self.known: dict[str, OptionsTrial] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["settings"] != self.settings:
                needed = f"needed a folder whose trials have the same settings: {kept['settings']}"
                raise InvalidParams("out", str(path.parent), needed)
            trials = {key: OptionsTrial(**value) for key, value in kept["trials"].items()}
            self.known = {key: found for key, found in trials.items() if not found.error}

    def __call__(self, options: Options) -> OptionsTrial:
        key = json.dumps(options, sort_keys=True)
        if key not in self.known:
            self.known[key] = self.make(options)
            content = {
                "settings": self.settings,
                "trials": {name: asdict(found) for name, found in self.known.items()},
            }
            write_json(self.path, content)
        return self.known[key]


@dataclass(frozen=True)
class Services:
    """A service for each trial, asked over HTTP."""

    model: str
    backend: str
    base: Mapping[str, Any]
    """options that are not searched"""
    limits: TokenLimits
    gpus: int
    seconds: float
    max_tokens: int
    settings: str
    """TOML of `sdxl serve`"""
    folder: Path
    prompts: Sequence[LlmPrompt] = OWN

    def __call__(self, options: Options) -> OptionsTrial:
        replicas = max(1, self.gpus // (options.get(GROUP[0], 1) * options.get(GROUP[1], 1)))
        file = self.folder / "trial.toml"
        write_atomic(file, toml(dict(self.base) | options).encode())
        flags = ["--llm", self.model, "--llm-backend", self.backend, "--llm-options", str(file)]
        flags += [
            "--llm-replicas",
            str(replicas),
            *(["--settings", self.settings] if self.settings else []),
        ]
        log = self.folder / log_name(options)
        try:
            with local_service(flags, log) as url:
                wait_until_loaded(url, replicas, log)
                # A batch that runs at each replica, and one that waits: none has idle rows.
                clients = 2 * options.get("max_batch_size", 8) * replicas
                found = self.measured(url, min(clients, at_once(url, "")))
        except (RuntimeError, httpx.HTTPError) as error:
            said = (str(error) or repr(error)).splitlines()[-1]
            found = OptionsTrial(0.0, 0.0, f"{said} ({log})")
        print(f"{json.dumps(options)}: {line_of(found)}", flush=True)
        return found

    def measured(self, url: str, clients: int) -> OptionsTrial:
        model = llm_of(url, "")

        def asked(load: Callable[[Client], Any]) -> Figures:
            found: Figures = asyncio.run(
                load(Client(url, model, "", self.max_tokens, self.prompts))
            )
            return found

        full = asked(lambda client: streams(client, clients, self.seconds))
        answered = len(full.answers) - full.failed
        if not answered:
            statuses = ", ".join(sorted({str(heard.status) for heard in full.answers}))
            raise TrialFailed(f"none of {full.failed} asks was answered: status {statuses}")

        def try_rate(rate: float) -> tuple[bool, float]:
            found = asked(lambda client: poisson(client, rate, self.seconds))
            return found.holds(self.limits), found.tokens_per_s

        return most_within(try_rate, answered / full.took_s)


def log_name(options: Options) -> str:
    named = "-".join(f"{name}_{value}" for name, value in sorted(options.items()))
    return f"{named}.log"


def line_of(found: OptionsTrial) -> str:
    if found.error:
        return f"does not run: {found.error}"
    if not found.rate:
        return "keeps the limits at no rate"
    return f"{found.tokens_per_s:.1f} tokens/s within the limits, at {found.rate:.2f} answers/s"


def toml(values: Mapping[str, Any]) -> str:
    """Plain values first, then tables, as TOML wants it."""
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
    prepare_folder(folder)
    bench = Services(
        options.model,
        options.backend,
        base,
        limits,
        options.gpus,
        options.seconds,
        options.max_tokens,
        options.settings,
        folder,
        read_prompts(options.prompts),
    )
    trials = Trials(folder / TRIALS, identity(options, base), bench)
    choices = {"max_batch_size": options.batch}
    cuts: list[Options] = [{}]
    if options.backend == "tensorrt-llm":
        cuts = list(groups(options.gpus))
        choices["max_num_tokens"] = options.tokens
    best = search(trials, cuts, choices)
    found = trials(best)
    if found.error:
        print(f"No options ran. {json.dumps(best)}: {found.error}")
        return 1
    if not found.rate:
        print(f"No options kept {limits.text} at the 99th percentile.")
        return 1
    write_atomic(folder / FOUND, toml(base | best).encode())
    print(f"best: {json.dumps(best)}: {line_of(found)}; sdxl serve --llm-options {folder / FOUND}")
    return 0


def identity(options: Any, base: Options) -> dict[str, Any]:
    """What trials must agree in to be held against each other; files count by their contents."""
    searched, files = ("out", "batch", "tokens"), ("options", "settings", "prompts")
    plain = {k: v for k, v in vars(options).items() if k not in (*searched, *files)}
    digests = {f"{name}_sha256": digest_of(name, vars(options)[name]) for name in files[1:]}
    return plain | {"base": base, **digests}


def digest_of(field: str, file: str) -> str:
    try:
        return sha256_of(Path(file)) if file else ""
    except OSError as error:
        raise InvalidParams(field, file, f"needed a file that can be read ({error})") from error


def build_parser() -> Parser:
    parser = Parser(prog="sdxl tune llm", description="Find a language model's fastest options.")
    add = parser.add_argument
    add("--model", default="mini", help="a folder or a hub id (%(default)s)")
    add("--backend", default="transformers", help="transformers or tensorrt-llm (%(default)s)")
    add("--options", default="", metavar="FILE", help="TOML of options that stay as they are")
    add("--limits", default="server", help=f"{', '.join(LIMITS)} (%(default)s)")
    add("--gpus", type=whole, default=1, help="that the model may take in all (%(default)s)")
    add("--batch", type=whole, nargs="+", default=BATCHES, help="max_batch_size, rising")
    add(
        "--tokens", type=whole, nargs="+", default=[2048, 4096, 8192], help="max_num_tokens, rising"
    )
    add("--seconds", type=number, default=20.0, help="of load at each rate (%(default)s)")
    add("--max-tokens", type=whole, default=64, help="an answer (%(default)s)")
    add_prompts_flag(parser)
    add("--settings", default="", metavar="FILE", help="TOML of settings for `sdxl serve`")
    add("--out", default="out/tune-llm", metavar="DIR", help="default %(default)s")
    return parser


def check(options: Any) -> tuple[TokenLimits, Options]:
    if options.backend not in ("transformers", "tensorrt-llm"):
        raise InvalidParams("backend", options.backend, "needed transformers or tensorrt-llm")
    check_positive(options, "gpus", "seconds", "max_tokens")
    for name in ("batch", "tokens"):
        values = getattr(options, name)
        if sorted(set(values)) != values or values[0] < 1:
            raise InvalidParams(name, values, "needed whole numbers from 1, each larger")
    return limits_named(options.limits), read_base(options.options)


def read_base(file: str) -> Options:
    """`sdxl serve` refuses names that its backend does not have, at the first trial."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidParams("options", file, f"needed a TOML file ({error})") from error
