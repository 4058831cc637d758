"""Replaces TensorRT-LLM where it cannot be installed. It has the recorded names and nothing else.

A name, argument or field that is not in trtllm_api.json raises, as on a GPU machine.
Put this folder's parent on the path and `import tensorrt_llm` finds it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from serve.llm import trtllm_api

RECORD = trtllm_api.record()
WORDS = ("a", " red", " circle", " with", " caf", "\ufffd", "é", " on", " blue")
"""a word for each token; the sixth is half a character, which the next one completes"""
START_VARIABLE = "TRTLLM_DOUBLE_START_S"
STEP_S = 0.01


def recorded(name: str, fields: Any) -> type:
    """Return a class with these recorded fields. It refuses other fields."""

    def __init__(self: Any, **given: Any) -> None:
        for key in given:
            if key not in fields:
                raise TypeError(f"{name} has no argument {key!r}")
        needed = [key for key, default in fields.items() if default == "required"]
        if missing := [key for key in needed if key not in given]:
            raise TypeError(f"{name} needs {missing}")
        self.__dict__.update({**fields, **given})

    return type(name, (), {"__init__": __init__})


SamplingParams = recorded("SamplingParams", RECORD["SamplingParams"])
CompletionOutput = recorded("CompletionOutput", RECORD["CompletionOutput"])


class RequestOutput:
    def __init__(self, llm: LLM, params: Any) -> None:
        self.outputs: list[Any] = []
        self.finished = False
        self._llm, self._params = llm, params

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        words = list(self._llm.words)[: self._params.max_tokens]
        for i in range(1, len(words) + 1):
            await asyncio.sleep(self._llm.token_s)
            if self._llm.fault is not None:
                self._llm.open.discard(self)
                raise self._llm.fault
            self._advance(words[:i], is_last=i == len(words))
            yield self
            if self.finished:
                break

    def _advance(self, words: list[str], is_last: bool) -> None:
        text = "".join(words)
        text = text if text.endswith("\ufffd") else text.replace("\ufffd", "")
        is_whole, stops = len(words) == len(self._llm.words), self._params.stop or ()
        assert self._params.include_stop_str_in_output
        stopped = [text.find(stop) + len(stop) for stop in stops if stop in text]
        reason = self._llm.reason if is_whole or stopped else "length"
        self.finished = is_last or bool(stopped)
        if self.finished:
            self._llm.open.discard(self)
        self.outputs = [
            CompletionOutput(
                index=0,
                text=text[: min(stopped)] if stopped else text,
                token_ids=list(range(len(words))),
                finish_reason=reason if self.finished else None,
            )
        ]

    def abort(self) -> None:
        self._llm.aborted += 1
        self._llm.open.discard(self)


class LLM:
    """Checks the arguments against the record, and always generates the same text."""

    before_start: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, **given: Any) -> None:
        for name in given:
            if name not in trtllm_api.llm_names():
                raise TypeError(f"LLM has no argument {name!r}")
        if "model" not in given:
            raise TypeError("LLM needs a model")
        type(self).before_start()
        time.sleep(float(os.environ.get(START_VARIABLE, "0")))
        self.given = given
        self.words, self.token_s, self.reason = WORDS, 0.0, "stop"
        self.before_stats: Callable[[], object] = lambda: None
        self.fault: Exception | None = None
        self.open: set[RequestOutput] = set()
        self.aborted = 0
        self.asked: list[list[int]] = []
        self.params: list[Any] = []
        self.step_tokens = given.get("max_num_tokens", RECORD["LLM.__init__"]["max_num_tokens"])

    def generate_async(
        self, inputs: list[int], sampling_params: Any = None, streaming: bool = False
    ) -> RequestOutput:
        assert isinstance(inputs, list) and all(isinstance(token, int) for token in inputs)
        assert streaming, "the adapter streams"
        if len(inputs) > self.step_tokens and not self.given.get("enable_chunked_prefill"):
            raise ValueError(f"prompt length should not exceed max_num_tokens ({self.step_tokens})")
        self.asked.append(inputs)
        self.params.append(sampling_params)
        request = RequestOutput(self, sampling_params)
        self.open.add(request)
        return request

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Later versions of the real method block while they ask their workers."""
        self.before_stats()
        return self._stats(timeout)

    async def _stats(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """Yield a statistic for every step, and end after a while without one."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + (timeout or 0)
        while self.given.get("enable_iter_perf_stats") and clock() < until_s:
            if self.open:
                yield {"kvCacheStats": {"maxNumBlocks": 8, "usedNumBlocks": len(self.open)}}
                until_s = clock() + (timeout or 0)
            await asyncio.sleep(STEP_S)

    def shutdown(self) -> None: ...
