"""Inputs of the embedded model's graphs of variants, and comparisons with PyTorch's networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engines.low_rank import Bank, adapt, bank_specs
from sdxl.engine import torch_dtype
from sdxl.specs import TensorSpec, level_axes
from tests.engines.distances import check_near

MOST = 1e-5
AXES = {"rows": 2, "tokens": 77, "pages": 2, "bank": 3, "images": 3, "image_tokens": 16}
AXES |= level_axes(17, 23)
"""Odd sides are rounded up at each level."""


def drawn(*tensors: TensorSpec) -> dict[str, Tensor]:
    """Random inputs. The first row has image prompts of 4 and 16 tokens, the second none."""
    generator = torch.Generator().manual_seed(0)
    made = {t.name: torch.randn(t.shape(AXES), generator=generator) for t in tensors}
    for name, tensor in made.items():
        if name.startswith("image_text_values"):
            tensor[1] = tensor[:, 2] = 0
    mask = torch.zeros(AXES["rows"], AXES["images"], AXES["image_tokens"])
    mask[0, 0, 4:] = -torch.inf
    steps = {"timestep": torch.linspace(900.0, 3.5, AXES["rows"])}
    return made | steps | {"pages": torch.tensor([[1, 2], [2, 0]]), "image_mask": mask}


def drawn_bank(unet: Any) -> Bank:
    """Adapt the UNet; return a bank whose page 0 adds nothing."""
    bank = {
        name: each / 10 for name, each in drawn(*bank_specs(adapt("unet", unet), "float32")).items()
    }
    for each in bank.values():
        each[0] = 0
    return bank


def computed(engine: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Call an engine with inputs in its types; return its outputs in float32."""
    outputs = {
        t.name: torch.empty(t.shape(AXES), dtype=torch_dtype(t)) for t in engine.spec.outputs
    }
    engine({t.name: inputs[t.name].to(torch_dtype(t)) for t in engine.spec.inputs}, outputs)
    return {name: tensor.float() for name, tensor in outputs.items()}


def check_equal(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], most: float = MOST
) -> None:
    for name, tensor in expected.items():
        check_near(found[name].float(), tensor, most, name)
