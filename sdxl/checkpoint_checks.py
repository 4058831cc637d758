"""What a stranger's network is checked for before a library builds it: nobody else's code, and no
size that its weights do not have.

It does not know where a checkpoint came from, nor what its networks compute.
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
"""Keys of a config.json by which transformers would fetch other code, or build another network than
the one described beside them."""
ADAPTER = "adapter_config.json"
MAX_LAYERS, MAX_SIZE = 256, 2**20
"""of one network, and of anything else that a config counts"""
SPARE = 2
"""A network may have so many times the numbers that its weights hold: what is missing is named
when it is loaded."""


class CheckpointError(RuntimeError):
    """A model that cannot be loaded: what was looked for, and what was found."""


def check_network(folder: Path, config: Mapping[str, Any], weights: Sequence[Path]) -> None:
    """That building this network runs nobody else's code, and takes the memory of its weights."""
    path = folder / "config.json"
    for key in REFUSED:
        if config.get(key) is not None:
            raise CheckpointError(f"{path}: has {key}; expected a plain network without it")
    if (folder / ADAPTER).exists():
        raise CheckpointError(f"{folder / ADAPTER}: names another model; expected whole weights")
    _check_sizes(path, config)
    held = sum(map(count_numbers, weights))
    with foreign_errors(folder):
        needed = numbers_of_network(folder.name, config)
    if needed > SPARE * held:
        raise CheckpointError(
            f"{path}: describes a network of {needed} numbers, its weights hold {held}"
        )


def numbers_of_network(part: str, config: Mapping[str, Any]) -> int:
    """How many numbers such a network has."""
    return sum(map(math.prod, shapes_of_network(part, config).values()))


def shapes_of_network(part: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor by its name, found without memory for them."""
    import torch

    kind = network_class(part)
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            model = kind.from_config(dict(config))
        else:
            model = kind(kind.config_class(**config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def count_numbers(path: Path) -> int:
    """Those of a safetensors file. Reads its header and length: a truncated download is refused
    before anything is built."""
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
    """A library that reads a broken file raises anything; all of it is that file's fault."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        is_named = line.startswith(str(place))
        said = line if is_named else f"{place}: {type(error).__name__}: {line}"
        raise CheckpointError(said) from error


def _check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Every whole number, wherever it stands: time and memory grow with each."""
    left: list[tuple[str, object]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, inner) for inner in value]
        elif isinstance(value, int) and abs(value) > (most := _most(name)):
            raise CheckpointError(f"{path}: {name} is above {most}, which no SDXL needs")


def _most(name: str) -> int:
    return MAX_LAYERS if "layers" in name else MAX_SIZE
