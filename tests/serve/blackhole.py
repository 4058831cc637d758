"""Run as a program in a network namespace of its own: the service, whose packets to and from one
replica are dropped while requests come; fails unless all are answered.

unshare --net python -m tests.serve.blackhole FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.serve.service.test_hung import FLAGS, check, load_with
from tests.serve.services import service


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def ports_of(process: psutil.Process) -> set[int]:
    listening = (c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    return {c.laddr.port for c in listening}


def drop(process: psutil.Process) -> None:
    """Drop the packets to and from every port on which this process listens. The kernel's rule for
    local addresses comes first, unless it is removed and added again further down."""
    run("ip", "rule", "add", "pref", "100", "lookup", "local")
    run("ip", "rule", "del", "pref", "0")
    for port in ports_of(process):
        for side in ("sport", "dport"):
            rule = ("rule", "add", "pref", "50", "ipproto", "tcp", side, str(port), "blackhole")
            run("ip", *rule)


def main(folder: str) -> int:
    run("ip", "link", "set", "lo", "up")
    with service(Path(folder), *FLAGS) as found:
        victim = found.named("ImageReplica")[0]
        check(load_with(found, lambda: drop(victim)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
