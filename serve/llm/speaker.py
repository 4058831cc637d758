"""One language model of the service: orders in, text out, over any engine.

It renders prompts, enforces limits, deadlines and stop strings, and meters. It knows no Ray and no
HTTP. Every error is a Problem.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from serve import errors
from serve.errors import Problem
from serve.fleet.beats import within
from serve.llm.engine import LlmEngine
from serve.llm.meters import LlmMeters, OrderMeter
from serve.llm.prompts import Prompts, room
from serve.llm.text_orders import (
    Accepted,
    Delta,
    Ended,
    LlmCard,
    Message,
    Reason,
    Sampling,
    TextOrder,
    Update,
)

log = logging.getLogger(__name__)

RECENT = 8
"""number of answers whose durations are averaged"""
WARM_UP = TextOrder((Message("user", "hello"),), Sampling(max_tokens=2, temperature=0.0))


class Speaker:
    """Implements TextBackend over an engine."""

    def __init__(self, id_: str, prompts: Prompts, engine: LlmEngine, queue: int = 64) -> None:
        self.id, self.prompts, self.engine, self.queue = id_, prompts, engine, queue
        self.meters = LlmMeters()
        self._answer_s = 0.0
        self._open = 0
        """orders that run or wait"""
        """mean duration of recent answers, including their wait"""

    async def warm_up(self) -> None:
        async with aclosing(self._answer(WARM_UP, OrderMeter(LlmMeters()))) as updates:
            async for _ in updates:
                pass

    # -- TextBackend ------------------------------------------------------------------------

    async def card(self) -> LlmCard:
        return LlmCard(self.id, self.engine.context, self.engine.name)

    async def generate(self, order: TextOrder) -> AsyncGenerator[Update]:
        meter = OrderMeter(self.meters)
        outcome, end, began_s = "cancelled", None, time.monotonic()
        self._open += 1
        try:
            async with aclosing(self._answer(order, meter)) as updates:
                async for update in updates:
                    if isinstance(update, Ended):
                        outcome, end = update.reason, update
                        took_s = time.monotonic() - began_s
                        mean_s = self._answer_s or took_s
                        self._answer_s = mean_s + (took_s - mean_s) / RECENT
                    yield update
        except Problem as problem:
            outcome = problem.code or "failed"
            raise
        except Exception:
            outcome = "engine"
            log.exception("the language model's engine failed")
            raise Problem(500, "The language model failed.", None, "engine") from None
        finally:
            self._open -= 1
            meter.ended(outcome, end)

    async def metrics(self) -> Sequence[Any]:
        at_once = self.engine.rows + self.queue
        return self.meters.collect(await self.engine.occupancy(), at_once)

    # -- one order ----------------------------------------------------------------------------

    async def _answer(self, order: TextOrder, meter: OrderMeter) -> AsyncGenerator[Update]:
        ids, sampling = await self._accept(order)
        yield Accepted(len(ids))
        stops, made = Stops(sampling.stop), 0
        reason: Reason = "stop"
        generated = self.engine.generate(ids, sampling)
        async with aclosing(within(generated, order.deadline_s)) as pieces:
            async for piece in pieces:
                made = piece.tokens
                meter.record_tokens(made)
                if text := stops.feed(piece.text):
                    yield Delta(text)
                if stops.is_over:
                    break
                reason = piece.reason or reason
        if text := stops.rest():
            yield Delta(text)
        yield Ended("stop" if stops.is_over else reason, len(ids), made)

    async def _accept(self, order: TextOrder) -> tuple[list[int], Sampling]:
        """Refuse an order that cannot be served, before any work."""
        if self._open > self.engine.rows + self.queue:
            message = "Too many requests wait for the language model."
            # By Little's law, all waiting orders have begun then.
            begun_s = self._answer_s * (self._open - self.engine.rows) / self._open
            raise Problem(429, message, None, "overloaded", begun_s)
        if order.sampling.json_schema is not None and not self.engine.has_json:
            raise errors.invalid(
                "response_format",
                f"response_format: the backend {self.engine.name!r} cannot enforce JSON",
            )
        ids = await asyncio.to_thread(self.prompts.ids, order)
        most = room(ids, order, self.engine.context, self.engine.longest_prompt)
        temperature = order.sampling.temperature
        if temperature is None:
            temperature = self.prompts.temperature
        return ids, replace(order.sampling, max_tokens=most, temperature=temperature)


class Stops:
    """Finds stop strings in a text that arrives in pieces, also across pieces. No part of a stop
    string is sent."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""
        self.is_over = False

    def feed(self, text: str) -> str:
        """Return the text that may be sent now; hold back the possible start of a stop string."""
        self._held += text
        places = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.is_over = True
            return self._release(min(places))
        keep = max((_overlap(self._held, stop) for stop in self.stops), default=0)
        return self._release(len(self._held) - keep)

    def rest(self) -> str:
        """Return the held text after the last piece."""
        return "" if self.is_over else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that is a start of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
