"""What a language model of the settings is called, and where it lies. It loads nothing."""

from __future__ import annotations

from pathlib import Path

MINI = Path(__file__).parent / "mini" / "weights"
MINI_ID = "mini-llm"


def id_of(llm: str) -> str:
    """What clients call the model."""
    if llm == "mini":
        return MINI_ID
    return Path(llm).resolve().name if Path(llm).is_dir() else llm


def folder_of(llm: str) -> str:
    return str(MINI) if llm == "mini" else llm
