"""Where our Triton kernels run: on a GPU, and on a CPU only under Triton's interpreter."""

from __future__ import annotations

import os
from types import ModuleType

from torch import Tensor

from engines.pytorch.launches import is_noted

INTERPRETED = "TRITON_INTERPRET"


def has_kernels(x: Tensor) -> bool:
    if x.is_meta:
        return is_noted()
    return x.is_cuda or os.environ.get(INTERPRETED) == "1"


def kernels() -> ModuleType:
    """Imported at the first call: where there is no GPU, Triton need not be installed."""
    import engines.pytorch.triton_kernels as found

    return found


def products() -> ModuleType:
    import engines.pytorch.triton_product as found

    return found


def attentions() -> ModuleType:
    import engines.pytorch.triton_attention as found

    return found


def text_attentions() -> ModuleType:
    import engines.pytorch.triton_text_attention as found

    return found
