"""One `sdxl batch` command: its flags and errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.flags import ModelFlags
from sdxl.params import InvalidParams
from sdxl.provenance import Provenance

HAS_DEAD = 3
"""The exit code of a job with dead letters."""
API_KEY = "OPENAI_API_KEY"
RANGES = {"n": (1, 10_000), "shard_size": (1, 4096)}


def check_ranges(values: object, ranges: Mapping[str, tuple[int, int]]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(values, name)
        if not low <= value <= high:
            raise InvalidParams(name, value, f"must be {low} to {high}")


class BatchFailed(RuntimeError):
    """The job cannot continue. Finished pictures are kept."""


class ReportedInterrupt(KeyboardInterrupt):
    """An interrupt after which the resume hint is printed."""


@dataclass(frozen=True)
class BatchSpec(ModelFlags):
    """A command's flags, checked as far as possible without reading the input. With `through`,
    `model` is a model of the service; empty: the first."""

    inputs: tuple[str, ...]
    out: str
    parameters: dict[str, Any]
    quality: str | None
    """name of a preset, which sets the steps and cache interval that flags do not set"""
    n: int
    format: str
    is_tarred: bool
    shard_size: int
    workers: int
    address: str | None
    through: str | None
    deterministic: bool
    provenance: Provenance
    is_quiet: bool
    metrics_port: int | None
    retries_dead: bool
    reads_back: bool
    is_mixed: bool
    """allows GPUs of several kinds"""
    stall_s: float

    @property
    def key(self) -> str | None:
        return os.environ.get(API_KEY)
