"""Requests and options of each client of stable-diffusion-webui's API.

A client's interrupt and options do not affect other clients. The state is in this process: with
several front ends a client's next call may reach another one. It knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from serve.front.runs import Run

MOST_CLIENTS = 1000


@dataclass(eq=False)
class WebuiRun(Run):
    task: asyncio.Future[None] | None = None
    """makes the pictures"""
    is_interrupted: bool = False


@dataclass
class ClientState:
    options: dict[str, Any] = field(default_factory=dict)
    runs: list[WebuiRun] = field(default_factory=list)

    def interrupt(self) -> None:
        for run in self.runs:
            run.is_interrupted = True
            if run.task is not None:
                run.task.cancel()

    def progress(self) -> dict[str, Any]:
        """Return the progress of the first request, in stable-diffusion-webui's form."""
        run = self.runs[0] if self.runs else None
        state = {
            "skipped": False,
            "interrupted": bool(run and run.is_interrupted),
            "stopping_generation": False,
            "job": "txt2img" if run else "",
            "job_count": len(self.runs),
            "job_timestamp": "0",
            "job_no": len(run.done) if run else 0,
            "sampling_step": round(run.share * run.steps) if run else 0,
            "sampling_steps": run.steps if run else 0,
        }
        return {
            "progress": run.share if run else 0.0,
            "eta_relative": run.eta_s if run else 0.0,
            "state": state,
            "current_image": None,
            "textinfo": None,
        }


def states() -> Callable[[str], ClientState]:
    """Return a function that returns a client's state. Beyond the limit, the least recently used
    state is dropped."""
    return lru_cache(MOST_CLIENTS)(lambda client: ClientState())
