"""Options of the torch backend, and their text in settings and flags: `attention=flash,compile`,
`no-graphs`. It knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sdxl.params import InvalidParams

ATTENTIONS = ("auto", "cudnn", "flash", "efficient", "math")


@dataclass(frozen=True)
class TorchOptions:
    """The defaults of a GPU; a CPU's default is PLAIN."""

    rearranged: bool = True
    """channels-last throughout, fused projections, norms and activations"""
    graphs: bool = True
    """a whole tick as one CUDA graph"""
    compile: bool = False
    """torch.compile of the UNet; minutes at the first call of each shape"""
    fp8_decoder: bool = True
    """with an 8-bit UNet, compute most of the VAE's decoder in FP8 if the GPU has it"""
    slots: bool = True
    """with an 8-bit UNet, pictures of several sizes share calls; GPUs from Hopper on"""
    attention: str = "auto"
    """the preferred kernel, in 16 bits; auto leaves it to PyTorch, and between 8-bit layers uses
    FP8 among pixels if the GPU has a tensor memory accelerator"""

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
"""diffusers' modules as they are"""
