"""The costs of one GPU, as a replica measures them. An H200's are measured (docs/gpus, 2026-11-27).
Another GPU's are the H200's times RATIOS.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engines.folders.profiles import buckets
from engines.folders.targets import named_target
from engines.pytorch.slots import slot_of
from sdxl.cost import CostKey, Costs
from sdxl.deepcache import plan_of
from sdxl.flight import Flight, Variant
from sdxl.params import GenerationParams
from sdxl.policy import Limits
from sdxl.specs import CHUNK, Axes

FIGURES = Path(__file__).parents[2] / "docs" / "gpus" / "h200-2026-11-27-mixed.json"
RATIOS = {"h200": (1.0, 1.0), "h100": (1.04, 1.10), "l40s": (2.95, 3.34)}
"""seconds of deep and shallow calls of 16 rows in FP8, as shares of the H200's, from `sdxl bench
floor --gpu`"""
SIDE, SCALE = 128, 8
"""side of a standard picture in latents; pixels per latent"""
LORA_SHARE, NET_SHARE = 1.04, 0.73
"""estimated time of a call with LoRAs, and of a ControlNet's call, over a deep call's
(docs/log.md)"""
LORA = Variant("lora", 2)
"""a LoRA of rank 32"""
QUEUE = 64
"""the service's default"""


@dataclass(frozen=True)
class SimulatedGpu:
    name: str
    """a key of RATIOS"""

    @property
    def standard(self) -> Flight:
        return Flight(-1, axes(1024, 1024), plan_of(GenerationParams()), rides=True)

    @cached_property
    def limits(self) -> Limits:
        rows = (1, *buckets(named_target(self.name).max_batch))
        limits = Limits(rows, rows[-1], queue=QUEUE, rides=True)
        return self.costs.knees(limits, self.standard)

    @cached_property
    def costs(self) -> Costs:
        figures = json.loads(FIGURES.read_text())["mixed sizes"]
        one_client = figures["one_client slots, interval 2"]
        cost_ratios = figures["promises slots, cost now over warm-up"]
        # Calls take longer if other pictures ran in between.
        mixed = [ratio for call, ratio in cost_ratios.items() if "shallow" in call]
        ratios = dict(zip(("deep", "shallow"), RATIOS[self.name], strict=True))
        ratios["shallow"] *= statistics.median(mixed)
        costs, call = Costs(), self.standard.call("unet_deep")
        costs.encode_s, costs.decode_s = (
            one_client[name] * ratios["deep"] for name in ("encode_s", "decode_s")
        )
        for entry, ms in figures["start slots, costs"].items():
            kind, rows = entry.split()
            seconds, bucket = ms / 1000 * ratios[kind], int(rows)
            plain = self.standard.call("unet_deep" if kind == "deep" else "unet_shallow")
            costs.ticks[CostKey(plain, bucket)] = seconds
            if kind == "deep":
                costs.ticks[CostKey(plain._replace(variant=LORA), bucket)] = seconds * LORA_SHARE
                net = call._replace(network="control_deep", net="a net")
                costs.ticks[CostKey(net, bucket)] = seconds * NET_SHARE
        return costs


def axes(width: int, height: int) -> Axes:
    """The axes of pictures that share calls in slots."""
    latent_h, latent_w = height // SCALE, width // SCALE
    slot = slot_of(latent_h, latent_w, SIDE)
    shape = (latent_h, latent_w) if slot is None else (1, slot)
    return tuple(zip(("latent_h", "latent_w", "tokens"), (*shape, CHUNK), strict=True))
