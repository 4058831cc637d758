"""A checkpoint's modules with LoRAs fused in: what is exported, and what that is held against.

It does not know who asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.lora import ADAPTED, Lora, fuse
from sdxl.checkpoint import NETWORK_FOLDERS, Checkpoint


def load_parts(checkpoint: Checkpoint, loras: Sequence[Lora], *names: str) -> dict[str, Any]:
    """The named parts in float32, LoRAs fused in."""
    needed = {*names, *(ADAPTED if loras and {*names} & {*ADAPTED} else ())}
    parts = {name: checkpoint.part(name) for name in NETWORK_FOLDERS if name in needed}
    if needed & {*ADAPTED}:
        fuse(loras, parts)
    return {name: parts[name] for name in names}
