"""Reads the low-rank weights of LoRA files in the layouts of kohya, diffusers and PEFT.

A file is used completely or refused: an unknown key is an error. Names, shapes and types are
checked in the file's header before any weight is read. Of the model, only the names and shapes of
its layers are needed.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdxl.catalogue import PEFT_CONFIG, PEFT_FILE, PEFT_PREFIX
from sdxl.single_file.recognition import FLOATS

MAX_RANK = 128
PREFIXES = {
    "lora_unet_": "unet",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "unet_": "unet",
    "text_encoder_2_": "text_encoder_2",
    "text_encoder_": "text_encoder",
    "text_encoders_clip_l_transformer_": "text_encoder",
    "text_encoders_clip_g_transformer_": "text_encoder_2",
    "clip_l_": "text_encoder",
    "clip_g_": "text_encoder_2",
    "diffusion_model_": "unet",
    "model_diffusion_model_": "unet",
    PEFT_PREFIX.replace(".", "_"): "unet",
    "": "unet",
}
"""beginnings of keys, with underscores for dots, and the part of the model for each"""
MATRIX = re.compile(r"[._]lora(?:_linear_layer)?[._](down|up|A|B)(?:\.default(?:_\d+)?)?\.weight")
SIDES = {"down": "down", "A": "down", "up": "up", "B": "up"}
ALPHA = ".alpha"
ALPHA_TYPES = (*FLOATS, "F64", "I64", "I32")
METADATA = "lora_adapter_metadata"
"""PEFT's configuration in a file of diffusers"""
OTHER_KINDS = {
    "dora_scale": "a DoRA",
    "lora_magnitude_vector": "a DoRA",
    "hada_": "a LoHa",
    "lokr_": "a LoKr",
    "oft_": "an OFT",
    "lora_mid": "a Tucker decomposition",
    r"\.diff(?:_b)?$": "a file of full weights",
    r"^bundle_emb\.": "a LoRA with embeddings in it",
}
"""adapters that are not supported, by patterns of their keys"""
PLACE = re.compile(
    r"unet\.(?P<way>down|mid|up)_blocks?(\.(?P<block>\d+))?"
    r"\.(?P<kind>resnets|attentions|(down|up)samplers)\.(?P<index>\d+)\.(?P<inner>.+)"
)
STABILITY_NAMES = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
"""Stability AI's names of layers, used in kohya's layout, by diffusers' names"""
Shapes = Mapping[str, tuple[int, ...]]


class LoraError(RuntimeError):
    """One line that says what is wrong with a file. The caller names the file."""


@dataclass(frozen=True)
class LowRank:
    """A LoRA's addition to one layer's weight: `up` times `down`."""

    down: Tensor
    """[rank, inputs × kernel], float32"""
    up: Tensor
    """[outputs, rank], float32, multiplied by alpha / rank"""


def read_lora(path: Path, layers: Shapes) -> dict[str, LowRank]:
    """Read a file for a model whose layers have weights of these shapes; raise LoraError if it does
    not fit."""
    with open_tensors(path) as file:
        keys = _by_layer(file.keys(), layers)
        configs = _configs(path, file)
        for layer, sides in keys.items():
            _check(layer, sides, {side: file.get_slice(key) for side, key in sides.items()}, layers)
        changes = {}
        for layer, sides in keys.items():
            tensors = {side: file.get_tensor(key) for side, key in sides.items()}
            alpha = float(tensors["alpha"]) if "alpha" in tensors else _alpha(layer, configs)
            strength = 1.0 if alpha is None else alpha / len(tensors["down"])
            down, up = (tensors[side].float().flatten(1) for side in ("down", "up"))
            changes[layer] = LowRank(down, up * strength)
            check_finite(layer, down, changes[layer].up)
        return changes


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        line = " ".join(str(error).replace(str(path), path.name).split())[:200]
        raise LoraError(f"is not a whole safetensors file ({line})") from error


def read_shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def check_types(file: Any) -> None:
    for key in file.keys():  # noqa: SIM118
        if (dtype := file.get_slice(key).get_dtype()) not in FLOATS:
            raise LoraError(f"has {shown(key)} in {dtype}; expected one of {', '.join(FLOATS)}")


def check_finite(name: str, *tensors: Tensor) -> None:
    if not all(bool(torch.isfinite(each).all()) for each in tensors):
        raise LoraError(f"has numbers in {name} that are not finite")


def _by_layer(keys: Iterable[str], layers: Shapes) -> dict[str, dict[str, str]]:
    """Return the keys of each layer's `down`, `up` and `alpha`."""
    names = dict(_names(layers))
    by_layer: dict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        flat, side = _parse_key(key)
        layer = names.get(flat)
        if layer is None:
            raise LoraError(f"is for another model: no layer here for {shown(key)}")
        if side in by_layer[layer]:
            raise LoraError(f"has {shown(key)} and {shown(by_layer[layer][side])} for one matrix")
        by_layer[layer][side] = key
    if not by_layer:
        raise LoraError("has nothing in it; expected a LoRA or LoCon")
    return by_layer


def _parse_key(key: str) -> tuple[tuple[str, str], str]:
    """Return the part and the layer of a key, with underscores for dots, and the key's side: down,
    up or alpha."""
    for pattern, kind in OTHER_KINDS.items():
        if re.search(pattern, key):
            raise LoraError(
                f"is {kind}, which is not supported ({shown(key)}); expected a LoRA or LoCon"
            )
    if key.endswith(ALPHA):
        name, side = key.removesuffix(ALPHA), "alpha"
    elif (match := MATRIX.search(key)) and match.end() == len(key):
        name, side = key[: match.start()], SIDES[match[1]]
    else:
        raise LoraError(f"has the key {shown(key)}; expected names of LoRA matrices or alphas")
    flat = name.replace(".", "_").replace("_processor_", "_")
    prefix = next(each for each in PREFIXES if flat.startswith(each))
    return (PREFIXES[prefix], flat.removeprefix(prefix)), side


def shown(key: str) -> str:
    return repr(key[:100])


def _names(layers: Shapes) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield every name that a file may have for a layer, with underscores for dots, and the
    layer."""
    places = {layer: match for layer in layers if (match := PLACE.fullmatch(layer))}
    depth = max((1 + int(m["index"]) for m in places.values() if m["way"] == "down"), default=0)
    for layer in layers:
        part, _, name = layer.partition(".")
        bare = name.removeprefix("text_model.")
        older = re.sub(r"self_attn\.(\w+)_proj", r"self_attn.to_\1", bare)
        names = {bare, f"text_model.{bare}", f"text_model.{older}"}
        if part == "unet" and layer in places:
            names = {name, _stability_place(places[layer], depth, layers)}
        elif part == "unet":
            names = {name, STABILITY_NAMES.get(name, name)}
        for flat in {each.replace(".", "_") for each in names}:
            yield (part, flat), layer
            yield (part, flat.removesuffix("_0")), layer


def _stability_place(place: re.Match[str], depth: int, layers: Shapes) -> str:
    """Return a layer's name in Stability AI's checkpoints. Their UNet numbers the `depth` blocks of
    a level and then its sampler."""
    way, block, kind, index, inner = place.group("way", "block", "kind", "index", "inner")
    inner, column = STABILITY_NAMES.get(inner, inner), int(kind == "attentions")
    if way == "mid":
        return f"middle_block.{column or 2 * int(index)}.{inner}"
    number = int(block) * (depth + 1) + (depth if "samplers" in kind else int(index))
    if way == "down":
        inner = "op" if kind == "downsamplers" else inner
        return f"input_blocks.{number + 1}.{column}.{inner}"
    if kind == "upsamplers":
        column = 2 if any(each.startswith(f"unet.up_blocks.{block}.a") for each in layers) else 1
    return f"output_blocks.{number}.{column}.{inner}"


def _check(layer: str, keys: Mapping[str, str], slices: Mapping[str, Any], layers: Shapes) -> None:
    """Check the shapes and types of one layer's tensors in the header."""
    for side in ("down", "up"):
        if side not in slices:
            raise LoraError(f"has no {side} matrix for {layer}")
    for side, each in slices.items():
        types = ALPHA_TYPES if side == "alpha" else FLOATS
        if each.get_dtype() not in types:
            expected = f"expected one of {', '.join(types)}"
            raise LoraError(f"has {shown(keys[side])} in {each.get_dtype()}; {expected}")
    down, up = (_without_ones(slices[side].get_shape()) for side in ("down", "up"))
    needed = _without_ones(layers[layer])
    if len(down) < 2 or len(up) != 2 or (up[0], *down[1:]) != needed:
        raise LoraError(
            f"is for another model: its matrices for {layer} have the shapes {down} and {up}, "
            f"expected (rank, {', '.join(map(str, needed[1:]))}) and ({needed[0]}, rank)"
        )
    rank = down[0]
    if rank != up[1] or not 1 <= rank <= MAX_RANK:
        ranks = f"{rank}" if rank == up[1] else f"{rank} and {up[1]}"
        raise LoraError(f"has rank {ranks} in {layer}; expected one of 1 to {MAX_RANK}")
    if "alpha" in slices and math.prod(slices["alpha"].get_shape()) != 1:
        raise LoraError(f"has more than one number in {shown(keys['alpha'])}")


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape without a kernel of 1 × 1."""
    return tuple(shape[:2]) if set(shape[2:]) == {1} else tuple(shape)


def _configs(path: Path, file: Any) -> dict[str, dict[str, Any]]:
    """Return PEFT's configuration of each part. diffusers stores it in the file, PEFT beside the
    file."""
    if text := (file.metadata() or {}).get(METADATA):
        whole = read_config(METADATA, text)
        configs = {
            part: {
                k.removeprefix(f"{part}."): v for k, v in whole.items() if k.startswith(f"{part}.")
            }
            for part in {*PREFIXES.values()}
        }
        return {part: config for part, config in configs.items() if config}
    if not any(key.startswith(PEFT_PREFIX) for key in file.keys()):  # noqa: SIM118
        return {}
    beside = path.with_name(PEFT_CONFIG)
    if path.name != PEFT_FILE or not beside.is_file():
        raise LoraError(f"is of PEFT; expected {PEFT_FILE}, and {PEFT_CONFIG} beside it")
    return {"unet": read_config(PEFT_CONFIG, beside.read_bytes())}


def read_config(name: str, text: str | bytes) -> dict[str, Any]:
    try:
        config = json.loads(text, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise LoraError(f"has an unreadable {name} ({error})") from error
    if not isinstance(config, dict):
        raise LoraError(f"has no object in {name}")
    return config


def _alpha(layer: str, configs: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return a layer's alpha from PEFT's configuration; None, which means the rank, if there is
    no configuration."""
    part, _, name = layer.replace(".text_model.", ".").partition(".")
    if part not in configs:
        return None
    config = configs[part]
    if used := [key for key, value in config.items() if key.startswith("use_") and value]:
        raise LoraError(f"has {used[0]}, which is not supported; expected a LoRA or LoCon")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise LoraError("has an alpha_pattern that is no object")
    alpha = config.get("lora_alpha")
    for pattern, value in patterns.items():
        matched = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if re.search(r"[^\w.]", matched):
            raise LoraError(f"has {shown(pattern)} in alpha_pattern; expected names of layers")
        if f".{name}".endswith("." + matched.removeprefix("text_model.")):
            alpha = value
            break
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise LoraError(f"has the alpha {alpha!r} for {layer}; expected a number")
    return alpha
