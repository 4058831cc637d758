"""Checks a downloaded network before a library builds it: building must not run foreign code, nor
take more memory than the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REFUSED = (
    *("attn_implementation", "_attn_implementation", "experts_implementation", "auto_map"),
    *("quantization_config", "text_config"),
)
"""Keys of a config.json that make transformers fetch code or build another network."""
ADAPTER = "adapter_config.json"
MAX_LAYERS, MAX_SIZE = 256, 2**20
"""limits of a network's layers and of every other number in a config"""
SPARE = 2
"""A network may have this many times the numbers of its weights; loading names missing weights."""


class CheckpointError(RuntimeError):
    """A model that cannot be loaded, with the reason."""


def check_network(folder: Path, config: Mapping[str, Any], weights: Sequence[Path]) -> None:
    """Raise CheckpointError for a network that is unsafe to build."""
    path = folder / "config.json"
    for key in REFUSED:
        if config.get(key) is not None:
            raise CheckpointError(f"{path}: has {key}; expected a plain network without it")
    if (folder / ADAPTER).exists():
        raise CheckpointError(f"{folder / ADAPTER}: names another model; expected whole weights")
    _check_sizes(path, config)
    held = sum(map(count_numbers, weights))
    with foreign_errors(folder):
        needed = sum(map(math.prod, shapes_of_network(folder.name, config).values()))
    if needed > SPARE * held:
        raise CheckpointError(
            f"{path}: describes a network of {needed} numbers, its weights hold {held}"
        )


def shapes_of_network(part: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the network's tensors by name, without allocating them."""
    import torch

    kind = network_class(part)
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            model = kind.from_config(dict(config))
        else:
            model = kind(kind.config_class(**config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def count_numbers(path: Path) -> int:
    """Count the numbers in a safetensors file by its header. A truncated file is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error


def network_class(part: str) -> Any:
    if part == "unet":
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        return UNet2DConditionModel
    if part == "vae":
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        return AutoencoderKL
    import transformers

    has_projection = part == "text_encoder_2"
    return (
        transformers.CLIPTextModelWithProjection if has_projection else transformers.CLIPTextModel
    )


@contextmanager
def foreign_errors(place: Path) -> Iterator[None]:
    """Raise CheckpointError for any exception of a library that reads a broken file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        is_named = line.startswith(str(place))
        message = line if is_named else f"{place}: {type(error).__name__}: {line}"
        raise CheckpointError(message) from error


def _check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a too large whole number, with which time and memory would grow."""
    left: list[tuple[str, object]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, inner) for inner in value]
        elif isinstance(value, int):
            most = MAX_LAYERS if "layers" in name else MAX_SIZE
            if abs(value) > most:
                raise CheckpointError(f"{path}: {name} is above {most}, which no SDXL needs")
