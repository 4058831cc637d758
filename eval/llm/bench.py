"""`sdxl bench llm`: a language model behind the REST API under Poisson load.

It measures the time to the first token and for each further token against MLPerf's limits, tokens
a second beside transformers' `generate` called request by request, and the cost of a token.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval.llm.client import (
    Client,
    LlmPrompt,
    StreamedAnswer,
    TokenLimits,
    add_answer_options,
    concurrent_requests,
    first_llm,
    limits_named,
    read_prompts,
)
from eval.measuring.timing import quantile
from eval.service.client import KEY_VARIABLE, energy_meter, local_service
from eval.service.traffic import closed_loop, open_loop
from sdxl.arguments import Parser, add_option, check_positive, number
from sdxl.params import InvalidParams

SCENARIOS = ("Offline", "Server")


@dataclass
class Figures:
    answers: list[StreamedAnswer]
    took_s: float
    joules: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.took_s

    @property
    def failed(self) -> int:
        return sum(answer.status != 200 for answer in self.answers)

    @property
    def first_s(self) -> list[float]:
        """Seconds to the first token, of answers with a first token."""
        return [a.wait_s for a in self.answers if a.status == 200 and a.first_s]

    @property
    def token_s(self) -> list[float]:
        seconds = (answer.token_s for answer in self.answers if answer.status == 200)
        return [each for each in seconds if each is not None]

    def holds(self, limits: TokenLimits) -> bool:
        is_first = quantile(self.first_s, 0.99) <= limits.first_s
        # An answer of one token has no time between tokens.
        is_each = not self.token_s or quantile(self.token_s, 0.99) <= limits.token_s
        return is_first and is_each and not self.failed

    def table(self, limits: TokenLimits, price: float | None) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "answers": len(self.answers) - self.failed,
            "failed": self.failed,
            "tokens_per_s": self.tokens_per_s,
            "first_token_ms": in_ms(self.first_s),
            "output_token_ms": in_ms(self.token_s),
            "is_within_limits": self.holds(limits),
        }
        if price:
            figures["tokens_per_dollar"] = self.tokens_per_s * 3600 / price
        if self.joules:
            figures["tokens_per_joule"] = self.tokens_per_s * self.took_s / self.joules
        return figures


def in_ms(seconds: Sequence[float]) -> list[float]:
    """Return the median and the 99th percentile in milliseconds; nothing without values."""
    return [1000 * quantile(seconds, q) for q in (0.5, 0.99)] if seconds else []


async def run_poisson(client: Client, rate: float, seconds: float) -> Figures:
    """Send requests at Poisson arrivals; they do not wait for answers."""
    rng, began_s = random.Random(0), time.perf_counter()
    answers = await open_loop(
        lambda n, due_s: client.request(rng.choice(client.prompts), n, due_s), rate, seconds
    )
    return Figures(answers, time.perf_counter() - began_s)


async def run_streams(client: Client, count: int, seconds: float) -> Figures:
    """Keep `count` requests under way."""
    prompts, began_s = client.prompts, time.perf_counter()
    answers = await closed_loop(
        lambda n, _: client.request(prompts[n % len(prompts)], n), count, seconds
    )
    return Figures(answers, time.perf_counter() - began_s)


def measure_generate(
    folder: str, prompts: Sequence[LlmPrompt], max_tokens: int, seconds: float
) -> float:
    """Tokens a second of transformers' `generate`, request by request, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens, number = 0, -1
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        number += 1
        prompt = prompts[number % len(prompts)]
        chat = [{"role": "user", "content": prompt.text}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        torch.manual_seed(number)
        most = prompt.max_tokens or max_tokens
        output = model.generate(**inputs, max_new_tokens=most, do_sample=True)
        tokens += output.shape[1] - inputs["input_ids"].shape[1]
        if not number:
            # The first call warms up.
            tokens, began_s = 0, time.perf_counter()
    return tokens / (time.perf_counter() - began_s)


def measure(url: str, options: Any) -> dict[str, dict[str, Any]]:
    prompts, model = read_prompts(options.prompts), first_llm(url, options.key)

    def new_client() -> Client:
        return Client(url, model, options.key, options.max_tokens, prompts)

    limits = limits_named(options.limits)
    if options.loadgen:
        name = f"LoadGen, {limits.benchmark} {options.loadgen}"
        return {name: run_loadgen(url, new_client(), options)}
    read = energy_meter(url, "llm", options.key)
    before = read() if read else 0.0
    load = asyncio.run(run_poisson(new_client(), options.rate, options.seconds))
    if read:
        load.joules = read() - before
    together = asyncio.run(run_streams(new_client(), options.streams, options.seconds))
    figures = {
        f"Poisson, {options.rate:g}/s": load.table(limits, options.price_per_hour),
        f"{options.streams} streams": together.table(limits, options.price_per_hour),
    }
    if options.peer:
        rate = measure_generate(options.peer, prompts, options.max_tokens, options.seconds)
        figures["plain generate"] = {"tokens_per_s": rate}
    return figures


def run_loadgen(url: str, client: Client, options: Any) -> dict[str, Any]:
    """LoadGen's verdict; its logs go to a folder."""
    from eval.llm.under_loadgen import Streams
    from eval.mlperf.loadgen import ScenarioRun
    from sdxl.files import prepare_folder

    folder = Path(options.out)
    prepare_folder(folder)
    run = ScenarioRun(
        options.loadgen,
        folder,
        len(client.prompts),
        target_qps=options.rate,
        is_short=options.is_short,
        benchmark=limits_named(options.limits).benchmark,
    )
    system = Streams(client, concurrent_requests(url, options.key))
    try:
        summary = run.start(system.issue)
    finally:
        system.close()
    is_valid = bool(summary.is_valid) and not system.failed
    figures = {"valid": is_valid, "tokens_per_s": summary.score, "failed": system.failed}
    return figures | {"logs": str(folder)}


def print_figures(runs: dict[str, dict[str, Any]]) -> None:
    for name, figures in runs.items():
        print(name)
        for key, value in figures.items():
            text = f"{value:.1f}" if isinstance(value, float) else str(value)
            if isinstance(value, list):
                text = "p50 {:.1f}  p99 {:.1f}".format(*value) if value else "-"
            print(f"  {key:18} {text}")


def build_parser() -> Parser:
    parser = Parser(prog="sdxl bench llm", description="A language model under load, over HTTP.")
    add = partial(add_option, parser)
    add("--url", "", "of a running service; without it, one is started here")
    add("--key", "", f"the service's API key (default: {KEY_VARIABLE})")
    add("--rate", 5.0, "arrivals a second")
    add("--seconds", 30.0, "duration of the load")
    add("--streams", 8, "concurrent requests")
    add_answer_options(parser)
    add("--peer", "", "also run transformers' generate on it", "MODEL")
    add("--price-per-hour", None, "of the machine: adds tokens per dollar", "DOLLARS", type=number)
    add("--loadgen", None, f"run MLPerf's LoadGen at --rate: {', '.join(SCENARIOS)}", "SCENARIO")
    add("--short", False, "LoadGen: the shortest valid run", dest="is_short")
    add("--out", "out/llm", "LoadGen's logs", "DIR")
    add("--json", False, "print the figures as one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    check_positive(options, "rate", "seconds", "streams", "max_tokens")
    limits_named(options.limits)
    read_prompts(options.prompts)
    if options.loadgen not in (None, *SCENARIOS):
        raise InvalidParams.unknown("loadgen", options.loadgen, SCENARIOS)
    url = options.url.rstrip("/")
    with nullcontext(url) if url else local_service() as url:
        runs = measure(url, options)
    print(json.dumps(runs)) if options.json else print_figures(runs)
    return 0 if all(figures.get("valid", True) for figures in runs.values()) else 1
