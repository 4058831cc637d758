"""A job's progress for a person, a log, a scraper and `--status`. Each is told the same numbers."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve.batch.progress import BatchProgress
from serve.batch.store import Store

Show = Callable[[BatchProgress], None]
STATUS, STATUS_PERIOD_S = "status.json", 5.0
LOG_PERIOD_S = 5.0
LOG_LINE_S = 30.0
SHOWN_WORKERS = 8


class Bar:
    """The live display: one line, done, rate, time left, how full each worker is, failures. Where
    no terminal is, such a line now and then."""

    def __init__(self, rows: int) -> None:
        from tqdm import tqdm

        form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {postfix}"
        self._bar = tqdm(
            total=rows, file=sys.stderr, bar_format=form, dynamic_ncols=True, disable=None
        )
        self._trouble, self._last_s = "", time.monotonic()

    def __call__(self, progress: BatchProgress) -> None:
        from tqdm import tqdm

        if self._bar.disable and progress.now_s - self._last_s >= LOG_LINE_S:
            self._last_s = progress.now_s
            told = f"{progress.done} of {progress.rows}, {tail(progress)}"
            print(f"sdxl batch: {told}", file=sys.stderr, flush=True)

        if progress.trouble != self._trouble:
            self._trouble = progress.trouble
            tqdm.write(f"sdxl batch: {self._trouble}", file=sys.stderr)
        self._bar.n = progress.done
        self._bar.total = max(progress.rows, progress.done)
        self._bar.set_postfix_str(tail(progress))

    def close(self) -> None:
        self._bar.close()


def tail(progress: BatchProgress) -> str:
    left = f"{clock(progress.eta_s)} left" if progress.eta_s is not None else "…"
    told = [f"{progress.rate:.2f} images/s", left]
    states = list(progress.workers.items())
    full = [f"{name} {state.occupancy:4.0%}" for name, state in states[:SHOWN_WORKERS]]
    if len(states) > SHOWN_WORKERS:
        mean = sum(state.occupancy for _, state in states) / len(states)
        full = [f"{len(states)} workers {mean:4.0%}"]
    told.append(" ".join(full) or "loading")
    if progress.dead:
        told.append(f"{progress.dead} dead")
    if progress.lost_workers:
        told.append(f"{counted(progress.lost_workers, 'worker')} lost")
    return ", ".join(told)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Lines:
    """JSON lines on stdout, for logs: one now and then, and one for each new trouble."""

    def __init__(self) -> None:
        self._last_s, self._trouble = float("-inf"), ""

    def __call__(self, progress: BatchProgress) -> None:
        is_due = progress.now_s - self._last_s >= LOG_PERIOD_S
        if is_due or progress.trouble != self._trouble:
            self._last_s, self._trouble = progress.now_s, progress.trouble
            say({"event": "progress", **progress.as_dict()})

    def close(self) -> None:
        """The last word is the summary's."""


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, ensure_ascii=False), flush=True)


class Metrics:
    """A page for Prometheus on loopback."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return Gauge(f"sdxl_batch_{name}", text, labels, registry=registry)

        self._rows = gauge("rows", "pictures, by what became of them", ("state",))
        self._rate = gauge("images_per_second", "lately")
        self._left = gauge("eta_seconds", "until the end, at that rate")
        self._lost = gauge("lost_workers", "workers that died or hung")
        self._full = gauge("occupancy", "share of a worker's places taken", ("worker",))
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise InvalidParams("metrics_port", port, f"needed a free port ({error})") from error
        self.port = self._server.server_port

    def __call__(self, progress: BatchProgress) -> None:
        for state in ("made", "found", "dead"):
            self._rows.labels(state).set(getattr(progress, state))
        self._rows.labels("left").set(max(progress.rows - progress.done, 0))
        self._rate.set(progress.rate)
        self._left.set(float("nan") if progress.eta_s is None else progress.eta_s)
        self._lost.set(progress.lost_workers)
        self._full.clear()
        for name, worker in progress.workers.items():
            self._full.labels(name).set(worker.occupancy)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class StatusFile:
    """What `--status` reads besides the ledgers."""

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
        """The output may be what broke; then the last word is the error's."""
        try:
            self.write(progress, state)
        except OutputError:
            return
