"""Run as a program: a job on a made-up cluster of two nodes, one of which goes away without a word.

python -m tests.serve.batch.removed_node SOURCE OUT LOG [FLAG …]
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from pathlib import Path

from ray.cluster_utils import Cluster

from tests.serve.batch.drawers import Drawer, make, noted

AFTER = 30
"""pictures"""


def main(source: str, out: str, log: str, *flags: str) -> int:
    cluster = Cluster()
    cluster.add_node(num_cpus=2)
    doomed = cluster.add_node(num_cpus=2)

    def remove() -> None:
        while len(noted(Path(log))) < AFTER:
            time.sleep(0.05)
        cluster.remove_node(doomed, allow_graceful=False)

    threading.Thread(target=remove, daemon=True).start()
    load = partial(Drawer, log, 0.2)
    try:
        address = ("--address", cluster.address, "--workers", "4")
        return make(Path(source), Path(out), *address, *flags, load=load, ray=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
