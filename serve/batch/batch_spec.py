"""What one `sdxl batch` command asks for, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sdxl.provenance import Provenance

HAS_DEAD = 3
"""the exit code of a job with dead letters"""
API_KEY = "OPENAI_API_KEY"
RANGES = {"n": (1, 10_000), "shard_size": (1, 4096)}


@dataclass(frozen=True)
class BatchSpec:
    """What one command asks for, checked as far as it can be without reading the input."""

    inputs: tuple[str, ...]
    out: str
    parameters: dict[str, Any]
    quality: str | None
    """a preset's name, which fills steps and cache interval where no flag does"""
    n: int
    format: str
    is_tarred: bool
    shard_size: int
    workers: int
    address: str | None
    through: str | None
    model: str
    """of a service that runs: one of its names; empty for its first"""
    backend: str
    precision: str | None
    engines: str
    takes_unchecked: bool
    deterministic: bool
    provenance: Provenance
    is_quiet: bool
    metrics_port: int | None
    retries_dead: bool
    reads_back: bool
    is_mixed: bool
    """GPUs of several kinds may work on it"""
    stall_s: float

    @property
    def key(self) -> str | None:
        return os.environ.get(API_KEY)
