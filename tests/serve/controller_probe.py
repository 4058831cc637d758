"""Run as a program: Ray Serve with one small deployment, whose controller is killed and stopped. It
prints as JSON the observations of the watch of `sdxl serve` and of the deployment.

python -m tests.serve.controller_probe FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve

from serve.cli import RAY_ENVIRONMENT
from serve.cluster import ClusterWatch, controllers
from serve.fleet.router import ROUTING

PATIENCE_S = 60.0
LISTEN_S = 4.0
"""shorter than Ray's period, and longer than several periods of a router"""


class Asked:
    """Records the times at which it is asked for its load."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def record_routing_stats(self) -> dict[str, float]:
        with self.log.open("a") as log:
            log.write(f"{time.time()}\n")
        return {"ready_in_s": 0.0, "alone_s": 0.0, "each_s": 0.0}

    def generate(self) -> str:
        return "a picture"


class Probe:
    def __init__(self, folder: Path) -> None:
        self.log, self.messages = folder / "asked", list[str]()
        self.watch = ClusterWatch(self.messages.append)
        self.results: dict[str, Any] = {}

    def asked_in(self, seconds: float) -> int:
        began_s = time.time()
        time.sleep(seconds)
        return sum(float(line) >= began_s for line in self.log.read_text().splitlines())

    def watched_until(self, is_so: Callable[[], bool]) -> list[bool | None]:
        """Return the controller's answers until the condition holds."""
        answers, until_s = list[bool | None](), time.monotonic() + PATIENCE_S
        while not (answers and answers[-1] and is_so()):
            assert time.monotonic() < until_s, f"{answers}, {self.messages}"
            answers.append(self.watch._ping_controller())
            self.watch._check_controller(answers[-1])
            time.sleep(0.2)
        return answers

    def run(self) -> None:
        deployment = ray_serve.deployment(name="Asked")(Asked).options(
            request_router_config=ROUTING, ray_actor_options={"num_cpus": 0}
        )
        handle = ray_serve.run(deployment.bind(str(self.log)))
        # It reports first at its start.
        time.sleep(1)
        self.results["asked_alone"] = self.asked_in(LISTEN_S)
        handle.generate.remote().result(timeout_s=30)
        self.results["asked_by_router"] = self.asked_in(LISTEN_S)
        self.watched_until(lambda: bool(self.watch._answered))
        for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            (before,) = controllers()
            os.kill(before, number)
            asked = self.asked_in(LISTEN_S)
            handle.generate.remote().result(timeout_s=30)
            answers = self.watched_until(partial(is_another, before))
            self.results[name] = {
                "answers": answers,
                "asked": asked,
                "messages": list(self.messages),
            }


def is_another(before: int) -> bool:
    return before not in controllers()


def main(folder: str) -> None:
    os.environ.update(RAY_ENVIRONMENT)
    ray.init(address="local", include_dashboard=False, logging_level="ERROR")  # type: ignore[arg-type]
    ray_serve.start(proxy_location="Disabled")
    probe = Probe(Path(folder))
    try:
        probe.run()
        print(json.dumps(probe.results))
    finally:
        ray_serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
