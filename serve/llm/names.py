"""The name of the language model in the settings, and the folder of the embedded one."""

from __future__ import annotations

from pathlib import Path

MINI = Path(__file__).parent / "mini" / "weights"
MINI_ID = "mini-llm"


def id_of(llm: str) -> str:
    """Return the model's name for clients."""
    if llm == "mini":
        return MINI_ID
    return Path(llm).resolve().name if Path(llm).is_dir() else llm
