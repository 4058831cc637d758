"""`sdxl serve` on this machine for the length of a measurement, as a process of its own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY = re.compile(r"ready: (http://\S+)")


@contextmanager
def local_service(flags: Sequence[str] = (), log_file: Path | None = None) -> Iterator[str]:
    """Its URL, once it is ready. What it says is kept where a file is named."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sdxl.cli", "serve", "--port", str(port), *flags]
    with log_file.open("w+") if log_file else tempfile.NamedTemporaryFile("w+") as log:
        # A file and not a pipe: nobody reads on once the measurement runs.
        process = subprocess.Popen(command, stderr=log)
        try:
            yield _until_ready(process, Path(log.name))
        finally:
            # Not SIGINT: what a shell runs in the background does not hear it.
            process.terminate()
            process.wait()


def _until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := READY.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"sdxl serve ended before it was ready: {log.read_text()[-2000:]}")
