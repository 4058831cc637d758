"""`sdxl batch --status`: how far a running, broken-off or finished job is.

Counts come from the ledgers; who works on it, and how fast, from what the job last said.
"""

from __future__ import annotations

import json
import time
from typing import Any

from serve.batch.displays import STATUS, STATUS_PERIOD_S, clock
from serve.batch.job import Job
from serve.batch.results import all_entries
from serve.batch.store import Store

SILENT_S = 6 * STATUS_PERIOD_S


def read_status(store: Store, job: Job, now: float | None = None) -> dict[str, Any]:
    images = dead = 0
    for entry in all_entries(store):
        images, dead = (images, dead + 1) if entry.error is not None else (images + 1, dead)
    said = last_said(store)
    age_s = (time.time() if now is None else now) - said.get("at", 0.0)
    state = said.get("state", "broken off")
    if state == "running" and age_s > SILENT_S:
        state = "broken off"
    return {
        "state": state,
        "images": images,
        "dead_letters": dead,
        "rows": max(job.rows, said.get("rows", 0)),
        "images_per_s": said.get("images_per_s", 0.0) if state == "running" else 0.0,
        "eta_s": said.get("eta_s") if state == "running" else None,
        "workers": said.get("workers", {}) if state == "running" else {},
        "trouble": said.get("trouble", ""),
        "model": job.model,
        "engine": job.engine,
    }


def last_said(store: Store) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(store.get(STATUS))
        return said
    except FileNotFoundError:
        return {}


def describe(status: dict[str, Any]) -> str:
    done = status["images"] + status["dead_letters"]
    lines = [
        f"{status['state']}: {done} of {status['rows']} rows",
        f"  {status['images']} pictures, {status['dead_letters']} dead letters",
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
