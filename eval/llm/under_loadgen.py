"""A service's language model as LoadGen's system under test. It reports each answer's first token,
then the end of the answer with the number of tokens.
"""

from __future__ import annotations

import array
import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import mlperf_loadgen as lg

from eval.llm.client import Client, LlmPrompt, StreamedAnswer

REFUSED = 429
RETRY_S, GIVE_UP_S = 1.0, 600.0
"""between two tries of a refused request, and until the request fails"""


class Streams:
    """Every sample is a streamed answer. At most `at_once` requests are under way; a waiting
    sample's latency counts."""

    def __init__(self, client: Client, at_once: int) -> None:
        self.client, self.failed = client, 0
        self._room = asyncio.Semaphore(at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="streams", daemon=True)
        self._thread.start()

    def issue(self, samples: Sequence[tuple[int, int]]) -> None:
        for response, index in samples:
            asyncio.run_coroutine_threadsafe(self._answer(response, index), self._loop)

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
            answer = await self._request(
                prompt, response % 2**31, lambda: lg.FirstTokenComplete(first)
            )
        self.failed += answer.status != 200
        if not answer.first_s:
            # LoadGen reports an answer without a first token as an error of the harness.
            lg.FirstTokenComplete(first)
        tokens = max(answer.tokens, 1)
        lg.QuerySamplesComplete([lg.QuerySampleResponse(response, address, size, tokens)])

    async def _request(
        self, prompt: LlmPrompt, seed: int, on_first: Callable[[], None]
    ) -> StreamedAnswer:
        until_s = time.perf_counter() + GIVE_UP_S
        while True:
            answer = await self.client.request(prompt, seed, on_first=on_first)
            if answer.status != REFUSED or time.perf_counter() > until_s:
                return answer
            await asyncio.sleep(RETRY_S)
