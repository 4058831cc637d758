"""Reads IP-Adapters of SDXL: plain ones, which project a picture's embedding, and Plus adapters
with a resampler. CLIP's encoder is in a folder beside the file.

A file is used completely or refused. Its kind, names, shapes and types are checked in the header;
weights are read later. Of the model, only the UNet's config is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.lora_weights import (
    LoraError,
    Shapes,
    check_finite,
    check_types,
    open_tensors,
    read_config,
    read_shapes,
    shown,
)
from sdxl.catalogue import ENCODER
from sdxl.checkpoint import Checkpoint, quiet_loading
from sdxl.checkpoint_checks import CheckpointError, foreign_errors
from sdxl.image_prompts import COMPOSITION, STYLE, USUAL
from sdxl.parameter import MAX_ATTACHMENTS
from sdxl.single_file.recognition import CONTEXT_WIDTHS
from sdxl.specs import IMAGE_TOKENS

EXPECTED = "expected an IP-Adapter of SDXL"
PROJECTION, ATTENTIONS = "image_proj.", "ip_adapter."
"""beginnings of keys"""
OTHER_KINDS = {
    f"{PROJECTION}perceiver_resampler.": "a FaceID adapter, which reads faces",
    f"{PROJECTION}proj.0.": "a FaceID adapter, or one for all tokens of Stable Diffusion 1",
}
"""adapters that are not supported, by the beginnings of their keys"""
PLAIN_TOKENS = 4
HEAD_WIDTH = 64
"""channels of a resampler's attention head"""
MOST_TOKENS = IMAGE_TOKENS[-1] // MAX_ATTACHMENTS
SHARED_ENCODER = Path("models") / ENCODER
"""folder of the encoder in h94/IP-Adapter; adapters of several models read it"""
ENCODER_FILE, ENCODER_CONFIG = "model.safetensors", "config.json"
ENCODER_DEFAULTS = {"hidden_size": 768.0, "projection_dim": 512.0, "image_size": 224.0}
"""what transformers takes for entries that an encoder's config lacks"""
ENCODER_PROJECTION = "visual_projection.weight"
"""the encoder's tensor that a resampler does not read"""
KEY = re.compile(r"(\d{1,4})\.to_([kv])_ip\.weight")
LAYER = re.compile(r"layers\.(\d{1,2})\.([01])\.(.+)")
RESAMPLER_NAMES = {
    ("0", "norm1"): "ln0",
    ("0", "norm2"): "ln1",
    ("0", "to_q"): "attn.to_q",
    ("0", "to_out"): "attn.to_out.0",
    ("1", "0"): "ff.0",
    ("1", "1"): "ff.1.net.0.proj",
    ("1", "3"): "ff.1.net.2",
}
"""diffusers' names of the parts of a resampler's layers"""
JOINED, SPLIT = "0.to_kv", ("attn.to_k", "attn.to_v")
PLACES = {STYLE: ("up", 0, 1), COMPOSITION: ("down", 2, 1)}
"""the transformers that read style and composition according to InstantStyle (arXiv:2404.02733):
way, block and number"""
WAYS = ("down", "up", "mid")
"""the order in which files number cross-attentions"""


@dataclass(frozen=True)
class ImageFile:
    """An IP-Adapter whose header fits the model."""

    path: Path
    encoder: Path
    """the folder of CLIP's encoder"""
    tokens: int
    """tokens of one picture"""
    side: int
    """pixels of a side of the encoder's pictures"""
    numbers: int
    """number of weights in the adapter and its encoder"""
    layers: Mapping[str, Sequence[int]]
    """the cross-attentions of each mode"""
    _keys: Sequence[tuple[str, str]]
    """the file's keys for `to_k` and `to_v` of each cross-attention, in the UNet's order"""

    def network(self, vision: nn.Module) -> nn.Module:
        """Build the network with the file's weights in float32; raise LoraError if they are not
        finite."""
        from sdxl.networks.image_prompt import ImagePromptNetwork

        with open_tensors(self.path) as file:
            weights = [[_read(file, key) for key in pair] for pair in self._keys]
            names = [key for key in file.keys() if key.startswith(PROJECTION)]  # noqa: SIM118
            tensors = {key.removeprefix(PROJECTION): _read(file, key) for key in names}
        projection = _empty_projection({name: tuple(each.shape) for name, each in tensors.items()})
        projection.load_state_dict(_rename(tensors), assign=True)
        sides = (nn.ModuleList(map(_linear, side)) for side in zip(*weights, strict=True))
        return ImagePromptNetwork(vision, projection, *sides).eval().requires_grad_(False)

    def vision(self) -> nn.Module:
        """Load CLIP's encoder in float32; raise LoraError if it is not whole."""
        from transformers import CLIPVisionModelWithProjection

        try:
            with quiet_loading(), foreign_errors(self.encoder):
                model, report = CLIPVisionModelWithProjection.from_pretrained(
                    str(self.encoder),
                    use_safetensors=True,
                    local_files_only=True,
                    torch_dtype=torch.float32,
                    output_loading_info=True,
                    # In a whole CLIP's config, vision_config may have another one.
                    projection_dim=int(_encoder_facts(self.encoder)["projection_dim"]),
                )
        except CheckpointError as error:
            raise LoraError(f"has an encoder that cannot be loaded ({error})") from error
        if missing := sorted(report["missing_keys"] - {ENCODER_PROJECTION}):
            raise LoraError(
                f"has an encoder without {missing[0]}: {self.encoder / ENCODER_FILE}; expected "
                "transformers' names"
            )
        encoder: nn.Module = model.eval().requires_grad_(False)
        return encoder


def read_image_adapter(path: Path, checkpoint: Checkpoint) -> ImageFile:
    """Read the header of a file for a model; raise LoraError if it does not fit."""
    with open_tensors(path) as file:
        shapes = read_shapes(file)
        _check_kind(shapes)
        check_types(file)
    places = list(places_of(checkpoint.config("unet")))
    keys = _attention_keys(shapes, places)
    widths, context = checkpoint.arch.attention_widths, checkpoint.arch.context_width
    for pair, width in zip(keys, widths, strict=True):
        for key in pair:
            _check_shape(key, shapes[key], (width, context))
    projection = _strip(shapes, PROJECTION)
    tokens = projection["latents"][1] if "latents" in projection else PLAIN_TOKENS
    if not 1 <= tokens <= MOST_TOKENS:
        raise LoraError(f"has {tokens} tokens for a picture; expected at most {MOST_TOKENS}")
    _check_projection(projection, context)
    encoder, side, encoder_numbers = _find_encoder(path, projection)
    layers = {mode: [i for i, each in enumerate(places) if each == p] for mode, p in PLACES.items()}
    layers[USUAL] = list(range(len(places)))
    numbers = encoder_numbers + sum(map(math.prod, shapes.values()))
    return ImageFile(path, encoder, tokens, side, numbers, layers, keys)


def places_of(unet: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield way, block and transformer of each cross-attention, in the order in which they run."""
    depths, layers = unet["transformer_layers_per_block"], unet["layers_per_block"]
    levels = len(unet["block_out_channels"])
    depths = [depths] * levels if isinstance(depths, int) else depths
    for block in range(1, levels):
        yield from (("down", block, i) for i in range(layers) for _ in range(depths[block]))
    yield from (("mid", 0, 0) for _ in range(depths[-1]))
    for block, depth in enumerate(reversed(depths[1:])):
        yield from (("up", block, i) for i in range(layers + 1) for _ in range(depth))


def _check_kind(shapes: Shapes) -> None:
    if not all(any(key.startswith(p) for key in shapes) for p in (PROJECTION, ATTENTIONS)):
        raise LoraError(f"is nothing that is known; {EXPECTED}")
    for start, kind in OTHER_KINDS.items():
        if any(key.startswith(start) for key in shapes):
            raise LoraError(f"is {kind}; {EXPECTED}")


def _attention_keys(
    shapes: Shapes, places: Sequence[tuple[str, int, int]]
) -> list[tuple[str, str]]:
    """Return the file's keys for each cross-attention, in the order of `places`. A file numbers
    cross-attentions in the order of WAYS."""
    pairs: dict[int, dict[str, str]] = {}
    for name in _strip(shapes, ATTENTIONS):
        match = KEY.fullmatch(name)
        if match is None:
            raise LoraError(f"has {shown(ATTENTIONS + name)}, which is not supported; {EXPECTED}")
        pairs.setdefault(int(match[1]), {})[match[2]] = ATTENTIONS + name
    if len(pairs) != len(places) or any(len(pair) != 2 for pair in pairs.values()):
        needed = f"{len(places)} cross-attentions here"
        raise LoraError(f"is for another model: it has keys for {len(pairs)}, {needed}")
    file_order = sorted(range(len(places)), key=lambda i: WAYS.index(places[i][0]))
    by_place = dict(zip(file_order, (pairs[number] for number in sorted(pairs)), strict=True))
    return [(by_place[i]["k"], by_place[i]["v"]) for i in range(len(places))]


def _check_shape(key: str, shape: tuple[int, ...], needed: tuple[int, int]) -> None:
    if shape == needed:
        return
    other = CONTEXT_WIDTHS.get(shape[-1]) if shape[1:] != needed[1:] else None
    model = f"for {other}" if other else "for another model"
    raise LoraError(f"is {model}: {shown(key)} has shape {shape}, expected {needed}")


def _check_projection(shapes: Shapes, context: int) -> None:
    """Check the shapes of the file's projection against diffusers' module."""
    with quiet_loading():
        module = _empty_projection(shapes)
    needed = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    renamed = {}
    for name, shape in shapes.items():
        for new_name, parts in _diffusers_names(name):
            renamed[new_name] = (shape[0] // parts, *shape[1:])
    for name, shape in needed.items():
        if renamed.get(name) != shape:
            reason = f"has {name} of shape {renamed[name]}" if name in renamed else f"lacks {name}"
            raise LoraError(f"{reason}, expected {shape}; {EXPECTED}")
    if unknown := sorted(renamed.keys() - needed.keys()):
        raise LoraError(f"has {shown(unknown[0])}, which is not supported; {EXPECTED}")
    width = next(iter(renamed["norm_out.weight" if "latents" in shapes else "norm.weight"]))
    if width != context:
        raise LoraError(f"is for another model: its tokens are {width} wide, expected {context}")


def _empty_projection(shapes: Shapes) -> Any:
    """Build diffusers' module without weights for the file's shapes."""
    from diffusers.models.embeddings import ImageProjection, IPAdapterPlusImageProjection

    with torch.device("meta"):
        if "latents" not in shapes:
            tokens_width, width = _matrix_shape(shapes, "proj.weight")
            return ImageProjection(width, tokens_width // PLAIN_TOKENS, PLAIN_TOKENS)
        layers = {int(match[1]) for name in shapes if (match := LAYER.fullmatch(name))}
        output, hidden = _matrix_shape(shapes, "proj_out.weight")
        return IPAdapterPlusImageProjection(
            embed_dims=_matrix_shape(shapes, "proj_in.weight")[1],
            output_dims=output,
            hidden_dims=hidden,
            depth=len(layers),
            heads=_matrix_shape(shapes, "layers.0.0.to_q.weight")[0] // HEAD_WIDTH,
            dim_head=HEAD_WIDTH,
            num_queries=shapes["latents"][1],
            ffn_ratio=_matrix_shape(shapes, "layers.0.1.1.weight")[0] / hidden,
        )


def _matrix_shape(shapes: Shapes, name: str) -> tuple[int, int]:
    shape = shapes.get(name, ())
    if len(shape) != 2 or not all(shape):
        raise LoraError(f"lacks a matrix {name}; {EXPECTED}")
    return shape[0], shape[1]


def _diffusers_names(name: str) -> list[tuple[str, int]]:
    """Return diffusers' names of a tensor's parts, each with the number of parts."""
    if name.startswith("proj."):
        return [(f"image_embeds.{name.removeprefix('proj.')}", 1)]
    match = LAYER.fullmatch(name)
    if match is None:
        return [(name, 1)]
    number, half, inner = match.groups()
    layer, _, kind = inner.rpartition(".")
    if f"{half}.{layer}" == JOINED:
        return [(f"layers.{number}.{each}.{kind}", 2) for each in SPLIT]
    return [(f"layers.{number}.{RESAMPLER_NAMES.get((half, layer), layer)}.{kind}", 1)]


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by diffusers' names."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        names = _diffusers_names(name)
        parts = tensor.chunk(len(names))
        renamed |= {new_name: part for (new_name, _), part in zip(names, parts, strict=True)}
    return renamed


def _find_encoder(path: Path, projection: Shapes) -> tuple[Path, int, int]:
    """Return the nearest folder with an encoder of the adapter's width, the side of the encoder's
    pictures, and the number of its weights."""
    is_plain = "latents" not in projection
    field, key = ("projection_dim", "proj") if is_plain else ("hidden_size", "proj_in")
    width = _matrix_shape(projection, f"{key}.weight")[1]
    others = []
    for folder in (path.parent, *path.parent.parents[:1]):
        for place in (folder / ENCODER, folder / SHARED_ENCODER):
            file, config = place / ENCODER_FILE, place / ENCODER_CONFIG
            if not (file.is_file() and config.is_file()):
                continue
            facts = _encoder_facts(place)
            if facts[field] != width:
                others.append(f"{place}: its {field} is {facts[field]}")
                continue
            with open_tensors(file) as tensors:
                shapes = read_shapes(tensors)
            if is_plain and ENCODER_PROJECTION not in shapes:
                others.append(f"{place}: its weights lack {ENCODER_PROJECTION}")
                continue
            side = facts["image_size"]
            if not (isinstance(side, float) and side > 0 and side.is_integer()):
                raise LoraError(f"has an encoder whose image_size is {side!r}; expected one number")
            read = (shape for name, shape in shapes.items() if not name.startswith("text_"))
            return place, int(side), sum(map(math.prod, read))
    wrong = f" ({'; '.join(others)})" if others else ""
    needed = f"a folder {ENCODER} beside it with {ENCODER_FILE} and {ENCODER_CONFIG}"
    raise LoraError(f"needs {needed}, of {field} {width}{wrong}")


def _encoder_facts(folder: Path) -> dict[str, Any]:
    """Return an encoder's config. A whole CLIP's has the encoder's entries in vision_config, but
    projection_dim outside."""
    whole = read_config(ENCODER_CONFIG, (folder / ENCODER_CONFIG).read_bytes())
    inner = whole.get("vision_config")
    return ENCODER_DEFAULTS | (inner if isinstance(inner, dict) else {}) | whole


def _strip(shapes: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes whose names begin with the prefix, by the rest of the name."""
    return {k.removeprefix(prefix): shape for k, shape in shapes.items() if k.startswith(prefix)}


def _read(file: Any, key: str) -> Tensor:
    tensor: Tensor = file.get_tensor(key).float()
    check_finite(key, tensor)
    return tensor


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.load_state_dict({"weight": weight}, assign=True)
    return layer
