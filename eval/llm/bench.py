"""`sdxl bench llm`: a language model behind the REST API under Poisson load.

Time to first token and per output token against the benchmark's limits, tokens a second against
plain `generate` called request by request, and what a token costs. It talks HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.llm.client import AnswerTimes, Client, at_once, llm_of
from eval.llm.limits import LIMITS, TokenLimits, limits_named
from eval.llm.prompts import LlmPrompt, add_prompts_flag, read_prompts
from eval.measuring.timing import quantile
from eval.service import api_key
from eval.service.gpu_energy import meter_of
from eval.service.local_service import local_service
from eval.service.traffic import closed_loop, open_loop
from sdxl.arguments import Parser, check_positive, number, whole
from sdxl.params import InvalidParams

SCENARIOS = ("Offline", "Server")


@dataclass
class Figures:
    answers: list[AnswerTimes]
    took_s: float
    joules: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(heard.tokens for heard in self.answers) / self.took_s

    @property
    def failed(self) -> int:
        return sum(heard.status != 200 for heard in self.answers)

    @property
    def first_s(self) -> list[float]:
        """An answer may be empty: then there was no first token to wait for."""
        return [heard.wait_s for heard in self.answers if heard.status == 200 and heard.first_s]

    @property
    def token_s(self) -> list[float]:
        found = (heard.token_s for heard in self.answers if heard.status == 200)
        return [each for each in found if each is not None]

    def holds(self, limits: TokenLimits) -> bool:
        is_first = quantile(self.first_s, 0.99) <= limits.first_s
        # Answers of one token have no second one to wait for.
        is_each = not self.token_s or quantile(self.token_s, 0.99) <= limits.token_s
        return is_first and is_each and not self.failed

    def table(self, limits: TokenLimits, price: float | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "answers": len(self.answers) - self.failed,
            "failed": self.failed,
            "tokens_per_s": self.tokens_per_s,
            "first_token_ms": [1000 * quantile(self.first_s, q) for q in (0.5, 0.99)],
            "output_token_ms": [1000 * quantile(self.token_s, q) for q in (0.5, 0.99)],
            "is_within_limits": self.holds(limits),
        }
        if price:
            found["tokens_per_dollar"] = self.tokens_per_s * 3600 / price
        if self.joules:
            found["tokens_per_joule"] = self.tokens_per_s * self.took_s / self.joules
        return found


async def poisson(client: Client, rate: float, seconds: float) -> Figures:
    """Arrivals do not wait for answers."""
    drawn, began_s = random.Random(0), time.perf_counter()

    async def ask(number: int, due_s: float) -> AnswerTimes:
        return await client.ask(drawn.choice(client.prompts), number, due_s)

    answers = await open_loop(ask, rate, seconds)
    return Figures(answers, time.perf_counter() - began_s)


async def streams(client: Client, count: int, seconds: float) -> Figures:
    """So many at once, each asking again as soon as it is answered."""
    began_s = time.perf_counter()

    async def ask(number: int, _: float) -> AnswerTimes:
        return await client.ask(client.prompts[number % len(client.prompts)], number)

    answers = await closed_loop(ask, count, seconds)
    return Figures(answers, time.perf_counter() - began_s)


def plain_generate(
    folder: str, prompts: Sequence[LlmPrompt], max_tokens: int, seconds: float
) -> float:
    """Tokens a second of transformers' own `generate`, request by request, in this process."""
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
        asked = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        torch.manual_seed(number)
        most = prompt.max_tokens or max_tokens
        made = model.generate(**asked, max_new_tokens=most, do_sample=True)
        tokens += made.shape[1] - asked["input_ids"].shape[1]
        if not number:
            # The first call pays for what happens once.
            tokens, began_s = 0, time.perf_counter()
    return tokens / (time.perf_counter() - began_s)


def service(url: str) -> AbstractContextManager[str]:
    return nullcontext(url.rstrip("/")) if url else local_service()


def measure(url: str, options: Any) -> dict[str, dict[str, Any]]:
    prompts, model = read_prompts(options.prompts), llm_of(url, options.key)

    def client_of() -> Client:
        return Client(url, model, options.key, options.max_tokens, prompts)

    limits = limits_named(options.limits)
    if options.loadgen:
        return {f"LoadGen, {limits.benchmark} {options.loadgen}": judged(url, client_of(), options)}
    read = meter_of(url, "llm", options.key)
    before = read() if read else 0.0
    load = asyncio.run(poisson(client_of(), options.rate, options.seconds))
    if read:
        load.joules = read() - before
    together = asyncio.run(streams(client_of(), options.streams, options.seconds))
    found = {
        f"Poisson, {options.rate:g}/s": load.table(limits, options.price_per_hour),
        f"{options.streams} streams": together.table(limits, options.price_per_hour),
    }
    if options.peer:
        rate = plain_generate(options.peer, prompts, options.max_tokens, options.seconds)
        found["plain generate"] = {"tokens_per_s": rate}
    return found


def judged(url: str, client: Client, options: Any) -> dict[str, Any]:
    """LoadGen's word, and its logs in a folder."""
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
    system = Streams(client, at_once(url, options.key))
    try:
        summary = run.start(system)
    finally:
        system.close()
    is_valid = bool(summary.is_valid) and not system.failed
    found = {"valid": is_valid, "tokens_per_s": summary.score, "failed": system.failed}
    return found | {"logs": str(folder)}


def show(found: dict[str, dict[str, Any]]) -> None:
    for name, figures in found.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:18} {shown(value)}")


def shown(value: Any) -> str:
    if isinstance(value, list):
        return "  ".join(f"{name} {x:.1f}" for name, x in zip(("p50", "p99"), value, strict=True))
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="sdxl bench llm", description="A language model under load, over HTTP.")
    parser.add_argument("--url", default="", help="a running service; one is started unless given")
    parser.add_argument("--key", default="", help=f"its API key, unless {api_key.VARIABLE} has it")
    parser.add_argument("--rate", type=number, default=5.0, help="arrivals a second (%(default)s)")
    parser.add_argument("--seconds", type=number, default=30.0, help="of load (%(default)s)")
    parser.add_argument("--streams", type=whole, default=8, help="at once (%(default)s)")
    parser.add_argument("--max-tokens", type=whole, default=64, help="an answer (%(default)s)")
    add_prompts_flag(parser)
    parser.add_argument("--peer", default="", metavar="MODEL", help="also run plain generate on it")
    parser.add_argument("--price-per-hour", type=number, help="dollars, for tokens a dollar")
    parser.add_argument("--limits", default="server", help=f"{', '.join(LIMITS)} (%(default)s)")
    parser.add_argument(
        "--loadgen",
        metavar="SCENARIO",
        help=f"MLPerf's LoadGen decides: {', '.join(SCENARIOS)}, at --rate",
    )
    parser.add_argument(
        "--short", action="store_true", dest="is_short", help="as little as LoadGen calls VALID"
    )
    parser.add_argument("--out", default="out/llm", metavar="DIR", help="its logs (%(default)s)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args(argv)
    check_positive(options, "rate", "seconds", "streams", "max_tokens")
    limits_named(options.limits)
    read_prompts(options.prompts)
    if options.loadgen not in (None, *SCENARIOS):
        raise InvalidParams("loadgen", options.loadgen, f"needed one of {', '.join(SCENARIOS)}")
    with service(options.url) as url:
        found = measure(url, options)
    print(json.dumps(found)) if options.json else show(found)
    return 0 if all(figures.get("valid", True) for figures in found.values()) else 1
