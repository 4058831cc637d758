"""A double of SDXL at full size: engines with SDXL's shapes and durations that compute nothing.

`write` makes a checkpoint folder without weights, for `--backend tests.serve.double:load`. Tensors
have the shapes and types of the full size, pictures are noise (3 MB as a 1024² PNG), and a call
takes the time of an H200 divided by `speed`. It tests everything around the engines at full size.
It cannot show a GPU's memory, kernels or queues, nor quality.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engines.choice import EngineRequest
from onnx_export.random_weights import SDXL_1_0, write_configs
from sdxl.checkpoint import WEIGHT_NAMES
from sdxl.engine import Engine, Engines, check_inputs
from sdxl.specs import SDXL_1_0 as ARCHITECTURE
from sdxl.specs import ModelSpec, latent_axes, network_specs

BACKEND = "tests.serve.double:load"
FILE = "double.json"
BUCKETS = (1, 2, 4)
"""the rows of calls; a row takes several times 57 MB"""
VALUES = 2**22
"""the noise values from which pictures are cut"""


@dataclass(frozen=True)
class CallTime:
    """Milliseconds of a call on an H200. An area of 1 is 1024²."""

    call: float
    row: float
    """per row of area 1"""

    def seconds(self, rows: int, area: float) -> float:
        return (self.call + self.row * rows * area) / 1000


# An estimate for an H200 in fp8, by a roofline of every layer at the rates of cuBLASLt, Triton and
# cuDNN: 186 ms for a deep step of 16 rows at 1024², 11.5 for a shallow one, gaps of 4 and 0.5
# included; 50 ms to decode a picture, half of that to encode one; 10 ms for the rest of a picture.
COSTS = {
    "clip_l": CallTime(0.0, 0.0),
    "clip_g": CallTime(0.0, 5.0),
    "unet_prompt": CallTime(0.0, 0.0),
    "unet_deep": CallTime(4.0, 11.4),
    "unet_shallow": CallTime(0.5, 0.69),
    "vae_decoder": CallTime(0.0, 50.0),
    "vae_encoder": CallTime(0.0, 25.0),
}


@dataclass
class DoubleEngine:
    """A row's outputs depend on a few values of each of its inputs, so a swapped, stale or missing
    row changes them. Calls share one device and run one after another."""

    spec: ModelSpec
    cost: CallTime
    speed: float
    device: threading.Lock
    noise: Tensor

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        axes = check_inputs(self.spec, inputs)
        rows = next(iter(outputs.values())).shape[0]
        side = ARCHITECTURE.sample_size
        if "image_h" in axes:
            axes |= latent_axes(ARCHITECTURE, axes["image_h"], axes["image_w"])
        area = axes.get("latent_h", side) * axes.get("latent_w", side) / side**2
        with self.device:
            until_s = time.perf_counter() + self.cost.seconds(rows, area) / self.speed
            self._fill(inputs, outputs)
            time.sleep(max(until_s - time.perf_counter(), 0))

    def _fill(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        if self.spec.name == "vae_decoder":
            for latents, image in zip(inputs["latents"], outputs["image"], strict=True):
                self._draw(latents, image)
            return
        signal = _signal(inputs)
        for number, (name, output) in enumerate(outputs.items(), 1):
            if name == "noise":
                output.copy_(0.1 * inputs["sample"] + 0.01 * _beside(signal, output))
            elif _is_big(name):
                # `_signal` reads one value a row; untouched memory is never allocated.
                output.flatten(1)[:, 0] = torch.sin(signal * number)
            else:
                output.copy_(_beside(torch.sin(signal * number), output))

    def _draw(self, latents: Tensor, image: Tensor) -> None:
        """Copy noise from an offset that the latents determine."""
        start = int(latents.float().abs().sum() * 1000) % len(self.noise)
        flat = image.view(-1)
        while len(flat):
            part = self.noise[start : start + len(flat)]
            flat[: len(part)].copy_(part)
            flat, start = flat[len(part) :], 0


def _signal(inputs: Mapping[str, Tensor]) -> Tensor:
    """One number a row, from some values of every input."""
    rows = {name: tensor.view(len(tensor), -1) for name, tensor in inputs.items()}
    small = [each[:, :64].float().mean(1) for name, each in rows.items() if not _is_big(name)]
    big = [each[:, 0] for name, each in rows.items() if _is_big(name)]
    signal = torch.stack(small).sum(0)
    return (signal + torch.stack(big).float().sum(0) if big else signal) / 1000


def _is_big(name: str) -> bool:
    return name.startswith(("cache", "keys", "values"))


def _beside(values: Tensor, output: Tensor) -> Tensor:
    return values.view(-1, *[1] * (output.dim() - 1)).expand(output.shape)


def load(request: EngineRequest) -> Engines:
    """The entry point for `--backend tests.serve.double:load`."""
    speed = json.loads((request.checkpoint.folder / FILE).read_text())
    device = threading.Lock()
    generator = torch.Generator().manual_seed(0)
    noise = (2 * torch.rand(VALUES, generator=generator) - 1).half()
    specs = network_specs(ARCHITECTURE, "float16")
    engines: dict[str, Engine] = {
        name: DoubleEngine(specs[name], cost, speed, device, noise) for name, cost in COSTS.items()
    }
    return Engines(
        ARCHITECTURE,
        engines,
        buckets=BUCKETS,
        description={"backend": BACKEND, "precision": "fp16", "speed": speed},
    )


def write(folder: Path, speed: float) -> Path:
    """Write the folder: SDXL's configurations and the embedded model's tokenizers, no weights.
    `speed`: a multiple of an H200's."""
    from safetensors.torch import save_file

    write_configs(folder, SDXL_1_0)
    for part in SDXL_1_0:
        # A checkpoint's digest needs weight files.
        save_file({"none": torch.zeros(1)}, folder / part / f"{WEIGHT_NAMES[part]}.safetensors")
    (folder / FILE).write_text(json.dumps(speed))
    return folder
