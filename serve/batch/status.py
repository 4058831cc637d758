"""`sdxl batch --status`: how far a running, broken-off or finished job is.

Counts come from the ledgers; who works on it, and how fast, from what the job last said.
"""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from serve.batch import ledger
from serve.batch.displays import STATUS, STATUS_PERIOD_S, clock, counted
from serve.batch.job import BatchJob
from serve.batch.lock import is_free
from serve.batch.progress import WorkerState
from serve.batch.store import Store

SILENT_S = 6 * STATUS_PERIOD_S


@dataclass(frozen=True)
class Said:
    """What is read here of what StatusFile writes."""

    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False)

    state: str = "broken off"
    at: float = 0.0
    host: str = ""
    rows: int = 0
    images_per_s: float = 0.0
    eta_s: float | None = None
    workers: dict[str, WorkerState] = field(default_factory=dict)
    trouble: str = ""


def read_status(store: Store, job: BatchJob, now: float | None = None) -> dict[str, Any]:
    images = dead = 0
    for entry in ledger.read_all(store):
        images, dead = (images, dead + 1) if entry.error is not None else (images + 1, dead)
    said = last_said(store)
    age_s = (time.time() if now is None else now) - said.at
    is_over = age_s > SILENT_S or is_abandoned(store, said)
    state = "broken off" if said.state == "running" and is_over else said.state
    is_running = state == "running"
    return {
        "state": state,
        "images": images,
        "dead_letters": dead,
        "rows": max(job.rows, said.rows),
        "images_per_s": said.images_per_s if is_running else 0.0,
        "eta_s": said.eta_s if is_running else None,
        "workers": {name: asdict(worker) for name, worker in said.workers.items() if is_running},
        "trouble": said.trouble,
        "model": job.origin or job.model,
        "engine": job.engine,
    }


def is_abandoned(store: Store, said: Said) -> bool:
    """Known at once where the job ran here; locks do not reach every other machine."""
    return said.host == socket.gethostname() and is_free(store)


def last_said(store: Store) -> Said:
    """A file that is not there, or not as it was written, says nothing."""
    try:
        return TypeAdapter(Said).validate_json(store.get(STATUS), strict=True)
    except (FileNotFoundError, ValidationError):
        return Said()


def describe(status: dict[str, Any]) -> str:
    done = status["images"] + status["dead_letters"]
    dead = counted(status["dead_letters"], "dead letter")
    lines = [
        f"{status['state']}: {done} of {counted(status['rows'], 'row')}",
        f"  {counted(status['images'], 'picture')}, {dead}",
    ]
    if status["state"] == "running":
        eta_s = status["eta_s"]
        left = f", {clock(eta_s)} left" if eta_s is not None else ""
        lines.append(f"  {status['images_per_s']:.2f} images/s{left}")
        for name, worker in status["workers"].items():
            lines.append(f"  {name}: {worker['occupancy']:.0%} full, {worker['made']} made")
    elif done < status["rows"]:
        lines.append("  the same command goes on from here")
    if status["trouble"]:
        lines.append(f"  last trouble: {status['trouble']}")
    return "\n".join(lines)
