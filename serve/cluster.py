"""Watches the Ray cluster of `sdxl serve`. A failure that Ray cannot repair ends this process, so
that its supervisor restarts the service.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve.supervision import descendants, is_running, processes

VITAL = ("gcs_server", "raylet")
"""Ray's processes without which Ray replaces nothing."""
CONTROLLER = "ServeController"
ROUND_S = 0.5
SILENT_S, PING_S, PINGS, STARTING_PINGS = 12.0, 2.0, 2, 20
"""Ray hangs if it is silent for SILENT_S; its controller, after PINGS pings of PING_S without an
answer. One that has not answered yet may be starting, which takes long on a busy machine."""


class ClusterWatch:
    """Two threads: one queries Ray, and may block; the other never blocks."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._vital: dict[int, str] = {}
        self._rounds = 0
        """rounds of the second thread since Ray last answered the first thread; a clock would also
        count the time while this process is stopped"""
        self._controller: Any = None
        """a handle; it stays valid when the process is replaced"""
        self._missed = 0
        """consecutive pings that the controller did not answer"""
        self._answered: set[int] = set()
        """process ids of controllers that have answered"""
        self._is_over = threading.Event()

    def start(self) -> None:
        """Start to watch. Ray must run."""
        self._vital = dict(vital_children())
        threading.Thread(target=self._query_ray, name="query-ray", daemon=True).start()
        threading.Thread(target=self._check_silence, name="check-silence", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def _check_silence(self) -> None:
        while not self._is_over.wait(ROUND_S):
            for pid, name in self._vital.items():
                if not is_running(pid):
                    self._end(f"Ray's {name} has died")
            self._rounds += 1
            if self._rounds * ROUND_S > SILENT_S:
                self._end("Ray does not answer")

    def _query_ray(self) -> None:
        import ray

        while not self._is_over.wait(2 * ROUND_S):
            try:
                is_alive = any(node["Alive"] for node in ray.nodes())
            except Exception as error:
                self._say(f"Ray raised {type(error).__name__}")
                continue
            if not is_alive:
                self._end("Ray declared this machine dead")
            self._rounds = 0
            self._check_controller(self._ping_controller())

    def _ping_controller(self) -> bool | None:
        """Return whether the controller answers; None if Ray knows that it does not run."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            if self._controller is None:
                self._controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
            ray.get(self._controller.check_alive.remote(), timeout=PING_S)
        except GetTimeoutError:
            return False
        except (ValueError, RayError):
            # It does not run yet, or Ray is replacing it.
            self._controller = None
            return None
        return True

    def _check_controller(self, answers: bool | None) -> None:
        """Kill a controller that hangs; Ray then starts another one."""
        # Listing all processes is slow, so only if there may be a new controller.
        if answers and not any(map(is_running, self._answered)):
            self._answered = set(controllers())
        self._missed = self._missed + 1 if answers is False else 0
        for pid in controllers() if self._missed else ():
            if self._missed >= (PINGS if pid in self._answered else STARTING_PINGS):
                self._say("Ray Serve's controller does not answer; it is replaced")
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._missed = 0

    def _end(self, why: str) -> None:
        if not self._is_over.is_set():
            self._say(f"{why}: ending, so that a supervisor restarts it")
            # Ray's exit handlers would wait for dead processes.
            os._exit(1)


def vital_children() -> Iterator[tuple[int, str]]:
    for pid, parent in processes():
        if parent == os.getpid():
            for name in VITAL:
                if name in command_of(pid).partition(" ")[0]:
                    yield pid, name


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def controllers() -> list[int]:
    return [pid for pid in descendants() if CONTROLLER in command_of(pid)]
