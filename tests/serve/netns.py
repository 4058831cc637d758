"""Hosts of a cluster as namespaces. Each has its own network, processes and /tmp/ray.

They share cores, memory and disk, so a lost host takes no files with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.serve.services import LIBC, ROOT
from tests.tools import tool

CLONE_NEWNET = 0x40000000
SUBNET = "10.77.0"
RAY = Path("/tmp/ray")
BLKIO = Path("/sys/fs/cgroup/blkio")
"""the first version of cgroups, which counts an fsync for the calling process"""
# The shell is the first process of a host: it reaps the others. When its input ends, it ends, and
# they end with it.
FIRST = f'mount --bind "$0" {RAY} && echo up && cat; :'


@dataclass
class Host:
    address: str
    folder: Path
    """the host's /tmp/ray"""
    bridge: int
    """the process whose network has the bridge"""
    port: str
    """of the bridge"""
    _first: subprocess.Popen[bytes] | None = None
    _pid: int = 0
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _cgroup: Path | None = None
    """the cgroup of the disk's limit"""

    def boot(self) -> None:
        unshared = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc")
        self._first, self._pid = namespace(*unshared, "sh", "-c", FIRST, str(self.folder))
        peer = ("peer", "name", self.port, "netns", str(self.bridge))
        run("ip", "link", "add", "eth0", "netns", str(self._pid), "type", "veth", *peer)
        run_in(self.bridge, "ip", "link", "set", self.port, "master", "bridge", "up")
        self.shell("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self.shell("ip", "link", "set", link, "up")
        # Ray takes its address from the default route.
        self.shell("ip", "route", "add", "default", "dev", "eth0")

    def shell(self, *command: str) -> None:
        run_in(self._pid, *command)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SDXL_", "RAY_"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", **environment}
        enter = ["nsenter", f"--target={self._pid}", "--net", "--mount", "--pid"]
        if self._cgroup is not None:
            enter += ["sh", "-c", f'echo 0 > {self._cgroup}/cgroup.procs && exec "$@"', "sh"]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*enter, *command],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={**inherited, **given},
            )
        self._started.append(process)
        return process

    def run(self, *command: str, **environment: str) -> None:
        code = self.start(*command, **environment).wait(300)
        assert code == 0, f"{command}: {code}\n{self.log}"

    @property
    def text(self) -> str:
        """The output of the host's commands."""
        log = self.folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    @property
    def log(self) -> str:
        return self.text[-4000:]

    def named(self, title: str) -> list[psutil.Process]:
        """The host's processes with `title` in their command lines."""
        named = []
        for each in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if pid_space(each.pid) == pid_space(self._pid) and title in " ".join(
                    each.cmdline()
                ):
                    named.append(each)
        return named

    def cut(self) -> None:
        """Disconnect the host from the network."""
        run_in(self.bridge, "ip", "link", "set", self.port, "down")

    def mend(self) -> None:
        run_in(self.bridge, "ip", "link", "set", self.port, "up")

    def slow_disk(self, writes: int) -> None:
        """Limit the host to this many writes a second. An fsync needs several writes."""
        cgroup = BLKIO / f"sdxl-{self._pid}"
        device = os.stat(self.folder).st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {writes}"
        try:
            cgroup.mkdir()
            self._cgroup = cgroup
            (cgroup / "blkio.throttle.write_iops_device").write_text(limit)
        except OSError as error:
            pytest.skip(f"this disk cannot be slowed: {error}")
        for process in self.named(""):
            (cgroup / "cgroup.procs").write_text(str(process.pid))

    def lose(self) -> None:
        """Cut the host's power. Nothing that it still sends arrives."""
        run_in(self.bridge, "ip", "link", "delete", self.port)
        self.end()

    def end(self) -> None:
        if self._first is not None:
            end(self._first)
        for each in self._started:
            each.wait(60)
        if self._cgroup is not None:
            self._cgroup.rmdir()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside the block, this thread's sockets are on this host."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/proc/{self._pid}/ns/net") as its:
            assert LIBC.setns(its.fileno(), CLONE_NEWNET) == 0
            try:
                yield
            finally:
                assert LIBC.setns(ours.fileno(), CLONE_NEWNET) == 0


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Host]]:
    tool("ip", "iproute2")
    if os.geteuid():
        pytest.skip("only root may make namespaces")
    RAY.mkdir(exist_ok=True)
    with ExitStack() as stack:
        first, bridge = namespace("unshare", "--net", "--fork", "sh", "-c", "echo up && cat; :")
        stack.callback(end, first)
        run_in(bridge, "ip", "link", "add", "bridge", "type", "bridge")
        run_in(bridge, "ip", "link", "set", "bridge", "up")
        found = []
        for number in range(1, count + 1):
            place = folder / f"host{number}"
            place.mkdir()
            host = Host(f"{SUBNET}.{number}", place, bridge, f"port{number}")
            stack.callback(host.end)
            host.boot()
            found.append(host)
        yield found


def namespace(*command: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command; return it and the process in the namespaces, which ends with its input."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"up\n":
        process.wait()
        pytest.skip("namespaces cannot be made here")
    (child,) = psutil.Process(process.pid).children()
    return process, child.pid


def pid_space(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def end(first: subprocess.Popen[bytes]) -> None:
    first.communicate()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def run_in(pid: int, *command: str) -> None:
    run("nsenter", f"--target={pid}", "--net", *command)
