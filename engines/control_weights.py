"""Reads ControlNets of SDXL in the layouts of diffusers and Stability AI, unions, and
Control-LoRAs.

A file is used completely or refused. Its kind, names, shapes and types are checked in the header;
`ControlFile.network` reads the weights later. A ControlNet has the architecture of the model's
UNet; the header's shapes show which layers it lacks.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.lora_weights import (
    STABILITY_NAMES,
    LoraError,
    Shapes,
    check_finite,
    check_types,
    open_tensors,
    read_config,
    read_shapes,
    shown,
)
from sdxl.checkpoint import Checkpoint, quiet_loading
from sdxl.single_file.recognition import CONTEXT_WIDTHS, UNET, VAE
from sdxl.specs import MAX_LAYERS, ControlArchitecture

DIFFUSERS_FILE, CONFIG = "diffusion_pytorch_model.safetensors", "config.json"
STABILITY_PREFIX = "control_model."
LORA_MARK = "lora_controlnet"
"""an empty tensor in a Control-LoRA"""
HINTS = "controlnet_cond_embedding."
CONTROL_LAYERS = (HINTS, "controlnet_")
"""beginnings of the names of layers that a UNet lacks"""
EXPECTED = "expected a ControlNet of SDXL"
FOREIGN = {
    "for FLUX": ("double_blocks.", "single_transformer_blocks.", "controlnet_x_embedder."),
    "for Stable Diffusion 3": ("joint_blocks.", "pos_embed.", "pos_embed_input."),
    "a checkpoint": (UNET, VAE),
    "a T2I-Adapter": ("adapter.", "body."),
    "an IP-Adapter": ("ip_adapter.", "image_proj"),
    "a ControlNet-LLLite": ("lllite_",),
    "a UNet": ("up_blocks.", "output_blocks."),
    "a VAE": ("decoder.", "encoder."),
}
"""other kinds of files by the beginnings of their keys"""
UNSEEN = (
    *("attention_head_dim", "num_attention_heads", "norm_num_groups", "norm_eps", "act_fn"),
    *("flip_sin_to_cos", "freq_shift", "mid_block_scale_factor", "downsample_padding"),
    *("resnet_time_scale_shift", "class_embed_type", "global_pool_conditions"),
)
"""entries of a config.json that change results but no shapes; they must equal the UNet's"""
ORDER = "controlnet_conditioning_channel_order"
DIFFUSERS_NAMES = {stability: name for name, stability in STABILITY_NAMES.items()} | {
    "in_layers.0": "norm1",
    "out_layers.0": "norm2",
    "middle_block_out.0": "controlnet_mid_block",
}

HINT = re.compile(r"input_hint_block\.(\d{1,3})\.")
PROJECTION = re.compile(r"zero_convs\.(\d+)\.0\.(.+)")
MIDDLE = re.compile(r"middle_block\.([012])\.(.+)\.(\w+)")
DOWN = re.compile(r"input_blocks\.(\d{1,3})\.([01])\.(.+)\.(\w+)")
"""Names in the layout of Stability AI."""


@dataclass(frozen=True)
class _Source:
    """The source of one of the network's tensors: the file, the UNet, or the UNet plus a
    Control-LoRA's product."""

    key: str = ""
    low_rank: tuple[str, str] | None = None
    """the keys of `up` and `down`"""
    unet: Path | None = None
    """the UNet's file"""


@dataclass(frozen=True)
class ControlFile:
    """A ControlNet whose header fits the model."""

    path: Path
    architecture: ControlArchitecture
    shapes: Shapes
    """the shapes of the network's tensors by diffusers' names"""
    is_union: bool
    config: Mapping[str, Any]
    """arguments of diffusers' class"""
    is_bgr: bool
    """The net reads the channels of hints in the order blue, green, red."""
    _sources: Mapping[str, _Source]

    @property
    def numbers(self) -> int:
        """The number of weights."""
        return sum(map(math.prod, self.shapes.values()))

    def network(self) -> nn.Module:
        """Build diffusers' module with the file's weights in float32; raise LoraError if they are
        not finite."""
        with ExitStack() as stack:
            paths = {self.path} | {each.unet for each in self._sources.values() if each.unet}
            files = {path: stack.enter_context(open_tensors(path)) for path in paths}
            tensors = {name: self._tensor(name, files) for name in self.shapes}
        if self.is_bgr:
            name = f"{HINTS}conv_in.weight"
            tensors[name] = tensors[name].flip(1)
        module = _empty_network(self.is_union, self.config)
        module.load_state_dict(tensors, assign=True)
        return module.eval().requires_grad_(False)

    def _tensor(self, name: str, files: Mapping[Path, Any]) -> Tensor:
        source, file = self._sources[name], files[self.path]
        if source.unet is None:
            tensor: Tensor = file.get_tensor(source.key).float()
        else:
            tensor = files[source.unet].get_tensor(name).float()
        if source.low_rank:
            up, down = (file.get_tensor(key).float().flatten(1) for key in source.low_rank)
            tensor = tensor + (up @ down).view_as(tensor)
        if tuple(tensor.shape) != self.shapes[name]:
            raise LoraError(f"changed while it was read: {name} has shape {tuple(tensor.shape)}")
        check_finite(name, tensor)
        return tensor


def read_control(path: Path, checkpoint: Checkpoint) -> ControlFile:
    """Read the header of a file, or of the file in diffusers' folder, for a model; raise LoraError
    if it does not fit."""
    file_path = path / DIFFUSERS_FILE if path.is_dir() else path
    with open_tensors(file_path) as file:
        shapes_by_key = read_shapes(file)
        check_types(file)
    keys = _keys_by_name(shapes_by_key, checkpoint.arch.stem_layers)
    file_shapes = {name: shapes_by_key[key] for name, key in keys.items()}
    is_lora = file_shapes.pop(LORA_MARK, None) is not None
    _check_context(file_shapes, checkpoint.arch.context_width)
    is_union = "task_embedding" in file_shapes
    config = _config(file_shapes, checkpoint, has_all=not is_lora)
    with quiet_loading():
        module = _empty_network(is_union, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    is_bgr = _check_config_file(file_path, module.config)
    unet = _unet_tensors(checkpoint) if is_lora else {}
    sources = {
        name: _find_source(name, shape, file_shapes, keys, unet) for name, shape in shapes.items()
    }
    _check_all_used(keys, sources)
    widths = tuple(s[0] for name, s in shapes.items() if name.endswith("attn2.to_k.weight"))
    types = config.get("num_control_type", 0)
    architecture = ControlArchitecture(widths, types)
    return ControlFile(file_path, architecture, shapes, is_union, config, is_bgr, sources)


def _keys_by_name(keys: Iterable[str], layers: int) -> dict[str, str]:
    """Return the file's keys by diffusers' names of their tensors."""
    names = {key: key.removeprefix(STABILITY_PREFIX) for key in keys}
    _check_kind(names.values())
    hints = [int(match[1]) for name in names.values() if (match := HINT.match(name))]
    by_name: dict[str, str] = {}
    for key, name in names.items():
        name = _diffusers_name(name, layers, max(hints)) if hints else name
        if name in by_name:
            raise LoraError(f"has {shown(key)} and {shown(by_name[name])} for one tensor")
        by_name[name] = key
    return by_name


def _check_kind(names: Iterable[str]) -> None:
    names = set(names)
    if LORA_MARK not in names and any(".lora_" in n or n.startswith("lora_") for n in names):
        raise LoraError(f"is a LoRA; {EXPECTED}")
    for kind, prefixes in FOREIGN.items():
        if any(name.startswith(prefixes) for name in names):
            raise LoraError(f"is {kind}; {EXPECTED}")
    if not any(name.startswith(HINTS) or HINT.match(name) for name in names):
        raise LoraError(f"is nothing that is known; {EXPECTED}")


def _diffusers_name(name: str, layers: int, last_hint: int) -> str:
    """Return diffusers' name for a name in the layout of Stability AI, or the name itself."""
    layer, _, kind = name.rpartition(".")
    if match := HINT.match(name):
        place = int(match[1])
        ends = {0: "conv_in", last_hint: "conv_out"}
        return f"{HINTS}{ends.get(place, f'blocks.{place // 2 - 1}')}.{name[match.end() :]}"
    if match := PROJECTION.fullmatch(name):
        return f"controlnet_down_blocks.{match[1]}.{match[2]}"
    if match := MIDDLE.fullmatch(name):
        number, inner, kind = match.groups()
        block = "attentions.0" if number == "1" else f"resnets.{int(number) // 2}"
        return f"mid_block.{block}.{DIFFUSERS_NAMES.get(inner, inner)}.{kind}"
    match = DOWN.fullmatch(name)
    if layer in DIFFUSERS_NAMES or match is None:
        return f"{DIFFUSERS_NAMES.get(layer, layer)}.{kind}" if layer else name
    level, index = divmod(int(match[1]) - 1, layers + 1)
    if match[3] == "op":
        return f"down_blocks.{level}.downsamplers.0.conv.{kind}"
    block = f"{('resnets', 'attentions')[int(match[2])]}.{index}"
    return f"down_blocks.{level}.{block}.{DIFFUSERS_NAMES.get(match[3], match[3])}.{kind}"


def _check_context(shapes: Shapes, width: int) -> None:
    """Refuse a net whose context has another width: it is for another model."""
    for name, shape in shapes.items():
        if name.endswith(("attn2.to_k.weight", "attn2.to_k.down")) and shape[1:] != (width,):
            other = shape[1] if len(shape) == 2 else 0
            model = CONTEXT_WIDTHS.get(other, f"another model: its context is {other} wide")
            raise LoraError(f"is for {model}; {EXPECTED}, whose context is {width} wide")


def _config(shapes: Shapes, checkpoint: Checkpoint, *, has_all: bool) -> dict[str, Any]:
    """Return the UNet's config with this net's differences. A Control-LoRA, without `has_all`
    tensors, has the UNet's levels."""
    unet, arch = checkpoint.config("unet"), checkpoint.arch
    is_union = "task_embedding" in shapes
    known = inspect.signature(_control_class(is_union).__init__).parameters
    config = {name: value for name, value in unet.items() if name in known}
    stages = arch.vae_scale.bit_length() - 1
    hint_layers = ["conv_in", *[f"blocks.{2 * stage + 1}" for stage in range(stages)]]
    config |= {
        "in_channels": arch.latent_channels,
        "conditioning_channels": arch.image_channels,
        "conditioning_embedding_out_channels": tuple(
            _first_dim(shapes, f"{HINTS}{layer}.weight") for layer in hint_layers
        ),
    }
    if is_union:
        stem = arch.stem_channels
        layers = _count_modules(shapes, "transformer_layes.")
        config |= {"num_trans_channel": stem, "num_proj_channel": stem, "num_trans_layer": layers}
        config["num_control_type"] = min(_first_dim(shapes, "task_embedding"), MAX_LAYERS)
    if has_all:
        config |= _levels(shapes, len(unet["block_out_channels"]))
        if is_union:
            del config["mid_block_type"]
    return config


def _levels(shapes: Shapes, count: int) -> dict[str, Any]:
    """Return config entries that say which levels have attention, and its depth."""
    places = [*(f"down_blocks.{level}.attentions." for level in range(count)), "mid_block.att"]
    has = [any(name.startswith(place) for name in shapes) for place in places]
    depths = [
        _count_modules(shapes, f"down_blocks.{level}.attentions.0.transformer_blocks.")
        for level in range(count)
    ]
    # The middle block has the depth of the deepest level.
    depths[-1] = depths[-1] or _count_modules(shapes, "mid_block.attentions.0.transformer_blocks.")
    kinds = {True: "CrossAttnDownBlock2D", False: "DownBlock2D"}
    return {
        "down_block_types": [kinds[each] for each in has[:-1]],
        "mid_block_type": "UNetMidBlock2DCrossAttn" if has[-1] else "UNetMidBlock2D",
        "transformer_layers_per_block": depths,
    }


def _count_modules(shapes: Shapes, prefix: str) -> int:
    """Return the length of the list of modules with this prefix."""
    numbers = {
        name.removeprefix(prefix).partition(".")[0] for name in shapes if name.startswith(prefix)
    }
    return min(len(numbers), MAX_LAYERS)


def _first_dim(shapes: Shapes, name: str) -> int:
    first = next(iter(shapes.get(name, ())), 0)
    if not first:
        raise LoraError(f"lacks {name}; {EXPECTED}")
    return first


def _control_class(is_union: bool) -> Any:
    if is_union:
        from diffusers.models.controlnets.controlnet_union import ControlNetUnionModel

        return ControlNetUnionModel
    from diffusers.models.controlnets.controlnet import ControlNetModel

    return ControlNetModel


def _empty_network(is_union: bool, config: Mapping[str, Any]) -> Any:
    """Build the network without weights."""
    with torch.device("meta"):
        return _control_class(is_union)(**config)


def _check_config_file(path: Path, config: Mapping[str, Any]) -> bool:
    """Check diffusers' config.json beside the file, if there is one. Return whether the net reads
    the channels of hints in the order blue, green, red."""
    config_file = path.with_name(CONFIG)
    if path.name != DIFFUSERS_FILE or not config_file.is_file():
        return False
    entries = read_config(CONFIG, config_file.read_bytes())
    for name in UNSEEN:
        value, needed = entries.get(name), config.get(name)
        needed = list(needed) if isinstance(needed, tuple) else needed
        if value is not None and value != needed:
            raise LoraError(f"has {name} {value!r} in {CONFIG}; expected {needed!r}")
    order = entries.get(ORDER, "rgb")
    if order not in ("rgb", "bgr"):
        raise LoraError(f"has {ORDER} {order!r} in {CONFIG}; expected 'rgb' or 'bgr'")
    return bool(order == "bgr")


def _unet_tensors(checkpoint: Checkpoint) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of each of the UNet's tensors."""
    tensors: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in checkpoint.weight_files("unet"):
        with open_tensors(path) as file:
            tensors |= {name: (path, shape) for name, shape in read_shapes(file).items()}
    return tensors


def _find_source(
    name: str,
    shape: tuple[int, ...],
    file_shapes: Shapes,
    keys: Mapping[str, str],
    unet: Mapping[str, tuple[Path, tuple[int, ...]]],
) -> _Source:
    """Find a tensor and check its shape."""
    if name in file_shapes:
        if (other := file_shapes[name]) != shape:
            raise LoraError(f"is for another model: {name} has shape {other}, expected {shape}")
        return _Source(keys[name])
    layer = name.removesuffix(".weight")
    up, down = file_shapes.get(f"{layer}.up"), file_shapes.get(f"{layer}.down")
    if name not in unet or name.startswith(CONTROL_LAYERS):
        raise LoraError(f"lacks {name}; {EXPECTED}")
    unet_file, base = unet[name]
    if base != shape:
        raise LoraError(f"is a Control-LoRA for a UNet whose {name} is {shape}; it is {base} here")
    if up is None and down is None:
        return _Source(unet=unet_file)
    if not up or not down or up[1:2] != down[:1] or not _fits(up, down, shape):
        raise LoraError(
            f"is for another model: the matrices for {layer} have the shapes {up} and {down}, "
            f"expected ({shape[0]}, rank) and (rank, {', '.join(map(str, shape[1:]))})"
        )
    return _Source(low_rank=(keys[f"{layer}.up"], keys[f"{layer}.down"]), unet=unet_file)


def _fits(up: tuple[int, ...], down: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether the matrices' product has the weight's shape; a kernel of 1 × 1 may be left
    out."""
    return (up[0], math.prod(down[1:])) == (shape[0], math.prod(shape[1:])) and set(up[2:]) <= {1}


def _check_all_used(keys: Mapping[str, str], sources: Mapping[str, _Source]) -> None:
    used = {key for each in sources.values() for key in (each.key, *(each.low_rank or ()))}
    extra = sorted(key for name, key in keys.items() if key not in used and name != LORA_MARK)
    if extra:
        raise LoraError(
            f"has {len(extra)} tensors too many, {shown(extra[0])} the first; {EXPECTED}"
        )
