"""A job's progress: on a terminal, as JSON lines, for Prometheus, and for `sdxl batch --status`.

`--status` counts pictures in the ledgers; rate and workers come from the last status file.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve.batch import ledger
from serve.batch.job import BatchJob
from serve.batch.lock import is_free
from serve.batch.store import Store

RATE_WINDOW_S, SAMPLE_S = 60.0, 0.5
STATUS, STATUS_PERIOD_S = "status.json", 5.0
SILENT_S = 6 * STATUS_PERIOD_S
JSON_PERIOD_S, TEXT_PERIOD_S = 5.0, 30.0
SHOWN_WORKERS = 8


@dataclass
class WorkerState:
    occupancy: float = 0.0
    made: int = 0
    is_ready: bool = False


@dataclass
class BatchProgress:
    rows: int
    """estimated number"""
    began_s: float
    now_s: float = 0.0
    made: int = 0
    """pictures of this run"""
    found: int = 0
    """rows that earlier runs finished"""
    dead: int = 0
    lost_workers: int = 0
    trouble: str = ""
    """the last error"""
    workers: dict[str, WorkerState] = field(default_factory=dict)
    _history: deque[tuple[float, int]] = field(default_factory=deque, repr=False)

    @property
    def done(self) -> int:
        return self.made + self.found + self.dead

    @property
    def rate(self) -> float:
        if len(self._history) < 2:
            return 0.0
        (began_s, before), (ended_s, after) = self._history[0], self._history[-1]
        return (after - before) / (ended_s - began_s) if ended_s > began_s else 0.0

    @property
    def eta_s(self) -> float | None:
        return max(self.rows - self.done, 0) / self.rate if self.rate > 0 else None

    def tick(self, now_s: float) -> None:
        self.now_s, self.rows = now_s, max(self.rows, self.done)
        if not self.workers:
            # Loading does not count for the rate.
            self._history.clear()
        if self._history and now_s - self._history[-1][0] < SAMPLE_S:
            return
        self._history.append((now_s, self.made))
        while now_s - self._history[0][0] > RATE_WINDOW_S:
            self._history.popleft()

    def as_dict(self) -> dict[str, Any]:
        eta = self.eta_s
        return {
            "done": self.done,
            "rows": self.rows,
            "made": self.made,
            "found": self.found,
            "dead": self.dead,
            "images_per_s": round(self.rate, 3),
            "eta_s": None if eta is None else round(eta, 1),
            "elapsed_s": round(self.now_s - self.began_s, 1),
            "lost_workers": self.lost_workers,
            "trouble": self.trouble,
            "workers": {
                name: {**asdict(state), "occupancy": round(state.occupancy, 3)}
                for name, state in self.workers.items()
            },
        }

    def describe(self) -> str:
        left = f"{timedelta(seconds=round(self.eta_s))} left" if self.eta_s is not None else "…"
        states = list(self.workers.items())
        loads = [f"{name} {state.occupancy:4.0%}" for name, state in states]
        if len(states) > SHOWN_WORKERS:
            mean = sum(state.occupancy for _, state in states) / len(states)
            loads = [f"{len(states)} workers {mean:4.0%}"]
        parts = [f"{self.rate:.2f} images/s", left, " ".join(loads) or "loading"]
        if self.dead:
            parts.append(f"{self.dead} dead")
        if self.lost_workers:
            parts.append(f"{counted(self.lost_workers, 'worker')} lost")
        return ", ".join(parts)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# -- displays -------------------------------------------------------------------------------

Show = Callable[[BatchProgress], None]


class Bar:
    """Shows one live line on a terminal; without one, prints a line every `TEXT_PERIOD_S`."""

    def __init__(self, rows: int) -> None:
        from tqdm import tqdm

        form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {postfix}"
        self._bar = tqdm(
            total=rows, file=sys.stderr, bar_format=form, dynamic_ncols=True, disable=None
        )
        self._trouble, self._last_s = "", time.monotonic()

    def __call__(self, progress: BatchProgress) -> None:
        if self._bar.disable and progress.now_s - self._last_s >= TEXT_PERIOD_S:
            self._last_s = progress.now_s
            text = f"sdxl batch: {progress.done} of {progress.rows}, {progress.describe()}"
            print(text, file=sys.stderr, flush=True)
        if progress.trouble != self._trouble:
            self._trouble = progress.trouble
            self._bar.write(f"sdxl batch: {self._trouble}", file=sys.stderr)
        self._bar.n = progress.done
        self._bar.total = progress.rows
        self._bar.set_postfix_str(progress.describe())

    def close(self) -> None:
        self._bar.close()


class Lines:
    """Prints JSON lines: one every `JSON_PERIOD_S`, and one for each new error."""

    def __init__(self) -> None:
        self._last_s, self._trouble = float("-inf"), ""

    def __call__(self, progress: BatchProgress) -> None:
        is_due = progress.now_s - self._last_s >= JSON_PERIOD_S
        if is_due or progress.trouble != self._trouble:
            self._last_s, self._trouble = progress.now_s, progress.trouble
            print_json({"event": "progress", **progress.as_dict()})

    def close(self) -> None:
        pass


def print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, ensure_ascii=False), flush=True)


class Metrics:
    """Serves a page for Prometheus on loopback."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return Gauge(f"sdxl_batch_{name}", text, labels, registry=registry)

        self._rows = gauge("rows", "pictures, by state", ("state",))
        self._rate = gauge("images_per_second", "recent rate")
        self._eta = gauge("eta_seconds", "time until the end, at that rate")
        self._lost = gauge("lost_workers", "workers that died or hung")
        self._occupancy = gauge("occupancy", "share of a worker's places taken", ("worker",))
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise InvalidParams("metrics_port", port, f"must be a free port ({error})") from error
        self.port = self._server.server_port

    def __call__(self, progress: BatchProgress) -> None:
        for state in ("made", "found", "dead"):
            self._rows.labels(state).set(getattr(progress, state))
        self._rows.labels("left").set(max(progress.rows - progress.done, 0))
        self._rate.set(progress.rate)
        self._eta.set(float("nan") if progress.eta_s is None else progress.eta_s)
        self._lost.set(progress.lost_workers)
        self._occupancy.clear()
        for name, worker in progress.workers.items():
            self._occupancy.labels(name).set(worker.occupancy)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# -- the status file ------------------------------------------------------------------------


class StatusFile:
    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run, self._last_s = store, run, float("-inf")

    def __call__(self, progress: BatchProgress) -> None:
        if progress.now_s - self._last_s >= STATUS_PERIOD_S:
            self._last_s = progress.now_s
            self.write(progress, "running")

    def write(self, progress: BatchProgress, state: str) -> None:
        facts = {
            "state": state,
            "at": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "run": self.run,
            **progress.as_dict(),
        }
        self.store.put(STATUS, json.dumps(facts, indent=2).encode() + b"\n")

    def end(self, progress: BatchProgress, state: str) -> None:
        """Write the state of a stopped job, unless the output cannot be written."""
        with suppress(OutputError):
            self.write(progress, state)


@dataclass(frozen=True)
class LastStatus:
    """The part of a status file that `--status` reads."""

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
    dead = [entry.error is not None for entry in ledger.read_all(store)]
    try:
        last = TypeAdapter(LastStatus).validate_json(store.get(STATUS), strict=True)
    except (FileNotFoundError, ValidationError):
        last = LastStatus()
    age_s = (time.time() if now is None else now) - last.at
    # A lock shows at once that a job on this machine has ended; on others only the age does.
    is_over = age_s > SILENT_S or (last.host == socket.gethostname() and is_free(store))
    state = "broken off" if last.state == "running" and is_over else last.state
    is_running, planned = state == "running", 0 if state == "finished" else job.rows
    return {
        "state": state,
        "images": len(dead) - sum(dead),
        "dead_letters": sum(dead),
        "rows": max(planned, last.rows, len(dead)),
        "images_per_s": last.images_per_s if is_running else 0.0,
        "eta_s": last.eta_s if is_running else None,
        "workers": {name: asdict(worker) for name, worker in last.workers.items() if is_running},
        "trouble": last.trouble,
        "model": job.origin or job.model,
        "engine": job.engine,
    }


def describe(status: dict[str, Any]) -> str:
    done = status["images"] + status["dead_letters"]
    dead = counted(status["dead_letters"], "dead letter")
    lines = [
        f"{status['state']}: {done} of {counted(status['rows'], 'row')}",
        f"  {counted(status['images'], 'picture')}, {dead}",
    ]
    if status["state"] == "running":
        eta_s = status["eta_s"]
        left = f", {timedelta(seconds=round(eta_s))} left" if eta_s is not None else ""
        lines.append(f"  {status['images_per_s']:.2f} images/s{left}")
        for name, worker in status["workers"].items():
            lines.append(f"  {name}: {worker['occupancy']:.0%} full, {worker['made']} made")
    elif status["state"] != "finished":
        lines.append("  rerun the same command to resume")
    if status["trouble"]:
        lines.append(f"  last error: {status['trouble']}")
    return "\n".join(lines)
