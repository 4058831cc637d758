"""How far a job is, as numbers. Who shows them is not known here."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

RATE_WINDOW_S, SAMPLE_S = 60.0, 0.5


@dataclass
class WorkerState:
    occupancy: float = 0.0
    made: int = 0
    is_ready: bool = False


@dataclass
class BatchProgress:
    rows: int
    """expected; what the input really holds is known at its end"""
    began_s: float
    now_s: float = 0.0
    made: int = 0
    """pictures of this run"""
    found: int = 0
    """rows that were done before it"""
    dead: int = 0
    lost_workers: int = 0
    trouble: str = ""
    """what last went wrong"""
    workers: dict[str, WorkerState] = field(default_factory=dict)
    _history: deque[tuple[float, int]] = field(default_factory=deque, repr=False)

    @property
    def done(self) -> int:
        return self.made + self.found + self.dead

    @property
    def rate(self) -> float:
        """Pictures a second, lately."""
        if len(self._history) < 2:
            return 0.0
        (began_s, before), (ended_s, after) = self._history[0], self._history[-1]
        return (after - before) / (ended_s - began_s) if ended_s > began_s else 0.0

    @property
    def eta_s(self) -> float | None:
        return max(self.rows - self.done, 0) / self.rate if self.rate > 0 else None

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        if not self.workers:
            # While all of them load, nothing can be said of how fast they are.
            self._history.clear()
        if self._history and now_s - self._history[-1][0] < SAMPLE_S:
            return
        self._history.append((now_s, self.made))
        while now_s - self._history[0][0] > RATE_WINDOW_S:
            self._history.popleft()

    def as_dict(self) -> dict[str, Any]:
        eta = self.eta_s
        return {
            "done": self.done,
            "rows": self.rows,
            "made": self.made,
            "found": self.found,
            "dead": self.dead,
            "images_per_s": round(self.rate, 3),
            "eta_s": None if eta is None else round(eta, 1),
            "elapsed_s": round(self.now_s - self.began_s, 1),
            "lost_workers": self.lost_workers,
            "trouble": self.trouble,
            "workers": {
                name: {**asdict(state), "occupancy": round(state.occupancy, 3)}
                for name, state in self.workers.items()
            },
        }
