"""The UNet's networks with LoRAs, residuals or image prompts, on ONNX Runtime and in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engines.control_graphs import variant_graph
from engines.folders.export_folder import ExportFolder
from engines.low_rank import Bank, adapt, bank_of, bank_specs
from engines.onnxruntime_engine import OnnxRuntimeEngine, open_session
from engines.pytorch.torch_engine import TorchEngine
from sdxl.checkpoint import find
from sdxl.engine import torch_dtype
from sdxl.networks.parts import networks_of
from sdxl.specs import (
    ModelSpec,
    TensorSpec,
    image_axes,
    level_axes,
    network_specs,
    plain_name,
    variants_of,
    with_loras,
)
from tests.engines.distances import check_near

MOST = 1e-5
SIDES = (17, 23)
"""Odd sides are rounded up at each level."""
AXES = {
    "rows": 2,
    "tokens": 77,
    "pages": 2,
    "bank": 3,
    "images": 3,
    "image_tokens": 16,
    "pictures": 2,
    "hints": 2,
    **image_axes(find("mini").arch, *SIDES),
    **level_axes(*SIDES),
}


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


def with_variants(export: ExportFolder, dtype: str = "") -> dict[str, ModelSpec]:
    """The specs of an export's networks, with every variant for requests."""
    specs = network_specs(export.arch, dtype, export.cut) if dtype else export.specs
    specs = specs | with_loras(specs)
    return specs | variants_of(specs, export.arch)


def both_engines(
    export: ExportFolder, name: str, unet: Any
) -> tuple[OnnxRuntimeEngine, TorchEngine]:
    """Return a variant of an export's network on ONNX Runtime, and the UNet's in float32."""
    plain = plain_name(name)
    bank = drawn_bank(unet) if "+lo" in name else {}
    network = networks_of("unet", unet, export.cut)[plain]
    graph, spec = variant_graph(export.graph_bytes(plain), with_variants(export)[name])
    return (
        OnnxRuntimeEngine(spec, open_session(export, plain, graph), bank=bank),
        TorchEngine(
            with_variants(export, "float32")[name],
            network,
            bank_of(name, network, bank) if bank else None,
        ),
    )


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


def check_residuals(export: ExportFolder, name: str, unet: Any, most: float = MOST) -> None:
    """Check that a network adds residuals as in PyTorch, and that a row without a ControlNet has
    the bits of the plain graph."""
    found, reference = both_engines(export, f"{name}+control", unet)
    given = drawn(*found.spec.inputs)
    expected = computed(reference, given)
    check_equal(computed(found, given), expected, most)
    plain = OnnxRuntimeEngine(export.specs[name], open_session(export, name))
    without = computed(plain, given)
    for output, tensor in without.items():
        assert (expected[output] - tensor).norm() > 0.1 * tensor.norm(), output
    zeros = {key: 0 * each for key, each in given.items() if key.startswith("residual_")}
    for output, tensor in computed(found, given | zeros).items():
        assert torch.equal(tensor, without[output]), output
