"""PyTorch as an Engine: the reference on a CPU, and a fast backend on a GPU. 8-bit precisions use
the weights and scales of an export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.bank_shelf import BankShelf, new_bank
from engines.control_weights import ControlFile
from engines.cpu import rows_on_cpu
from engines.cuda.device import CudaDevice, local_target, numbered
from engines.cuda.recordings import RecordedEngine, Ticks
from engines.folders.profiles import buckets
from engines.image_shelf import image_shelf
from engines.lora import ADAPTED
from engines.low_rank import Bank, adapt, adapted, bank_of, bank_specs
from engines.net_shelf import control_shelf
from engines.pytorch.eight_bit import (
    flagged,
    has_e4m3,
    put_control_layers,
    put_decoder_layers,
    quantise,
    steps_of,
)
from engines.pytorch.launches import capability_of, like_a_gpu, triton_module
from engines.pytorch.slots import in_slots, slot_of
from engines.pytorch.tiles import measuring
from engines.pytorch.torch_options import PLAIN, TorchOptions
from sdxl.checkpoint import Checkpoint, quiet_loading
from sdxl.checkpoint_checks import network_class
from sdxl.engine import Engine, Engines, check_inputs
from sdxl.networks.attention import cross_attentions, prompted
from sdxl.networks.control import control_networks, net_like
from sdxl.networks.halves import fit_halves
from sdxl.networks.parts import networks_of
from sdxl.params import InvalidParams
from sdxl.slow import log_if_slow
from sdxl.specs import (
    IMAGE_KEYS,
    IMAGE_MASK,
    Architecture,
    ControlArchitecture,
    Cut,
    ModelSpec,
    control_specs,
    network_specs,
    plain_name,
    variants_of,
    with_loras,
)

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
EIGHT_BIT = ("int8", "fp8")
"""Layers that are not in 8 bits are in 16 bits. A CPU has no 8-bit products and computes in
float32."""

IMAGES = (IMAGE_KEYS, IMAGE_MASK)


@dataclass(frozen=True)
class TorchEngine:
    spec: ModelSpec
    module: nn.Module
    bank: Bank | None = None
    """the bank of a network with LoRAs"""

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        check_inputs(self.spec, inputs)
        names = [tensor.name for tensor in self.spec.inputs]
        images = [inputs[name] for name in names if name.startswith(IMAGES)]
        arguments = [inputs[name] for name in names if not name.startswith(IMAGES)]
        with ExitStack() as stack:
            if (sides := inputs.get("sides")) is not None:
                stack.enter_context(in_slots(inputs["sample"].shape[-1], sides))
            if self.bank is not None:
                *arguments, pages, scales = arguments
                stack.enter_context(adapted(self.bank, pages, scales))
            if images:
                *keys_and_values, mask = images
                stack.enter_context(prompted(keys_and_values, mask))
            results = self.module(*arguments)
        for tensor, result in zip(self.spec.outputs, results, strict=True):
            outputs[tensor.name].copy_(result)


def load_torch(
    checkpoint: Checkpoint,
    *,
    device: str | None = None,
    precision: str | None = None,
    cut: Cut = "reference",
    options: TorchOptions | None = None,
    numbers: Sequence[Path] = (),
    load_part: Callable[[str], nn.Module] | None = None,
) -> Engines:
    """Load a checkpoint's networks. `numbers` are an export's files of 8-bit weights and scales,
    for 8-bit precisions. `load_part` replaces `checkpoint.part` to load modules with LoRAs."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    is_cuda = chosen.type == "cuda"
    if is_cuda:
        chosen = numbered(chosen)
    cuda = CudaDevice(chosen) if is_cuda else None
    precision = precision or ("fp16" if is_cuda else "fp32")
    options = options or (TorchOptions() if is_cuda else PLAIN)
    _check_precision(precision, numbers, chosen)
    dtype = PRECISIONS.get(precision, "float16" if is_cuda else "float32")
    specs = network_specs(checkpoint.arch, dtype, cut)
    engines: dict[str, Engine] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    place = partial(_place_part, specs=specs, cut=cut, options=options, numbers=numbers)
    fit = partial(_fit_control, options=options, numbers=numbers)
    has_kernels = is_cuda and options.rearranged
    with (
        _compile_ahead(checkpoint, chosen, specs, options, place, fit)
        if has_kernels
        else nullcontext()
    ):
        for part in checkpoint.parts:
            with log_if_slow(f"loading {part}"):
                module = (load_part or checkpoint.part)(part)
                if part in ADAPTED and not options.compile:
                    shapes |= adapt(part, module)
                networks = place(part, module, chosen)
            for name, network in networks.items():
                is_compiled = options.compile and part == "unet"
                callable_network: Any = torch.compile(network) if is_compiled else network
                engines[name] = TorchEngine(specs[name], callable_network)
    deep: Any = engines["unet_deep"]
    for name, spec in variants_of(specs, checkpoint.arch).items():
        plain: Any = engines[plain_name(name)]
        engines[name] = TorchEngine(spec, plain.module)
    prepare = partial(_add_loras, engines, specs, checkpoint.arch, shapes, chosen)
    shelf = BankShelf(prepare, steps_of(deep.module)) if shapes else None
    if is_cuda and options.graphs and "vae_decoder" in engines:
        # Another device object has another pool. Graphs of one pool must not run at the same time,
        # but pictures are decoded while others are denoised.
        engines["vae_decoder"] = RecordedEngine(engines["vae_decoder"], CudaDevice(chosen))
    # Calls have the same numbers of rows as calls of compiled engines on this GPU.
    target = local_target(chosen) if is_cuda else None
    counts = (1, *buckets(target.max_batch)) if target else Engines.buckets
    if not is_cuda:
        counts = rows_on_cpu(checkpoint.arch, counts)
    description = {"backend": "torch", "precision": precision, "device": str(chosen)}
    if target:
        description["gpu"] = target.name
    if options != PLAIN:
        description["options"] = str(options)
    layout = memory_format(options)
    has_slots = _has_slots(options, deep.module)
    standard = checkpoint.arch.sample_size
    ticks = Ticks(cuda) if cuda and options.graphs else None
    return Engines(
        checkpoint.arch,
        engines,
        slot_of=partial(slot_of, standard=standard) if has_slots else Engines.slot_of,
        device=chosen,
        cut=cut,
        buckets=counts,
        memory_format=layout,
        adapters=shelf,
        controls=control_shelf(
            checkpoint,
            dtype,
            chosen,
            lambda file: torch_control(file, checkpoint.arch, dtype, chosen, layout, fit),
        ),
        # A network compiled by torch.compile takes no image prompts.
        image_prompts=None if options.compile else image_shelf(checkpoint, dtype, chosen),
        warming=partial(_warming, chosen, ticks) if is_cuda else nullcontext,
        run_recorded=ticks or Engines.run_recorded,
        description=description,
        compiled_kernels=(
            import_module("engines.pytorch.forms").compiled_forms
            if has_kernels
            else Engines.compiled_kernels
        ),
        **(cuda.for_engines() if cuda else {}),
    )


def _add_loras(
    engines: dict[str, Engine],
    specs: Mapping[str, ModelSpec],
    arch: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> Bank:
    """Add the networks with LoRAs to the engines."""
    bank = new_bank(bank_specs(shapes, specs["unet_deep"].outputs[0].dtype), device)
    lora_specs = with_loras(specs)
    for name, spec in {**lora_specs, **variants_of({**specs, **lora_specs}, arch)}.items():
        if name not in engines:
            plain: Any = engines[plain_name(name)]
            engines[name] = TorchEngine(spec, plain.module, bank_of(name, plain.module, bank))
    return bank


def torch_control(
    file: ControlFile,
    arch: Architecture,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    layout: torch.memory_format = torch.contiguous_format,
    fit: Callable[[nn.Module], None] = lambda net: None,
) -> dict[str, Engine]:
    """Load a ControlNet's networks. `layout` is the memory format of the loop's maps; `fit`
    replaces layers."""
    # diffusers' `to` prints warnings that concern other models.
    network: Any = nn.Module.to(file.network(), device, getattr(torch, dtype))
    network = network.to(memory_format=layout)
    fit(network)
    return control_engines(control_specs(arch, file.architecture, dtype), network)


def control_engines(specs: Mapping[str, ModelSpec], module: nn.Module) -> dict[str, Engine]:
    networks = control_networks(module)
    return {name: TorchEngine(specs[name], each) for name, each in networks.items()}


def _place_part(
    part: str,
    module: nn.Module,
    device: torch.device,
    *,
    specs: Mapping[str, ModelSpec],
    cut: Cut,
    options: TorchOptions,
    numbers: Sequence[Path],
) -> dict[str, nn.Module]:
    """Return a part's networks on a device, with the options applied."""
    dtype = specs["unet_deep"].outputs[0].dtype
    if part == "unet":
        # diffusers' `to` prints warnings that concern other models.
        module = nn.Module.to(module, device, getattr(torch, dtype))
        networks = networks_of(part, _fit_unet(module, options, numbers), cut)
        return {name: flagged(network) for name, network in networks.items()}
    if part == "vae" and dtype == "float16":
        fit_halves(module)
    networks = networks_of(part, module, cut)
    placed = {name: _place(each, specs[name], device) for name, each in networks.items()}
    if part == "vae":
        # After the networks are placed, because a change of type would change 8-bit numbers.
        decoder: Any = placed["vae_decoder"]
        _fit_decoder(decoder.decoder, options, is_eight_bit=bool(numbers))
    return placed


def _compile_ahead(
    checkpoint: Checkpoint,
    device: torch.device,
    specs: Mapping[str, ModelSpec],
    options: TorchOptions,
    place: Callable[[str, nn.Module, torch.device], dict[str, nn.Module]],
    fit: Callable[[nn.Module], None],
) -> AbstractContextManager[None]:
    """Compile the kernels of the networks and of a ControlNet while the block runs. Networks
    without weights list the kernels."""
    # Imported late: without a GPU, Triton may be missing.
    forms: Any = import_module("engines.pytorch.forms")

    def list_forms() -> Any:
        networks: dict[str, nn.Module] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        with like_a_gpu(capability_of(device)):
            for part in ("unet", "vae"):
                with quiet_loading(), torch.device("meta"):
                    module = network_class(part).from_config(checkpoint.config(part))
                    if part == "unet":
                        dtype = specs["unet_deep"].outputs[0].dtype
                        net = net_like(module, dtype)
                        widths = tuple(each.to_k.out_features for each in cross_attentions(net))
                        nets = control_specs(checkpoint.arch, ControlArchitecture(widths), dtype)
                        fit(net)
                        networks["control_deep"] = control_networks(net)["control_deep"]
                if part in ADAPTED and not options.compile:
                    shapes |= adapt(part, module)
                networks |= place(part, module.eval().requires_grad_(False), torch.device("meta"))
            launches = forms.recorded_launches(
                networks,
                {**specs, **nets},
                checkpoint.arch,
                has_slots=_has_slots(options, networks["unet_deep"]),
                bank=new_bank(bank_specs(shapes, "float16"), torch.device("meta")),
            )
        tiles = triton_module("product").tiles(device)
        target = forms.target_of(device)
        return forms.forms_of(launches, target, tiles.fitting), target

    return forms.compiled_ahead(list_forms)


def memory_format(options: TorchOptions) -> torch.memory_format:
    """Return the layout of the loop's maps. The rearranged UNet's maps are all channels-last."""
    return torch.channels_last if options.rearranged else torch.contiguous_format


def _warming(device: torch.device, ticks: Ticks | None) -> AbstractContextManager[None]:
    """Measure tiles during first runs, which are not recorded."""
    return measuring(triton_module("product").tiles(device), *filter(None, [ticks]))


def _check_precision(precision: str, numbers: Sequence[Path], device: torch.device) -> None:
    allowed = (*PRECISIONS, *EIGHT_BIT)
    if precision not in allowed:
        raise InvalidParams.unknown("precision", precision, allowed)
    if (precision in EIGHT_BIT) != bool(numbers):
        needed = f"must be given exactly with {' and '.join(EIGHT_BIT)}: an export's numbers"
        raise InvalidParams("numbers", [str(each) for each in numbers] or None, needed)
    if precision == "fp8" and not has_e4m3(device):
        raise InvalidParams("precision", precision, "needs a GPU of compute capability 8.9 or more")


def _fit_unet(unet: nn.Module, options: TorchOptions, numbers: Sequence[Path]) -> nn.Module:
    # Before the 8-bit layers, because a change of type would change their numbers.
    unet = unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if numbers:
        quantise(unet, *numbers)
    _rearrange(unet, options)
    return unet


def _fit_control(net: nn.Module, options: TorchOptions, numbers: Sequence[Path]) -> None:
    """Replace a ControlNet's layers like the UNet's."""
    if numbers and has_e4m3(next(net.parameters()).device):
        put_control_layers(net, *numbers)
    _rearrange(net, options)


def _rearrange(network: nn.Module, options: TorchOptions) -> None:
    if options.rearranged:
        from engines.pytorch.fast_unet import rearrange

        rearrange(network, None if options.attention == "auto" else options.attention)


def _has_slots(options: TorchOptions, deep: nn.Module) -> bool:
    """Return whether pictures of several sizes may share calls. A network compiled by torch.compile
    has no slots."""
    from engines.pytorch.fast_unet import takes_slots

    is_able = options.slots and options.rearranged and not options.compile
    return is_able and takes_slots(deep)


def _fit_decoder(decoder: Any, options: TorchOptions, *, is_eight_bit: bool) -> None:
    if is_eight_bit and options.fp8_decoder and has_e4m3(decoder.conv_in.weight.device):
        put_decoder_layers(decoder)
    if options.rearranged:
        from engines.pytorch.fast_vae import rearrange_decoder

        rearrange_decoder(decoder)


def _place(module: nn.Module, spec: ModelSpec, device: torch.device) -> nn.Module:
    dtype = getattr(torch, spec.outputs[0].dtype)
    return module.to(device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
