"""Reads IP-Adapters of SDXL: plain ones, which project a picture's embedding, and those with a
resampler (Plus). CLIP's encoder lies in a folder beside the file.

A file is used wholly or not at all. Its kind, names, shapes and types are checked in its header;
weights are read later. Of the model only its UNet's config is known.
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

from engines.lora_weights import LoraError, Shapes, open_tensors, read_config, shown
from sdxl.catalogue import ENCODER
from sdxl.checkpoint import Checkpoint, quiet_loading
from sdxl.image_prompts import COMPOSITION, STYLE, USUAL
from sdxl.parameter import MAX_ATTACHMENTS
from sdxl.single_file.recognition import CONTEXT_WIDTHS, FLOATS
from sdxl.specs import IMAGE_TOKENS

EXPECTED = "expected an IP-Adapter of SDXL"
PROJECTION, ATTENTIONS = "image_proj.", "ip_adapter."
"""beginnings of the keys"""
OTHER_KINDS = {
    f"{PROJECTION}perceiver_resampler.": "a FaceID adapter, which reads faces",
    f"{PROJECTION}proj.0.": "a FaceID adapter, or one for all tokens of Stable Diffusion 1",
}
"""Adapters that are not supported, by the beginnings of their keys."""
PLAIN_TOKENS = 4
HEAD_WIDTH = 64
"""of resamplers"""
MOST_TOKENS = IMAGE_TOKENS[-1] // MAX_ATTACHMENTS
SHARED_ENCODER = Path("models") / ENCODER
"""where h94/IP-Adapter has the encoder that adapters of several models read"""
ENCODER_FILE, ENCODER_CONFIG = "model.safetensors", "config.json"
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
"""The transformers that InstantStyle (arXiv:2404.02733) found to read style and composition: way,
block and number"""
WAYS = ("down", "up", "mid")
"""in the order in which files number cross-attentions"""


@dataclass(frozen=True)
class ImageFile:
    """An IP-Adapter whose header fits the model."""

    path: Path
    encoder: Path
    """the folder of CLIP's encoder"""
    tokens: int
    """of one picture"""
    side: int
    """of the pictures that the encoder reads"""
    numbers: int
    """in the adapter and its encoder"""
    layers: Mapping[str, Sequence[int]]
    """the cross-attentions of each mode"""
    _keys: Sequence[tuple[str, str]]
    """of the keys' and values' weights, in the order of the UNet's cross-attentions"""

    def network(self, vision: nn.Module) -> nn.Module:
        """Build the network with the file's weights in float32; raise LoraError if they are not
        finite."""
        from sdxl.networks.image_prompt import ImagePromptNetwork

        with open_tensors(self.path) as file:
            weights = [[_read(file, key) for key in pair] for pair in self._keys]
            names = [key for key in file.keys() if key.startswith(PROJECTION)]  # noqa: SIM118
            tensors = {key.removeprefix(PROJECTION): _read(file, key) for key in names}
        projection = _projection({name: tuple(each.shape) for name, each in tensors.items()})
        projection.load_state_dict(_by_their_names(tensors), assign=True)
        sides = (nn.ModuleList(map(_linear, side)) for side in zip(*weights, strict=True))
        return ImagePromptNetwork(vision, projection, *sides).eval().requires_grad_(False)

    def vision(self) -> nn.Module:
        """Load CLIP's encoder in float32."""
        from transformers import CLIPVisionModelWithProjection

        with quiet_loading():
            model: Any = CLIPVisionModelWithProjection.from_pretrained(
                str(self.encoder),
                use_safetensors=True,
                local_files_only=True,
                torch_dtype=torch.float32,
            )
        found: nn.Module = model.eval().requires_grad_(False)
        return found


def read_image_adapter(path: Path, checkpoint: Checkpoint) -> ImageFile:
    """Read the header of a file for a model; raise LoraError if it does not fit."""
    with open_tensors(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        shapes = {key: tuple(each.get_shape()) for key, each in slices.items()}
        types = {key: each.get_dtype() for key, each in slices.items()}
    _check_kind(shapes, types)
    places = list(places_of(checkpoint.config("unet")))
    keys = _keys_of(shapes, places)
    widths, context = checkpoint.arch.attention_widths, checkpoint.arch.context_width
    for pair, width in zip(keys, widths, strict=True):
        for key in pair:
            _check_shape(key, shapes[key], (width, context))
    own = _without(shapes, PROJECTION)
    tokens = own["latents"][1] if "latents" in own else PLAIN_TOKENS
    if not 1 <= tokens <= MOST_TOKENS:
        raise LoraError(f"has {tokens} tokens for a picture; expected at most {MOST_TOKENS}")
    _check_projection(own, context)
    encoder, side, more = _find_encoder(path, own)
    layers = {mode: [i for i, each in enumerate(places) if each == p] for mode, p in PLACES.items()}
    layers[USUAL] = list(range(len(places)))
    numbers = more + sum(map(math.prod, shapes.values()))
    return ImageFile(path, encoder, tokens, side, numbers, layers, keys)


def places_of(unet: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield way, block and transformer of each cross-attention in the order they run."""
    depths, layers = unet["transformer_layers_per_block"], unet["layers_per_block"]
    levels = len(unet["block_out_channels"])
    depths = [depths] * levels if isinstance(depths, int) else depths
    for block in range(1, levels):
        yield from (("down", block, i) for i in range(layers) for _ in range(depths[block]))
    yield from (("mid", 0, 0) for _ in range(depths[-1]))
    for block, depth in enumerate(reversed(depths[1:])):
        yield from (("up", block, i) for i in range(layers + 1) for _ in range(depth))


def _check_kind(shapes: Shapes, types: Mapping[str, str]) -> None:
    if not all(any(key.startswith(p) for key in shapes) for p in (PROJECTION, ATTENTIONS)):
        raise LoraError(f"is nothing that is known; {EXPECTED}")
    for start, kind in OTHER_KINDS.items():
        if any(key.startswith(start) for key in shapes):
            raise LoraError(f"is {kind}; {EXPECTED}")
    for key, dtype in types.items():
        if dtype not in FLOATS:
            raise LoraError(f"has {shown(key)} in {dtype}; expected one of {', '.join(FLOATS)}")


def _keys_of(shapes: Shapes, places: Sequence[tuple[str, int, int]]) -> list[tuple[str, str]]:
    """Return the keys of each cross-attention. A file numbers them in the order of WAYS."""
    found: dict[int, dict[str, str]] = {}
    for name in _without(shapes, ATTENTIONS):
        match = KEY.fullmatch(name)
        if match is None:
            raise LoraError(f"has {shown(ATTENTIONS + name)}, which is not supported; {EXPECTED}")
        found.setdefault(int(match[1]), {})[match[2]] = ATTENTIONS + name
    if len(found) != len(places) or any(len(pair) != 2 for pair in found.values()):
        needed = f"{len(places)} cross-attentions here"
        raise LoraError(f"is for another model: it has keys for {len(found)}, {needed}")
    in_file = sorted(range(len(places)), key=lambda i: WAYS.index(places[i][0]))
    pairs = [found[number] for number in sorted(found)]
    by_place = dict(zip(in_file, pairs, strict=True))
    return [(by_place[i]["k"], by_place[i]["v"]) for i in range(len(places))]


def _check_shape(key: str, shape: tuple[int, ...], needed: tuple[int, int]) -> None:
    if shape == needed:
        return
    other = CONTEXT_WIDTHS.get(shape[-1]) if shape[1:] != needed[1:] else None
    model = f"for {other}" if other else "for another model"
    raise LoraError(f"is {model}: {shown(key)} has shape {shape}, expected {needed}")


def _check_projection(own: Shapes, context: int) -> None:
    with quiet_loading():
        module = _projection(own)
    needed = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {}
    for name, shape in own.items():
        for theirs, parts in _names(name):
            found[theirs] = (shape[0] // parts, *shape[1:])
    for name, shape in needed.items():
        if found.get(name) != shape:
            seen = f"has {name} of shape {found[name]}" if name in found else f"lacks {name}"
            raise LoraError(f"{seen}, expected {shape}; {EXPECTED}")
    if strange := sorted(found.keys() - needed.keys()):
        raise LoraError(f"has {shown(strange[0])}, which is not supported; {EXPECTED}")
    width = next(iter(found["norm_out.weight" if "latents" in own else "norm.weight"]))
    if width != context:
        raise LoraError(f"is for another model: its tokens are {width} wide, expected {context}")


def _projection(own: Shapes) -> Any:
    """Build diffusers' module without its weights; `own` are the file's shapes."""
    from diffusers.models.embeddings import ImageProjection, IPAdapterPlusImageProjection

    with torch.device("meta"):
        if "latents" not in own:
            tokens_width, width = _dims(own, "proj.weight")
            return ImageProjection(width, tokens_width // PLAIN_TOKENS, PLAIN_TOKENS)
        layers = {int(match[1]) for name in own if (match := LAYER.fullmatch(name))}
        latents = own["latents"]
        output, hidden = _dims(own, "proj_out.weight")
        return IPAdapterPlusImageProjection(
            embed_dims=_dims(own, "proj_in.weight")[1],
            output_dims=output,
            hidden_dims=hidden,
            depth=len(layers),
            heads=_dims(own, "layers.0.0.to_q.weight")[0] // HEAD_WIDTH,
            dim_head=HEAD_WIDTH,
            num_queries=latents[1],
            ffn_ratio=_dims(own, "layers.0.1.1.weight")[0] / hidden,
        )


def _dims(own: Shapes, name: str) -> tuple[int, int]:
    shape = own.get(name, ())
    if len(shape) != 2 or not all(shape):
        raise LoraError(f"lacks a matrix {name}; {EXPECTED}")
    return shape[0], shape[1]


def _names(name: str) -> list[tuple[str, int]]:
    """Return diffusers' names of a tensor, each with the number of parts that it is split into."""
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


def _by_their_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        names = _names(name)
        parts = tensor.chunk(len(names))
        made |= {theirs: part for (theirs, _), part in zip(names, parts, strict=True)}
    return made


def _find_encoder(path: Path, own: Shapes) -> tuple[Path, int, int]:
    """Return the nearest folder of an encoder that the adapter reads, the side of its pictures, and
    how many numbers it holds."""
    is_plain = "latents" not in own
    field, width = "projection_dim" if is_plain else "hidden_size", 0
    width = _dims(own, "proj.weight" if is_plain else "proj_in.weight")[1]
    seen = []
    for folder in (path.parent, *path.parent.parents[:1]):
        for place in (folder / ENCODER, folder / SHARED_ENCODER):
            file, config = place / ENCODER_FILE, place / ENCODER_CONFIG
            if not (file.is_file() and config.is_file()):
                continue
            facts = read_config(ENCODER_CONFIG, config.read_bytes())
            if facts.get(field) != width:
                seen.append(f"{place}: its {field} is {facts.get(field)}")
                continue
            with open_tensors(file) as tensors:
                shapes = [tensors.get_slice(key).get_shape() for key in tensors.keys()]  # noqa: SIM118
            return place, int(facts["image_size"]), sum(map(math.prod, shapes))
    found = f" ({'; '.join(seen)})" if seen else ""
    needed = f"a folder {ENCODER} beside it with {ENCODER_FILE} and {ENCODER_CONFIG}"
    raise LoraError(f"needs {needed}, of {field} {width}{found}")


def _without(shapes: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    return {k.removeprefix(prefix): shape for k, shape in shapes.items() if k.startswith(prefix)}


def _read(file: Any, key: str) -> Tensor:
    found: Tensor = file.get_tensor(key).float()
    if not bool(torch.isfinite(found).all()):
        raise LoraError(f"has numbers in {key} that are not finite")
    return found


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.load_state_dict({"weight": weight}, assign=True)
    return layer
