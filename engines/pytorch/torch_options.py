"""Options of the torch backend. Settings and flags write them as text: `attention=flash,compile` or
`no-graphs`. It knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sdxl.params import InvalidParams

ATTENTIONS = ("auto", "cudnn", "flash", "efficient", "math")


@dataclass(frozen=True)
class TorchOptions:
    """Options. The defaults are for a GPU; a CPU's default is PLAIN."""

    rearranged: bool = True
    """all maps channels-last; fused projections, norms and activations"""
    graphs: bool = True
    """record a whole tick as one CUDA graph"""
    compile: bool = False
    """compile the UNet with torch.compile; takes minutes at the first call of each shape"""
    fp8_decoder: bool = True
    """with an 8-bit UNet, compute most of the VAE's decoder in FP8 if the GPU supports it"""
    slots: bool = True
    """with an 8-bit UNet, let pictures of several sizes share calls; GPUs from Hopper on"""
    attention: str = "auto"
    """the preferred kernel in 16 bits; with auto, PyTorch chooses, and self-attention between 8-bit
    layers runs in FP8 if the GPU has a tensor memory accelerator"""

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise InvalidParams.unknown("attention", self.attention, ATTENTIONS)

    @classmethod
    def parse(cls, text: str) -> TorchOptions:
        values: dict[str, Any] = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = word.partition("=")
            if name == "attention":
                values[name] = value
            elif (flag := word.removeprefix("no-")) in FLAGS:
                values[flag] = flag == word
            else:
                needed = f"must be attention=NAME, {', '.join(FLAGS)}, or one of these after no-"
                raise InvalidParams("torch_options", word, needed)
        return cls(**values)

    def __str__(self) -> str:
        flags = [name if getattr(self, name) else f"no-{name}" for name in FLAGS]
        return ",".join([*flags, f"attention={self.attention}"])


FLAGS = tuple(field.name for field in fields(TorchOptions) if field.type == "bool")
PLAIN = TorchOptions(rearranged=False, graphs=False)
"""diffusers' unchanged modules"""
