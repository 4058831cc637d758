"""Loads engines from a folder of plans, after checking their digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engines.bank_shelf import BankShelf, new_bank
from engines.cuda.device import CudaDevice, numbered
from engines.cuda.recordings import RecordingDevice
from engines.folders.engine_folder import EngineError, EngineFolder
from engines.folders.profiles import buckets, latent_sides, most_chunks
from engines.trt.flavours import Flavour
from engines.trt.tensorrt_engine import Scratch, TensorRTEngine
from sdxl.engine import Engine, Engines
from sdxl.slow import log_if_slow
from sdxl.specs import plain_name

TURNS = {
    "clip_l": "encode",
    "clip_g": "encode",
    "unet_prompt": "denoise",
    "unet_deep": "denoise",
    "unet_shallow": "denoise",
    "vae_decoder": "decode",
    "vae_encoder": "encode",
}
"""Engines of one turn never overlap and share working memory; encoding and decoding may overlap
with denoising."""

CAPTURED = ("unet_deep", "unet_shallow")
"""called with the loop's own buffers, which recur"""


def load_tensorrt(folder: EngineFolder, flavour: Flavour) -> Engines:
    """Load engines that run here, by `EngineFolder.mismatch`."""
    device = numbered()
    cuda = CudaDevice(device)
    deep = folder.plans["unet_deep"]
    banked = [tensor for plan in folder.plans.values() for tensor in plan.spec.bank]
    bank = new_bank(banked, device) if banked else {}
    return Engines(
        folder.arch,
        open_plans(folder, flavour, flavour.load(), cuda, bank),
        device=device,
        adapters=BankShelf(lambda: bank) if bank else None,
        cut=folder.cut,
        buckets=buckets(folder.max_batch),
        latent_sides=latent_sides(deep.spec, deep.profiles),
        most_chunks=most_chunks(deep.spec, deep.profiles),
        description={
            "backend": folder.backend,
            "precision": folder.precision,
            "device": folder.gpu,
            "version": folder.backend_version,
            **({"loras": folder.loras} if folder.loras else {}),
        },
        **cuda.for_engines(),
    )


def open_plans(
    folder: EngineFolder,
    flavour: Flavour,
    library: Any,
    device: RecordingDevice,
    bank: Mapping[str, Tensor] | None = None,
) -> dict[str, Engine]:
    runtime = library.Runtime(library.Logger(library.Logger.WARNING))
    scratch = {turn: Scratch(device) for turn in set(TURNS.values())}
    new_context = context_maker(flavour, library)
    engines: dict[str, Engine] = {}
    for name, plan in folder.plans.items():
        with log_if_slow(f"loading {name}"):
            deserialized = runtime.deserialize_cuda_engine(folder.plan_bytes(name))
        if deserialized is None:
            raise EngineError(
                f"{folder.folder / plan.file}: {flavour.name} {folder.backend_version} cannot load "
                "it, and has said why above; build again"
            )
        engines[name] = TensorRTEngine(
            plan.spec,
            deserialized,
            plan.profiles,
            new_context,
            device,
            scratch[TURNS[plain_name(name)]],
            captures=plain_name(name) in CAPTURED,
            bank=bank,
        )
    return engines


def context_maker(flavour: Flavour, library: Any) -> Callable[[Any], Any]:
    """Return a function that makes contexts without memory of their own."""
    strategy = library.ExecutionContextAllocationStrategy.USER_MANAGED
    if flavour.has_exact_profiles:
        return lambda plan: plan.create_execution_context(strategy)

    def specialised(plan: Any) -> Any:
        config = plan.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # Compile at the first call: a graph would keep the provisional kernels.
        kernels = library.DynamicShapesKernelSpecializationStrategy.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = kernels
        return plan.create_execution_context(config)

    return specialised
