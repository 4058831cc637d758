"""Run as a program: a job on renderers that draw, for a test to kill.

python -m tests.serve.batch.killed CREW DRAW_S LOG SOURCE OUT [FLAG …]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.serve.batch.drawers import Drawer, make


def main(pool: str, draw_s: str, log: str, source: str, out: str, *flags: str) -> int:
    load = partial(Drawer, log, float(draw_s))
    return make(Path(source), out, *flags, load=load, ray=pool == "ray")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
