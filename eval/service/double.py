"""A double of SDXL at its full size: what its engines take, give and last, with nothing computed.

`python -m eval.service.double FOLDER [--speed 20] [--rows 4]` writes a checkpoint folder without
weights; `--model FOLDER --backend eval.service.double:load` serves, renders or benches it. Tensors
have the full size's shapes and types, pictures are noise (3 MB as a 1024² PNG), and a call lasts as
on an H200, divided by `speed`. It shows what size and time do to everything around the engines.
It cannot show what a GPU's memory, kernels or queues do, nor anything of quality.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engines.choice import EngineRequest
from onnx_export.random_weights import SDXL_1_0, write_configs
from sdxl.checkpoint import WEIGHT_NAMES
from sdxl.engine import Engine, Engines, check_inputs
from sdxl.params import InvalidParams
from sdxl.specs import SDXL_1_0 as ARCHITECTURE
from sdxl.specs import ModelSpec, latent_axes, network_specs

BACKEND = "eval.service.double:load"
FILE = "double.json"
BUCKETS = (1, 2, 4, 8, 16)
VALUES = 2**22
"""of noise, which pictures are cut from"""


@dataclass(frozen=True)
class CallTime:
    """Milliseconds of a call on an H200 at full speed; an area of 1 is 1024²."""

    call: float
    row: float
    """a row of that area"""

    def seconds(self, rows: int, area: float) -> float:
        return (self.call + self.row * rows * area) / 1000


# From a roofline of an H200 in fp8, layer by layer at the rates that cuBLASLt, Triton and cuDNN
# reach: 186 ms a deep step of 16 rows at 1024² and 11.5 a shallow one, launch gaps of 4 and 0.5
# within; 50 ms to decode a picture and half of that to encode one; 10 ms for the rest of one.
# Reasoned, not measured.
COSTS = {
    "clip_l": CallTime(0.0, 0.0),
    "clip_g": CallTime(0.0, 5.0),
    "unet_prompt": CallTime(0.0, 0.0),
    "unet_deep": CallTime(4.0, 11.4),
    "unet_shallow": CallTime(0.5, 0.69),
    "vae_decoder": CallTime(0.0, 50.0),
    "vae_encoder": CallTime(0.0, 25.0),
}


@dataclass(frozen=True)
class Settings:
    speed: float = 20.0
    """times an H200's"""
    rows: int = 4
    """of the largest call; 57 MB each, several times over"""

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise InvalidParams("speed", self.speed, "needed more than 0")
        if self.rows not in BUCKETS[1:]:
            raise InvalidParams("rows", self.rows, f"needed one of {BUCKETS[1:]}")


@dataclass
class DoubleEngine:
    """Outputs depend on a few values of each of the row's inputs, so that a swapped, stale or
    missing row shows. Calls share one device: they last one after the other."""

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
                # One value a row is all that is read of it; memory that nobody writes costs none.
                output.flatten(1)[:, 0] = torch.sin(signal * number)
            else:
                output.copy_(_beside(torch.sin(signal * number), output))

    def _draw(self, latents: Tensor, image: Tensor) -> None:
        """Values from a place that these latents decide."""
        start = int(latents.float().abs().sum() * 1000) % len(self.noise)
        flat = image.view(-1)
        while len(flat):
            part = self.noise[start : start + len(flat)]
            flat[: len(part)].copy_(part)
            flat, start = flat[len(part) :], 0


def _signal(inputs: Mapping[str, Tensor]) -> Tensor:
    """A number a row, of some values of all inputs."""
    rows = {name: tensor.view(len(tensor), -1) for name, tensor in inputs.items()}
    small = [each[:, :64].float().mean(1) for name, each in rows.items() if not _is_big(name)]
    big = [each[:, 0] for name, each in rows.items() if _is_big(name)]
    signal = torch.stack(small).sum(0)
    return (signal + torch.stack(big).float().sum(0) if big else signal) / 1000


def _is_big(name: str) -> bool:
    return name.startswith(("cache", "keys", "values"))


def _beside(values: Tensor, output: Tensor) -> Tensor:
    return values.view(-1, *[1] * (output.dim() - 1)).expand(output.shape)


def load(asked: EngineRequest) -> Engines:
    """As `--backend eval.service.double:load` names it."""
    settings = read(asked.checkpoint.folder)
    device = threading.Lock()
    generator = torch.Generator().manual_seed(0)
    noise = (2 * torch.rand(VALUES, generator=generator) - 1).half()
    specs = network_specs(ARCHITECTURE, "float16")
    engines: dict[str, Engine] = {
        name: DoubleEngine(specs[name], cost, settings.speed, device, noise)
        for name, cost in COSTS.items()
    }
    return Engines(
        ARCHITECTURE,
        engines,
        buckets=tuple(rows for rows in BUCKETS if rows <= settings.rows),
        description={"backend": BACKEND, "precision": "fp16", **asdict(settings)},
    )


def read(folder: Path) -> Settings:
    path = folder / FILE
    try:
        return Settings(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        needed = "needed a folder that `python -m eval.service.double` wrote"
        raise InvalidParams("model", str(folder), needed) from error


def write(folder: Path, settings: Settings | None = None) -> Path:
    """The folder: SDXL's configurations, the embedded model's tokenizers, no weights."""
    from safetensors.torch import save_file

    write_configs(folder, SDXL_1_0)
    for part in SDXL_1_0:
        # Something to take a digest of.
        save_file({"none": torch.zeros(1)}, folder / part / f"{WEIGHT_NAMES[part]}.safetensors")
    (folder / FILE).write_text(json.dumps(asdict(settings or Settings())))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="eval.service.double", description=__doc__)
    parser.add_argument("folder", type=Path, help="which does not exist yet")
    parser.add_argument("--speed", type=float, default=Settings.speed, help="(%(default)s)")
    parser.add_argument("--rows", type=int, default=Settings.rows, help="(%(default)s)")
    options = parser.parse_args()
    write(options.folder, Settings(options.speed, options.rows))
    print(f"sdxl serve --model {options.folder} --backend {BACKEND}")


if __name__ == "__main__":
    main()
