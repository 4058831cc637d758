"""A model's digest, computed once."""

from __future__ import annotations

from sdxl.checkpoint import Checkpoint
from sdxl.digests import remembered_digest


def model_digest(checkpoint: Checkpoint) -> str:
    """Return `Checkpoint.digest`. It reads gigabytes, so the last result is remembered."""
    files = [
        path
        for part in checkpoint.parts
        for path in (checkpoint.folder / part / "config.json", *checkpoint.weight_files(part))
    ]
    return remembered_digest(files, lambda: checkpoint.digest)
