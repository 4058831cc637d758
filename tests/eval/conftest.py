"""Fixtures for the tests of eval: the embedded model's judges, and a task of few pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from eval.quality.task import Judges, QualityTask, embedded_task, mini_judges
from sdxl.images import Pixels


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, the threads of tiny calls mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def judges() -> Judges:
    return mini_judges(pictures=200)


@pytest.fixture(scope="session")
def task(judges: Judges) -> QualityTask:
    return replace(embedded_task({}, 20), load=lambda: judges)


@dataclass
class Noise:
    """A source of noise pictures; picture i has seed i. Picture `fails_at` raises an error."""

    side: int = 128
    fails_at: int | None = None
    requested: list[list[int]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {"noise": self.side}

    def pictures(self, indices: Sequence[int]) -> list[Pixels]:
        self.requested.append(list(indices))
        if self.fails_at in indices:
            raise KeyboardInterrupt
        return [
            np.random.default_rng(i).integers(0, 256, (self.side, self.side, 3), dtype=np.uint8)
            for i in indices
        ]
