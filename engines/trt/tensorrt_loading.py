"""Loads engines from a folder of plans, after checking their digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engines.bank_shelf import BankShelf, new_bank
from engines.cuda.device import CudaDevice, numbered
from engines.cuda.recordings import RecordingDevice
from engines.folders.engine_folder import EngineError, EngineFolder
from engines.folders.profiles import buckets, image_limits, latent_sides, most_chunks
from engines.trt.flavours import Flavour
from engines.trt.tensorrt_engine import Scratch, TensorRTEngine
from sdxl.engine import Engine, Engines
from sdxl.slow import log_if_slow
from sdxl.specs import IMAGE, plain_name

MEMORY_GROUPS = {
    "clip_l": "encode",
    "clip_g": "encode",
    "unet_prompt": "denoise",
    "unet_deep": "denoise",
    "unet_shallow": "denoise",
    "vae_decoder": "decode",
    "vae_encoder": "encode",
}
"""Engines of one group never run at the same time and share working memory. Encoding and decoding
may run during denoising."""

CAPTURED = ("unet_deep", "unet_shallow")
"""engines that are always called with the loop's buffers"""


def load_tensorrt(folder: EngineFolder, flavour: Flavour) -> Engines:
    """Load engines. `EngineFolder.mismatch` must have found that they run here."""
    device = numbered()
    cuda = CudaDevice(device)
    deep, prompted = folder.plans["unet_deep"], folder.plans.get(f"unet_deep+{IMAGE}")
    bank_specs = [tensor for plan in folder.plans.values() for tensor in plan.spec.bank]
    bank = new_bank(bank_specs, device) if bank_specs else {}
    return Engines(
        folder.arch,
        open_plans(folder, flavour, flavour.load(), cuda, bank),
        device=device,
        adapters=BankShelf(lambda: bank) if bank else None,
        cut=folder.cut,
        buckets=buckets(folder.max_batch),
        latent_sides=latent_sides(deep.spec, deep.profiles),
        most_chunks=most_chunks(deep.spec, deep.profiles),
        **(image_limits(prompted.spec, prompted.profiles) if prompted else {}),
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
    scratch = {group: Scratch(device) for group in set(MEMORY_GROUPS.values())}
    new_context = context_maker(flavour, library)
    engines: dict[str, Engine] = {}
    for name, plan in folder.plans.items():
        with log_if_slow(f"loading {name}"):
            deserialized = runtime.deserialize_cuda_engine(folder.plan_bytes(name))
        if deserialized is None:
            raise EngineError(
                f"{folder.folder / plan.file}: {flavour.name} {folder.backend_version} cannot load "
                "it; the library's message is above; build again"
            )
        engines[name] = TensorRTEngine(
            plan.spec,
            deserialized,
            plan.profiles,
            new_context,
            device,
            scratch[MEMORY_GROUPS[plain_name(name)]],
            captures=plain_name(name) in CAPTURED,
            bank=bank,
        )
    return engines


def context_maker(flavour: Flavour, library: Any) -> Callable[[Any], Any]:
    """Return a function that makes contexts without working memory."""
    strategy = library.ExecutionContextAllocationStrategy.USER_MANAGED
    if flavour.times_kernels:
        return lambda plan: plan.create_execution_context(strategy)

    def make_context(plan: Any) -> Any:
        config = plan.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # Compile at the first call. Otherwise a CUDA graph would keep the provisional kernels.
        kernels = library.DynamicShapesKernelSpecializationStrategy.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = kernels
        return plan.create_execution_context(config)

    return make_context
