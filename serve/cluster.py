"""Whether the Ray cluster of `sdxl serve` still works. What Ray cannot mend by itself ends this
process, so that its supervisor restarts the service.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve.supervision import descendants, lives, processes

VITAL = ("gcs_server", "raylet")
"""Without one of them nothing that dies is replaced."""
CONTROLLER = "ServeController"
ROUND_S = 0.5
SILENT_S, PING_S, PINGS, STARTING_PINGS = 12.0, 2.0, 2, 20
"""After which time Ray, or its controller, is taken to hang. A controller that has not answered yet
may still be starting, and a busy machine takes long for that."""


class ClusterWatch:
    """Two threads: one queries Ray, and may block; the other never blocks."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._vital: dict[int, str] = {}
        self._rounds = 0
        """of the second thread since Ray last answered the first; a clock would also count the
        time in which this process is stopped"""
        self._controller = Controller()
        self._missed = 0
        """answers of the controller, in a row"""
        self._answered: set[int] = set()
        """controllers that have answered"""
        self._is_over = threading.Event()

    def start(self) -> None:
        """Once Ray has been started."""
        self._vital = dict(vital_children())
        for run in (self._ask, self._look):
            threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def _look(self) -> None:
        while not self._is_over.wait(ROUND_S):
            for pid, name in self._vital.items():
                if not lives(pid):
                    self._end(f"Ray's {name} has died")
            self._rounds += 1
            if self._rounds * ROUND_S > SILENT_S:
                self._end("Ray does not answer")

    def _ask(self) -> None:
        import ray

        while not self._is_over.wait(2 * ROUND_S):
            try:
                is_alive = any(node["Alive"] for node in ray.nodes())
            except Exception as error:
                self._say(f"Ray says {type(error).__name__}")
                continue
            if not is_alive:
                self._end("Ray has given up this machine")
            self._rounds = 0
            self._judge(self._controller.answers())

    def _judge(self, answers: bool | None) -> None:
        """Ray starts another controller as soon as one is gone."""
        # Looking through all processes takes a while: only when there may be another one.
        if answers and not any(map(lives, self._answered)):
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
            # Ray's exit handlers would wait for processes that are gone.
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


class Controller:
    """Ray Serve's controller, asked whether it still answers."""

    def __init__(self) -> None:
        self._actor: Any = None
        """kept: the handle stays valid when the process is replaced"""

    def answers(self) -> bool | None:
        """None: there is none, and Ray knows it."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            if self._actor is None:
                self._actor = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
            ray.get(self._actor.check_alive.remote(), timeout=PING_S)
        except GetTimeoutError:
            return False
        except (ValueError, RayError):
            # It does not run yet, or has died and is replaced without our help.
            self._actor = None
            return None
        return True
