"""What a language model's replica counts, for Prometheus."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve.llm.asks import Ended
from serve.llm.engine import Occupancy
from serve.worker.gpu_meter import GpuMeter

FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class LlmMeters:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.first = Histogram(
            "sdxl_llm_first_token_seconds",
            "from an ask to its first token",
            buckets=FIRST_BUCKETS,
            registry=registry,
        )
        self.each = Histogram(
            "sdxl_llm_output_token_seconds",
            "from token to token, the mean of an answer",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        kinds = ("kind",)
        self.tokens = Counter("sdxl_llm_tokens", "prompt, completion", kinds, registry=registry)
        self.answers = Counter(
            "sdxl_llm_answers", "by how they ended", ("outcome",), registry=registry
        )
        self.running = Gauge("sdxl_llm_running", "asks being answered", registry=registry)
        self.waiting = Gauge("sdxl_llm_waiting", "asks that wait", registry=registry)
        self.at_once = Gauge(
            "sdxl_llm_at_once", "asks that it takes at once; more are refused", registry=registry
        )
        GpuMeter(registry, work="llm")
        self.kv = Gauge("sdxl_llm_kv_cache_share", "of the KV cache, in use", registry=registry)

    def collect(self, occupancy: Occupancy, at_once: int) -> list[Any]:
        self.at_once.set(at_once)
        self.running.set(occupancy.running)
        self.waiting.set(occupancy.waiting)
        self.kv.set(occupancy.kv_share)
        return list(self.registry.collect())


class AskMeter:
    """One ask's times."""

    def __init__(self, meters: LlmMeters) -> None:
        self._meters, self._began_s = meters, time.perf_counter()
        self._first_s, self._first_tokens = 0.0, 0

    def record_tokens(self, tokens: int) -> None:
        """Record how many tokens of the answer exist."""
        if not self._first_tokens and tokens:
            self._first_s, self._first_tokens = time.perf_counter(), tokens
            self._meters.first.observe(self._first_s - self._began_s)

    def ended(self, outcome: str, end: Ended | None) -> None:
        self._meters.answers.labels(outcome).inc()
        if end is None:
            return
        self._meters.tokens.labels("prompt").inc(end.prompt_tokens)
        self._meters.tokens.labels("completion").inc(end.completion_tokens)
        later = end.completion_tokens - self._first_tokens
        if later > 0:
            self._meters.each.observe((time.perf_counter() - self._first_s) / later)
