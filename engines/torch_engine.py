"""PyTorch behind the Engine contract: the reference on a CPU, and what a GPU falls back to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engines.gpus import cuda_fence
from sdxl.checkpoint import Checkpoint
from sdxl.engine import Engine, Engines, check_inputs
from sdxl.params import InvalidParams
from sdxl.specs import Cut, ModelSpec, network_specs

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
VAE_PRECISION = {"fp32": "float32", "fp16": "float32", "bf16": "bfloat16"}
"""SDXL's VAE overflows in half precision and would give black images."""


@dataclass(frozen=True)
class TorchEngine:
    spec: ModelSpec
    module: nn.Module

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        check_inputs(self.spec, inputs)
        results = self.module(*(inputs[t.name] for t in self.spec.inputs))
        for tensor, result in zip(self.spec.outputs, results, strict=True):
            outputs[tensor.name].copy_(result)


def load_torch(
    checkpoint: Checkpoint,
    *,
    device: str | None = None,
    precision: str | None = None,
    cut: Cut = "reference",
) -> Engines:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = precision or ("fp16" if chosen.type == "cuda" else "fp32")
    if precision not in PRECISIONS:
        raise InvalidParams("precision", precision, f"needed one of {', '.join(PRECISIONS)}")
    specs = network_specs(checkpoint.arch, PRECISIONS[precision], cut)
    vae = network_specs(checkpoint.arch, VAE_PRECISION[precision], cut)["vae_decoder"]
    specs["vae_decoder"] = vae
    engines: dict[str, Engine] = {
        name: TorchEngine(specs[name], _place(module, specs[name], chosen))
        for name, module in checkpoint.networks(cut).items()
    }
    is_cuda = chosen.type == "cuda"
    return Engines(
        checkpoint.arch,
        engines,
        device=chosen,
        cut=cut,
        fence=cuda_fence if is_cuda else Engines.fence,
        depth=1 if is_cuda else 0,
        description={"backend": "torch", "precision": precision, "device": str(chosen)},
    )


def _place(module: nn.Module, spec: ModelSpec, device: torch.device) -> nn.Module:
    dtype = getattr(torch, spec.outputs[0].dtype)
    return module.to(device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
