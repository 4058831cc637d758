"""What the shelves of adapters share: errors of files that requests name, and sizes that predict
the time to load them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engines.lora_weights import LoraError
from sdxl.catalogue import FIELDS, AdapterFile
from sdxl.params import InvalidParams

LEAST_BYTES = 2**20
"""A smaller file takes as long to load as this one."""


def load_bytes(file: AdapterFile) -> int:
    """Return the bytes that predict the time to load a file."""
    return max(file.bytes, LEAST_BYTES)


@contextmanager
def refuse_unreadable(file: AdapterFile) -> Iterator[None]:
    """Refuse the request's field if the block cannot read the file, or if the file changes while it
    is read."""
    try:
        yield
        if not file.is_unchanged:
            raise LoraError("changed while it was read; try again")
    except (LoraError, OSError) as error:
        reason = f"cannot be read ({error})" if isinstance(error, OSError) else str(error)
        needed = f"names {file.name!r}, which {reason}"
        raise InvalidParams(FIELDS[file.kind], None, needed) from error
