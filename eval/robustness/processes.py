"""What the processes below this one hold while something runs: memory, file descriptors, threads.

A process is told by words of its command line.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

PERIOD_S = 1.0
SETTLED = 0.25
"""the share of a process's life after which it should hold no more"""


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

    def find(self, title: str) -> list[psutil.Process]:
        """Those that live now, the oldest first."""
        return sorted(
            (process for name, process in self._running() if name == title),
            key=lambda process: process.create_time(),
        )

    def look(self) -> None:
        at_s = time.perf_counter() - self.began_s
        for title, process in self._running():
            try:
                with process.oneshot():
                    rss_mb = process.memory_info().rss / 1e6
                    sample = Sample(at_s, rss_mb, process.num_fds(), process.num_threads())
            except psutil.Error:
                continue
            self.seen[title, process.pid].append(sample)

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
def repeating(look: Callable[[], None], period_s: float) -> Iterator[None]:
    """In a thread of its own, so that load in this process does not hide a sample."""
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(period_s):
            look()

    thread = threading.Thread(target=follow, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def watching(titles: Sequence[str]) -> Iterator[ProcessWatch]:
    watch = ProcessWatch(titles)
    watch.look()
    with repeating(watch.look, PERIOD_S):
        yield watch


@dataclass(frozen=True)
class Growth:
    """Of one process: how much more it held at the end than once it had settled."""

    title: str
    pid: int
    lived_s: float
    rss_mb: float
    peak_mb: float
    late_rss_mb: float
    """in the second half alone"""
    descriptors: float
    threads: float


def growths(watch: ProcessWatch, least_s: float) -> list[Growth]:
    """Of those that lived at least so long."""
    found = []
    for (title, pid), samples in watch.seen.items():
        lived_s = samples[-1].at_s - samples[0].at_s
        if lived_s >= least_s:
            found.append(growth(title, pid, samples))
    return found


def peaks_of(watch: ProcessWatch, title: str) -> list[float]:
    """The most MB that each process of a title held, the oldest first."""
    own = [samples for (name, _), samples in watch.seen.items() if name == title]
    ordered = sorted(own, key=lambda samples: samples[0].at_s)
    return [max(s.rss_mb for s in samples) for samples in ordered]


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
    """From the first fifth to the last, by medians: a peak in between is no growth."""
    part = max(len(values) // 5, 1)
    return statistics.median(values[-part:]) - statistics.median(values[:part])
