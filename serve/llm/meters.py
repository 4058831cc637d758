"""The Prometheus metrics of a language model's replica."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve.llm.engine import Occupancy
from serve.llm.text_orders import Ended
from serve.worker.gpu_meter import GpuMeter

FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class LlmMeters:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        text = "from a request to its first token"
        self.first = histogram("sdxl_llm_first_token_seconds", text, buckets=FIRST_BUCKETS)
        text = "time from token to token, the mean of an answer"
        self.each = histogram("sdxl_llm_output_token_seconds", text, buckets=TOKEN_BUCKETS)
        self.tokens = counter("sdxl_llm_tokens", "prompt, completion", ("kind",))
        self.answers = counter("sdxl_llm_answers", "by how they ended", ("outcome",))
        self.running = gauge("sdxl_llm_running", "requests being answered")
        self.waiting = gauge("sdxl_llm_waiting", "requests that wait")
        text = "requests that a replica accepts at once; more are refused"
        self.at_once = gauge("sdxl_llm_at_once", text)
        GpuMeter(self.registry, work="llm")
        self.kv = gauge("sdxl_llm_kv_cache_share", "share of the KV cache in use")

    def collect(self, occupancy: Occupancy, at_once: int) -> list[Any]:
        self.at_once.set(at_once)
        self.running.set(occupancy.running)
        self.waiting.set(occupancy.waiting)
        self.kv.set(occupancy.kv_share)
        return list(self.registry.collect())


class OrderMeter:
    """Records one order's times."""

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
