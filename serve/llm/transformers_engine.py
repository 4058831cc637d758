"""A transformers model on the CPU as an LlmEngine: one thread makes the tokens of all answers.

The thread receives orders through an inbox and sends tokens as text. It knows no prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import torch
from tokenizers.decoders import DecodeStream

from sdxl.params import InvalidParams
from serve import errors
from serve.errors import Problem
from serve.llm.decoding import Decoding, Generation, Made
from serve.llm.engine import Occupancy, TextPiece
from serve.llm.text_orders import Sampling
from serve.worker.loop_thread import LoopThread
from serve.worker.stalls import STALL_S, Calls

log = logging.getLogger(__name__)

MAX_CONTEXT = 4096
"""The default of `max_seq_len`: the memory of all rows is allocated at once."""
MAX_ROWS = 16
FULL = "full_attention"


class Listener:
    """Turns one generation's tokens into text and sends it to the waiting task."""

    def __init__(self, generation: Generation, tokenizer: Any) -> None:
        self.generation = generation
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[TextPiece | Exception] = asyncio.Queue()

    def emit(self, made: Made) -> None:
        text = self._stream.step(self._tokenizer, made.token) or ""
        self.send(TextPiece(text, made.generation.made, made.reason))

    def send(self, news: TextPiece | Exception) -> None:
        # If the event loop was closed, no client is left.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    async def pieces(self) -> AsyncGenerator[TextPiece]:
        """Yield the text; a slow reader gets several tokens at once."""
        while True:
            news = await self._news.get()
            while isinstance(news, TextPiece) and news.reason is None and not self._news.empty():
                later = self._news.get_nowait()
                if isinstance(later, Exception):
                    raise later
                news = TextPiece(news.text + later.text, later.tokens, later.reason)
            if isinstance(news, Exception):
                raise news
            yield news
            if news.reason is not None:
                return


class TransformersEngine:
    """Implements LlmEngine. Its thread starts at once."""

    name = "transformers"
    has_json = False

    def __init__(self, model: Any, tokenizer: Any, context: int, rows: int = MAX_ROWS) -> None:
        self.context = self.longest_prompt = context
        self.rows = rows
        self._calls = Calls("a step of the language model", time.monotonic, STALL_S)
        self.decoding = Decoding(model, rows, context, ends_of(model))
        self._tokenizer = tokenizer.backend_tokenizer
        self._listeners: dict[Generation, Listener] = {}
        self._occupancy = Occupancy(0, 0, 0.0)
        self._thread = LoopThread("decoder", self, time.monotonic)
        self._thread.start()

    # -- LlmEngine, from the event loop -----------------------------------------------------

    async def generate(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[TextPiece]:
        assert sampling.max_tokens is not None
        listener = Listener(Generation(list(ids), sampling, sampling.max_tokens), self._tokenizer)
        self._thread.send(partial(self._begin, listener))
        try:
            async for piece in listener.pieces():
                yield piece
        finally:
            self._thread.send(partial(self._end, listener))

    async def occupancy(self) -> Occupancy:
        return self._occupancy

    def check_health(self) -> None:
        self._calls.check()
        self._thread.check()

    def close(self) -> None:
        """End remaining generations with a Problem."""
        self._thread.send(partial(self.fail_all, errors.draining()))
        self._thread.stop(timeout_s=5.0)

    # -- on the thread ----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self.decoding.is_idle

    def advance(self) -> None:
        if not self.is_idle:
            self._step()
        running, waiting = len(self.decoding.running), len(self.decoding.waiting)
        self._occupancy = Occupancy(running, waiting, self.decoding.kv_share)

    def fail_all(self, cause: Exception) -> None:
        for listener in list(self._listeners.values()):
            listener.send(cause)
            self._end(listener)

    def _begin(self, listener: Listener) -> None:
        self._listeners[listener.generation] = listener
        self.decoding.submit(listener.generation)

    def _end(self, listener: Listener) -> None:
        self._listeners.pop(listener.generation, None)
        self.decoding.cancel(listener.generation)

    def _step(self) -> None:
        victims = [*self.decoding.running, *self.decoding.waiting]
        # Kinds of calls: by the power of two; 0 if no prompt is read.
        kind = self.decoding.tokens_to_read.bit_length()
        try:
            with self._calls.watch(kind):
                made = self.decoding.step()
            self._thread.record_calls(has_failed=False)
        except Exception:
            log.exception("the language model failed")
            self._thread.record_calls(has_failed=True)
            for generation in victims:
                if generation not in self.decoding.waiting:
                    self._listeners[generation].send(failed())
            return
        for each in made:
            listener = self._listeners[each.generation]
            try:
                listener.emit(each)
            except Exception:
                # Only this text fails; the others continue.
                log.exception("a token could not be sent")
                self.decoding.cancel(each.generation)
                listener.send(failed())


def failed() -> Problem:
    return Problem(500, "The language model failed.", None, "engine")


def ends_of(model: Any) -> list[int]:
    """Return the tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def load(folder: str, tokenizer: Any, rows: int | None, context: int | None) -> TransformersEngine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or [FULL])
    if kinds != {FULL} or getattr(config, "sliding_window", None):
        shown = ", ".join(sorted(kinds))
        raise InvalidParams("llm", folder, f"must have full attention in every layer, not {shown}")
    most = config.max_position_embeddings
    if context is not None and context > most:
        raise InvalidParams("max_seq_len", context, f"must be at most {most}, the model's context")
    return TransformersEngine(model, tokenizer, context or min(most, MAX_CONTEXT), rows or MAX_ROWS)
