"""A speaker as a Ray Serve replica, on the CPU or on one group of GPUs.

The constructor returns at once, so that a slow or failing load delays nothing else. Answers travel
as plain data, Problems included.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from serve import errors, logs
from serve.errors import Problem
from serve.fleet import autoscaling
from serve.fleet.beats import with_checks
from serve.fleet.identity import labelled, replica_name
from serve.llm import options as options_
from serve.llm import trtllm_engine
from serve.llm.engine import LlmEngine
from serve.llm.names import MINI, id_of
from serve.llm.prompts import Prompts
from serve.llm.speaker import Speaker
from serve.llm.text_orders import LlmCard, TextOrder, Update
from serve.settings import ServeSettings

log = logging.getLogger(__name__)

LOADING_S = 1e6
"""Longer than any wait, so that loaded replicas come first."""
LOAD_ATTEMPTS, PAUSE_S = 2, 5.0
FAILED = "llm_failed"


def load(settings: ServeSettings) -> Speaker:
    """Load the model. `llm_backend` must not be `auto`."""
    folder = str(MINI) if settings.llm == "mini" else settings.llm
    options = options_.read(settings.llm_options, settings.llm_backend)
    prompts = Prompts(folder)
    if settings.llm_backend == "transformers":
        # Imported here, so that deploying a replica does not load PyTorch.
        from serve.llm import transformers_engine

        rows, context = options.get("max_batch_size"), options.get("max_seq_len")
        engine: LlmEngine = transformers_engine.load(folder, prompts.tokenizer, rows, context)
    else:
        engine = trtllm_engine.load(folder, options, settings.llm_start_s)
    return Speaker(id_of(settings.llm), prompts, engine, settings.queue)


class LlmReplica:
    def __init__(self, settings: ServeSettings) -> None:
        logs.configure(settings.log_format)
        self.settings = settings
        self.speaker: Speaker | None = None
        self.problem = errors.starting()
        """the answer while there is no speaker"""
        self.death: Exception | None = None
        """an error after which the process must be replaced"""
        # Ray calls the constructor in the event loop that answers.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(loop,), name="load", daemon=True).start()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        for attempt in range(LOAD_ATTEMPTS):
            time.sleep(attempt * PAUSE_S)
            try:
                speaker = load(self.settings)
                # TensorRT-LLM stays with the event loop of its first request.
                asyncio.run_coroutine_threadsafe(speaker.warm_up(), loop).result()
                self.speaker = speaker
                log.info("%s is loaded", speaker.id)
                return
            except trtllm_engine.StartTimeout as error:
                self.death = error
                return
            except Exception:
                log.exception("the language model could not be loaded")
        message = "The language model does not load; the server's log says why."
        self.problem = Problem(503, message, None, FAILED, 60.0)

    async def generate(self, order: TextOrder) -> AsyncGenerator[Update | Problem]:
        if self.speaker is None:
            yield self.problem
            return
        try:
            answer = self.speaker.generate(order)
            async with aclosing(with_checks(answer, self.speaker.engine.check_health)) as updates:
                async for update in updates:
                    yield update
        except Problem as problem:
            yield problem
        except Exception as error:
            log.warning("a text order failed: %s", error)
            yield Problem(503, "The language model stopped working.", None, "unhealthy", 5.0)

    async def card(self) -> LlmCard | Problem:
        if self.speaker is None:
            return self.problem
        return replace(
            await self.speaker.card(), device=os.environ.get("CUDA_VISIBLE_DEVICES") or "cpu"
        )

    async def metrics(self) -> Sequence[Any]:
        if self.speaker is None:
            return []
        return labelled(await self.speaker.metrics(), replica=replica_name())

    async def record_routing_stats(self) -> dict[str, float]:
        """Called by routers, which prefer replicas that are loaded and healthy. Each running answer
        counts as one second: only the comparison matters."""
        left_s = alone_s = LOADING_S
        if self.speaker is not None:
            self.speaker.engine.check_health()
            occupancy = await self.speaker.engine.occupancy()
            left_s, alone_s = float(occupancy.running + occupancy.waiting), 0.0
        return {"ready_in_s": left_s, "alone_s": alone_s, "each_s": 1.0}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray for the policy in autoscaling.py."""
        if self.speaker is None:
            return {autoscaling.BUSY: 0.0}
        engine = self.speaker.engine
        occupancy = await engine.occupancy()
        return {autoscaling.BUSY: (occupancy.running + occupancy.waiting) / engine.rows}

    async def check_health(self) -> None:
        """Called by Ray, which replaces the replica if this raises."""
        if self.death is not None:
            raise self.death
        if self.speaker is not None:
            self.speaker.engine.check_health()

    def __del__(self) -> None:
        """Called by Ray after the last answer."""
        speaker = getattr(self, "speaker", None)
        if speaker is not None:
            speaker.engine.close()
