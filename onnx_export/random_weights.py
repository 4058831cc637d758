"""Writes a checkpoint of SDXL's shape with random weights, to measure the costs of the full size:
`python -m onnx_export.random_weights FOLDER`.

Equal configurations give equal bytes on the same kind of device. Tensors are drawn and written one
at a time to save memory. It knows nothing of exports.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.folders.publishing import disk_errors
from sdxl.checkpoint import MINI, WEIGHT_NAMES
from sdxl.checkpoint_checks import shapes_of_network
from sdxl.single_file.configs import SDXL_1_0 as SDXL_1_0

Configs = Mapping[str, Mapping[str, Any]]

SHARED_WITH_MINI = ("scheduler", "tokenizer", "tokenizer_2")
END_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_checkpoint(folder: Path, configs: Configs = SDXL_1_0, device: str = "cpu") -> None:
    """Write a checkpoint in diffusers layout, whole or not at all, with the embedded model's
    scheduler and tokenizers. A GPU draws the full size in seconds."""
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    with disk_errors(folder):
        whole = {part: {**config, **_end_tokens(part)} for part, config in configs.items()}
        write_configs(making, whole)
        for part, config in whole.items():
            path = making / part / f"{WEIGHT_NAMES[part]}.safetensors"
            _write_weights(shapes_of_network(part, config), path, device)
        making.rename(folder)


def write_configs(folder: Path, configs: Configs) -> None:
    """Write a checkpoint's folder without weights."""
    folder.mkdir(parents=True)
    for name in SHARED_WITH_MINI:
        shutil.copytree(MINI / name, folder / name)
    shutil.copyfile(MINI / "model_index.json", folder / "model_index.json")
    for part, config in configs.items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config, indent=1))


def _end_tokens(part: str) -> dict[str, Any]:
    """Return the ids of the end tokens in the embedded model's vocabulary."""
    if not part.startswith("text_encoder"):
        return {}
    config = json.loads((MINI / part / "config.json").read_text(encoding="utf-8"))
    return {name: config[name] for name in END_TOKENS}


def _write_weights(shapes: Mapping[str, tuple[int, ...]], path: Path, device: str) -> None:
    """Write a safetensors file in float16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in sorted(shapes.items()):
            file.write(_draw(name, shape, device).cpu().numpy().tobytes())


def _draw(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Draw a tensor that keeps the scale of activations: weights by fan-in, norms 1, biases 0."""
    if len(shape) < 2:
        return torch.full(shape, 1.0 if name.endswith("weight") else 0.0, dtype=torch.float16)
    bound = math.sqrt(3 / math.prod(shape[1:]))
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator).half()


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
