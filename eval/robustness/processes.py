"""Memory, file descriptors and threads of child processes over time.

A process belongs to a title if its command line contains it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

PERIOD_S = 1.0
SETTLED = 0.25
"""the share of a process's life after which it should not grow"""


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss_mb: float
    descriptors: int
    threads: int


@dataclass
class ProcessWatch:
    """Samples of each process by (title, pid)."""

    titles: Sequence[str]
    began_s: float = field(default_factory=time.perf_counter)
    seen: dict[tuple[str, int], list[Sample]] = field(default_factory=lambda: defaultdict(list))

    def oldest(self, title: str) -> psutil.Process | None:
        """The living process of a title that began first."""
        processes = (process for name, process in self._running() if name == title)
        return min(processes, key=lambda process: process.create_time(), default=None)

    def growths(self, least_s: float) -> list[Growth]:
        """The growth of each process that lived at least `least_s`."""
        grown = (growth(title, pid, samples) for (title, pid), samples in self.seen.items())
        return [each for each in grown if each.lived_s >= least_s]

    def peaks(self, title: str) -> list[float]:
        """The peak MB of each process of a title, in the order in which they were first seen."""
        series = (samples for (name, _), samples in self.seen.items() if name == title)
        return [max(s.rss_mb for s in samples) for samples in series]

    def sample(self) -> None:
        at_s = time.perf_counter() - self.began_s
        for title, process in self._running():
            try:
                with process.oneshot():
                    rss_mb = process.memory_info().rss / 1e6
                    current = Sample(at_s, rss_mb, process.num_fds(), process.num_threads())
            except psutil.Error:
                continue
            self.seen[title, process.pid].append(current)

    def _running(self) -> Iterator[tuple[str, psutil.Process]]:
        for process in psutil.Process().children(recursive=True):
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue
            for title in self.titles:
                if title in words:
                    yield title, process
                    break


@contextmanager
def watching(titles: Sequence[str]) -> Iterator[ProcessWatch]:
    """Sample periodically in a thread, so that load in this one does not delay it."""
    watch, is_over = ProcessWatch(titles), threading.Event()
    watch.sample()

    def run() -> None:
        while not is_over.wait(PERIOD_S):
            watch.sample()

    thread = threading.Thread(target=run, name="watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        thread.join()


@dataclass(frozen=True)
class Growth:
    """How much one process grew between settling and its end."""

    title: str
    pid: int
    lived_s: float
    rss_mb: float
    peak_mb: float
    late_rss_mb: float
    """in the second half"""
    descriptors: float
    threads: float


def growth(title: str, pid: int, samples: Sequence[Sample]) -> Growth:
    settled = samples[int(SETTLED * len(samples)) :]
    late = samples[len(samples) // 2 :]
    return Growth(
        title,
        pid,
        samples[-1].at_s - samples[0].at_s,
        rise([s.rss_mb for s in settled]),
        max(s.rss_mb for s in samples),
        rise([s.rss_mb for s in late]),
        rise([s.descriptors for s in settled]),
        rise([s.threads for s in settled]),
    )


def rise(values: Sequence[float]) -> float:
    """The difference between the medians of the last fifth and the first: a peak is no growth."""
    part = max(len(values) // 5, 1)
    return statistics.median(values[-part:]) - statistics.median(values[:part])
