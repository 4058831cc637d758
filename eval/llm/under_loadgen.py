"""A service's language model as LoadGen's system under test: it is told of each answer's first
token, and of its last with their number.
"""

from __future__ import annotations

import array
import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import mlperf_loadgen as lg

from eval.llm.client import AnswerTimes, Client
from eval.llm.prompts import LlmPrompt

REFUSED = 429
AGAIN_S, PATIENCE_S = 1.0, 600.0
"""between two tries of what was refused for lack of room, and for all of them"""


class Streams:
    """Every sample is a streamed answer, asked as soon as it is issued and there is room; its
    latency runs on while it waits."""

    def __init__(self, client: Client, at_once: int) -> None:
        """Offline issues 24576 samples at once: a service takes so many."""
        self.client, self.failed = client, 0
        self._room = asyncio.Semaphore(at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="streams", daemon=True)
        self._thread.start()

    def issue(self, samples: Sequence[tuple[int, int]]) -> None:
        for response, index in samples:
            asyncio.run_coroutine_threadsafe(self._answer(response, index), self._loop)

    def flush(self) -> None:
        """Nothing waits for others here."""

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.client.http.aclose(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, response: int, index: int) -> None:
        text = array.array("B", bytes(8))
        address, size = text.buffer_info()
        first = [lg.QuerySampleResponse(response, address, size)]
        prompt = self.client.prompts[index]
        async with self._room:
            heard = await self._heard(
                prompt, response % 2**31, lambda: lg.FirstTokenComplete(first)
            )
        self.failed += heard.status != 200
        if not heard.first_s:
            # LoadGen takes an answer without a first token for an error of the harness.
            lg.FirstTokenComplete(first)
        tokens = max(heard.tokens, 1)
        lg.QuerySamplesComplete([lg.QuerySampleResponse(response, address, size, tokens)])

    async def _heard(
        self, prompt: LlmPrompt, seed: int, on_first: Callable[[], None]
    ) -> AnswerTimes:
        until_s = time.perf_counter() + PATIENCE_S
        while True:
            heard = await self.client.ask(prompt, seed, on_first=on_first)
            if heard.status != REFUSED or time.perf_counter() > until_s:
                return heard
            await asyncio.sleep(AGAIN_S)
