"""The progress of a request for several pictures, from their updates. It knows no HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from serve.orders import Done, ImageProgress, Update


@dataclass(eq=False)
class Run:
    count: int
    steps: int
    """steps of each picture"""
    began_s: float = field(default_factory=time.monotonic)
    done: dict[int, Done] = field(default_factory=dict)
    progress: dict[int, ImageProgress] = field(default_factory=dict)

    def note(self, index: int, update: Update) -> None:
        match update:
            case Done():
                self.done[index] = update
                self.progress.pop(index, None)
            case ImageProgress():
                self.progress[index] = update

    @property
    def pictures(self) -> list[Done]:
        """The finished pictures, in the order of their orders."""
        return [self.done[index] for index in sorted(self.done)]

    @property
    def share(self) -> float:
        """The share of all steps that are done."""
        taken = sum(self.steps if i in self.done else self._step(i) for i in range(self.count))
        return taken / (self.steps * self.count)

    @property
    def eta_s(self) -> float:
        return max((each.eta_s for each in self.progress.values()), default=0.0)

    @property
    def position(self) -> int:
        """The place in the queue of the first unfinished picture; 0: being made."""
        return min((each.position for each in self.progress.values()), default=0)

    def _step(self, index: int) -> int:
        progress = self.progress.get(index)
        return min(progress.step, self.steps) if progress else 0
