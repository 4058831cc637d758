"""What each client of stable-diffusion-webui's API has under way and has set for itself.

One client's interrupt or options never touch another's. It is this process's memory: with several
fronts a client's next call may reach another. It knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from serve.orders import Done, ImageProgress

MOST_CLIENTS = 1000


@dataclass(eq=False)
class Run:
    """One request under way."""

    count: int
    steps: int
    began_s: float = field(default_factory=time.monotonic)
    done: dict[int, Done] = field(default_factory=dict)
    progress: dict[int, ImageProgress] = field(default_factory=dict)
    is_interrupted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def share(self) -> float:
        """Of its steps, those that were taken."""
        taken = sum(self.steps if i in self.done else self._step(i) for i in range(self.count))
        return taken / (self.steps * self.count)

    @property
    def eta_s(self) -> float:
        return max((each.eta_s for each in self.progress.values()), default=0.0)

    def _step(self, index: int) -> int:
        told = self.progress.get(index)
        return min(told.step, self.steps) if told else 0


@dataclass
class ClientState:
    options: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def interrupt(self) -> None:
        for run in self.runs:
            run.is_interrupted.set()

    def progress(self) -> dict[str, Any]:
        """As stable-diffusion-webui tells it; of several requests the one that began first."""
        run = self.runs[0] if self.runs else None
        state = {
            "skipped": False,
            "interrupted": bool(run and run.is_interrupted.is_set()),
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


class Clients:
    def __init__(self) -> None:
        self._states: OrderedDict[str, ClientState] = OrderedDict()

    def of(self, client: str) -> ClientState:
        """Those who have asked nothing for the longest time are forgotten first."""
        state = self._states.setdefault(client, ClientState())
        self._states.move_to_end(client)
        while len(self._states) > MOST_CLIENTS:
            self._states.popitem(last=False)
        return state
