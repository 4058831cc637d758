"""TensorRT-LLM as an LlmEngine, through its `LLM` API, which does in-flight batching and paging.

Every name used here is in trtllm_api.json. It runs in an interpreter of its own. `load` imports
TensorRT-LLM, which initialises MPI.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, wait
from typing import Any

from serve.errors import Problem
from serve.llm import trtllm_api
from serve.llm.engine import Occupancy, TextPiece
from serve.llm.text_orders import Reason, Sampling
from serve.worker.loop_thread import SICK_AFTER
from serve.worker.stalls import Unhealthy

log = logging.getLogger(__name__)

MAX_ROWS = 2048
"""TensorRT-LLM's default of max_batch_size."""
MOST_TOKENS = 8192
"""TensorRT-LLM's default of max_num_tokens, the tokens of one step."""
STATS_TIMEOUT_S = 2.0
"""TensorRT-LLM's default."""
HALF_CHARACTER = "\ufffd"
REASONS: dict[str | None, Reason] = {"stop": "stop", "length": "length", None: "stop"}


class StartTimeout(RuntimeError):
    """TensorRT-LLM did not start in time."""


class TrtllmEngine:
    """Implements LlmEngine."""

    name = "tensorrt-llm"

    def __init__(
        self, llm: Any, context: int, longest_prompt: int, rows: int, has_json: bool
    ) -> None:
        self.llm, self.context, self.longest_prompt = llm, context, longest_prompt
        self.rows, self.has_json = rows, has_json
        self._running, self._failures = 0, 0
        self._cache = CacheGauge(llm)

    async def generate(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[TextPiece]:
        request: Any = None
        is_over, sent = False, 0
        self._running += 1
        try:
            request = self.llm.generate_async(ids, params_of(sampling), streaming=True)
            self._cache.listen()
            async for answer in request:
                # A client may leave, or a stop string end the text, before the answer is over.
                self._failures = 0
                output, is_over = answer.outputs[0], answer.finished
                text = output.text if is_over else output.text.rstrip(HALF_CHARACTER)
                reason = reason_of(output.finish_reason) if is_over else None
                yield TextPiece(text[sent:], len(output.token_ids), reason)
                sent = max(sent, len(text))
        except Problem:
            raise
        except Exception:
            # One request failed; repeated failures make the engine unhealthy. A client's schema may
            # be one that TensorRT-LLM's grammars cannot express: that does not count.
            self._failures += sampling.json_schema is None
            is_over = True
            raise
        finally:
            self._running -= 1
            if request is not None and not is_over:
                request.abort()

    async def occupancy(self) -> Occupancy:
        if self._running:
            # Some versions report only statistics that exist when they are called.
            self._cache.listen()
        waiting = max(self._running - self.rows, 0)
        return Occupancy(self._running - waiting, waiting, self._cache.share)

    def check_health(self) -> None:
        if self._failures >= SICK_AFTER:
            raise Unhealthy(f"TensorRT-LLM failed {self._failures} times in a row")

    def close(self) -> None:
        self._cache.close()
        self.llm.shutdown()


class CacheGauge:
    """The share of the KV cache that is in use.

    TensorRT-LLM's stream of statistics has an item for every step and ends after a pause; later
    versions block at the call. So one thread reads it, always with the same event loop, to which
    TensorRT-LLM's queue is bound. Statistics that are not read pile up.
    """

    def __init__(self, llm: Any) -> None:
        self.share = 0.0
        self._llm, self._is_over = llm, False
        self._is_asked = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Start to read statistics; return at once."""
        self._is_asked.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-cache", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._is_asked.set()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            while self._is_asked.wait() and not self._is_over:
                self._is_asked.clear()
                runner.run(self._read())

    async def _read(self) -> None:
        try:
            async for stats in self._llm.get_stats_async(timeout=STATS_TIMEOUT_S):
                blocks = stats.get("kvCacheStats")
                if blocks:
                    self.share = blocks["usedNumBlocks"] / max(blocks["maxNumBlocks"], 1)
        except Exception:
            # Only the gauge becomes stale; the next request reads again.
            if not self._is_over:
                log.warning("TensorRT-LLM's statistics could not be read", exc_info=True)


def params_of(sampling: Sampling) -> Any:
    module = importlib.import_module("tensorrt_llm")
    is_greedy = sampling.is_greedy
    guided = None
    if sampling.json_schema is not None:
        guiding = importlib.import_module("tensorrt_llm.sampling_params").GuidedDecodingParams
        is_any = sampling.json_schema == "{}"
        guided = guiding(json_object=True) if is_any else guiding(json=sampling.json_schema)
    return module.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=None if is_greedy else sampling.temperature,
        top_k=1 if is_greedy else None,
        top_p=None if is_greedy else sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        # The speaker cuts it off. Without it, text that was already sent would disappear.
        include_stop_str_in_output=True,
        guided_decoding=guided,
        # The chat template has added them.
        add_special_tokens=False,
    )


def reason_of(found: str | None) -> Reason:
    if found not in REASONS:
        raise Problem(503, f"The language model stopped: {found}.", None, "unavailable", 5.0)
    return REASONS[found]


def load(folder: str, options: dict[str, Any], timeout_s: float) -> TrtllmEngine:
    """Load a model. After StartTimeout the process should end: MPI cannot be interrupted."""
    context = int(options.get("max_seq_len") or context_of(folder))
    has_json = options.get("guided_decoding_backend") is not None
    llm = run_within(timeout_s, lambda: make_llm(folder, {**options, "max_seq_len": context}))
    rows = int(options.get("max_batch_size", MAX_ROWS))
    # Without chunked prefill a prompt is read in one step.
    is_chunked = options.get("enable_chunked_prefill")
    longest_prompt = context if is_chunked else int(options.get("max_num_tokens", MOST_TOKENS))
    return TrtllmEngine(llm, context, longest_prompt, rows, has_json)


def make_llm(folder: str, options: dict[str, Any]) -> Any:
    module = importlib.import_module("tensorrt_llm")
    configs = importlib.import_module("tensorrt_llm.llmapi")
    given = {"enable_iter_perf_stats": True, **options}
    for name, (kind, _) in trtllm_api.tables().items():
        if name in given:
            given[name] = getattr(configs, kind)(**given[name])
    if "speculative_config" in given:
        given["speculative_config"] = speculative_of(configs, given["speculative_config"])
    return module.LLM(model=folder, **given)


def speculative_of(configs: Any, table: dict[str, Any]) -> Any:
    names = trtllm_api.SPECULATIVE[table["decoding_type"]]
    found = next((getattr(configs, name) for name in names if hasattr(configs, name)), None)
    if found is None:
        raise RuntimeError(f"this TensorRT-LLM has none of {', '.join(names)}")
    return found(**{name: value for name, value in table.items() if name != "decoding_type"})


def context_of(folder: str) -> int:
    from transformers import AutoConfig

    # In a model that also reads pictures, the text part has its own value.
    return int(AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings)


def run_within(timeout_s: float, work: Callable[[], Any]) -> Any:
    """Run `work` on a thread and return its result. After StartTimeout the thread goes on."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="tensorrt-llm", daemon=True).start()
    if not wait([outcome], timeout_s).done:
        raise StartTimeout(f"TensorRT-LLM did not start within {timeout_s:.0f} s")
    return outcome.result()
