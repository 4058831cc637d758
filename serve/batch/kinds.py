"""What computes a job's pictures, and which kinds of it may work side by side.

The first worker's is the job's. It starts no workers and writes nothing.
"""

from __future__ import annotations

from typing import Any

from serve.orders import ModelCard

MAY_DIFFER = ("backend", "device", "gpu", "version")
"""Between the workers of a job that takes GPUs of several kinds. They round differently, and no eye
sees it; another precision is another picture."""
LABEL = ("backend", "precision", "device", "gpu", "version", "service")
SINCE_LATER = "gpu"
"""What a job may have begun without, when workers did not say it yet."""


def engine_of(card: ModelCard) -> dict[str, Any]:
    return {name: value for name, value in card.engines.items() if name != "passed_over"}


def engine_label(engine: dict[str, Any]) -> str:
    return " ".join(str(engine[name]) for name in LABEL if name in engine)


def differences(engine: dict[str, Any], first: dict[str, Any]) -> list[str]:
    names = [name for name in {**engine, **first} if engine.get(name) != first.get(name)]
    return [name for name in names if name != SINCE_LATER or name in first]


def refusal(engine: dict[str, Any], first: dict[str, Any], is_mixed: bool) -> str | None:
    """Why a worker with this engine may not join a job that began with the first."""
    names = differences(engine, first)
    bad = [name for name in names if not (is_mixed and name in MAY_DIFFER)]
    if not bad:
        return None
    told = f"engine: {engine} is not allowed; the job began with {first}"
    if set(bad) <= set(MAY_DIFFER):
        return f"{told}, and its pictures would differ in rounding; --mixed-gpus takes both"
    return f"{told}, and its pictures would differ: needed the same {', '.join(sorted(bad))}"
