"""Workers of a job: Ray actors, one for each device, or a thread of this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from serve.batch.rows import ShardPiece
from serve.batch.shard_worker import BatchTask, Load, ShardWorker, TurnReport
from serve.orders import ModelCard

LEAVE_S = 5.0


class BatchWorker(Protocol):
    name: str

    def ready(self) -> Future[ModelCard]:
        """Load the model; return its card."""
        ...

    def turn(self, pieces: dict[int, ShardPiece]) -> Future[TurnReport]: ...
    def end(self) -> None:
        """End at once."""
        ...


StartWorker = Callable[[str], BatchWorker]
"""Starts a worker with a name."""


class RayWorker:
    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor = name, actor

    def ready(self) -> Future[ModelCard]:
        return self._actor.card.remote().future()

    def turn(self, pieces: dict[int, ShardPiece]) -> Future[TurnReport]:
        return self._actor.turn.remote(pieces).future()

    def end(self) -> None:
        import ray

        ray.kill(self._actor)


def ray_workers(load: Load, task: BatchTask, has_gpus: bool, threads: int) -> StartWorker:
    import ray

    actor = ray.remote(ShardWorker).options(**actor_options(has_gpus, threads))
    return lambda name: RayWorker(name, actor.remote(load, task, name))


def actor_options(has_gpus: bool, threads: int) -> dict[str, Any]:
    """Return an actor's resources: a GPU if there are any, or threads, which Ray does not count."""
    if has_gpus:
        return {"num_gpus": 1, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
    environment = {"env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}}
    return {"num_cpus": 0, "scheduling_strategy": "SPREAD", "runtime_env": environment}


def threads_for(workers: int) -> int:
    return int(os.environ.get("OMP_NUM_THREADS", max((os.cpu_count() or 1) // workers, 1)))


class ThreadWorker:
    def __init__(self, name: str, load: Load, task: BatchTask) -> None:
        self.name, self._load, self._task = name, load, task
        self._worker: ShardWorker | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ready(self) -> Future[ModelCard]:
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop)

    def turn(self, pieces: dict[int, ShardPiece]) -> Future[TurnReport]:
        assert self._worker is not None
        return asyncio.run_coroutine_threadsafe(self._worker.turn(pieces), self._loop)

    def end(self) -> None:
        """Stop the thread. A hanging thread stays until the process ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_S)

    async def _start(self) -> ModelCard:
        self._worker = await asyncio.to_thread(ShardWorker, self._load, self._task, self.name)
        return await self._worker.card()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._leave())
        self._loop.close()

    async def _leave(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()


def thread_workers(load: Load, task: BatchTask) -> StartWorker:
    return partial(ThreadWorker, load=load, task=task)
