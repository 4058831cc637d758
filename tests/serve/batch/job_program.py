"""Run as a program: a job on drawing renderers, for a test to kill.

python -m tests.serve.batch.job_program POOL DRAW_S LOG SOURCE OUT [FLAG …]

POOL is `threads`, `ray`, or `nodes`: a Ray cluster of two nodes, one of which is soon removed.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

from serve.batch.running import WorkerPool, on_ray, run
from tests.serve.batch.drawers import Drawer, in_threads, lines_of, order_of
from tests.waiting import wait_until

REMOVED_AFTER = 30
"""pictures"""


def main(pool: str, draw_s: str, log: str, source: str, out: str, *flags: str) -> int:
    load = partial(Drawer, log, float(draw_s))
    workers: WorkerPool = partial(in_threads if pool == "threads" else on_ray, load=load)
    if pool != "nodes":
        return run(order_of(Path(source), out, *flags), workers)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=2)
    doomed = cluster.add_node(num_cpus=2)

    def remove() -> None:
        wait_until(lambda: len(lines_of(Path(log))) >= REMOVED_AFTER, 1000.0)
        cluster.remove_node(doomed, allow_graceful=False)

    threading.Thread(target=remove, daemon=True).start()
    try:
        address = ("--address", cluster.address, "--workers", "4")
        return run(order_of(Path(source), out, *address, *flags), workers)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
