"""To size a deployment: the memory of an image in flight, and the measured cost of UNet calls.

sdxl bench sizing [--side 1024] [--dtype float16] [--url http://127.0.0.1:8000]

Memory follows from the tensors' specs. With a URL, the costs of UNet calls come from /metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from eval.service.client import KEY_VARIABLE, metrics_page
from sdxl.arguments import Parser, add_option
from sdxl.specs import CHUNK, SDXL_1_0, Architecture, TensorSpec, network_specs

GUIDED = 2
"""rows of an image with guidance"""
MB = 1e6


def image_bytes(arch: Architecture, side: int, dtype: str) -> dict[str, int]:
    """The bytes of one guided image in flight."""
    latent = side // arch.vae_scale
    axes = {"rows": GUIDED, "latent_h": latent, "latent_w": latent, "tokens": CHUNK}
    specs = network_specs(arch, dtype)
    deep, text = specs["unet_deep"], specs["unet_prompt"].outputs
    cache = deep.outputs[1:]
    latents = 2 * arch.latent_channels * latent * latent * 4
    return {
        "DeepCache's features": total(cache, axes),
        "keys, values of text": total(text, axes),
        "latents and estimate": latents,
    }


def total(tensors: Sequence[TensorSpec], axes: dict[str, int]) -> int:
    return sum(math.prod(t.shape(axes)) * np.dtype(t.dtype).itemsize for t in tensors)


def tick_costs(page: str) -> dict[tuple[str, int], float]:
    """Mean seconds of a UNet call by network and rows, from a page of metrics."""
    seconds: dict[tuple[str, int], float] = {}
    calls: dict[tuple[str, int], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals = {"sdxl_tick_seconds_sum": seconds, "sdxl_tick_seconds_count": calls}
            if sample.name in totals:
                key = sample.labels["network"], int(sample.labels["bucket"])
                total = totals[sample.name]
                total[key] = total.get(key, 0.0) + sample.value
    return {key: seconds[key] / count for key, count in calls.items() if count}


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="sdxl bench sizing", description=__doc__)
    add = partial(add_option, parser)
    add("--side", 1024, "side of the image, in pixels")
    add("--dtype", "float16", "of the tensors", choices=["float16", "float32"])
    add("--url", None, "of a running service, to print its measured costs")
    add("--key", "", f"the service's API key (default: {KEY_VARIABLE})")
    options = parser.parse_args(argv)
    parts = image_bytes(SDXL_1_0, options.side, options.dtype)
    print(f"SDXL, an image of {options.side}×{options.side} in flight, {options.dtype}, guided:")
    for name, size in [*parts.items(), ("together", sum(parts.values()))]:
        print(f"  {name:<22}{size / MB:>8.1f} MB")
    if options.url:
        print_costs(tick_costs(metrics_page(options.url, options.key)))
    return 0


def print_costs(costs: dict[tuple[str, int], float]) -> None:
    print("\nUNet calls, mean since the service started:")
    print(f"  {'network':<14}{'rows':>6}{'ms':>9}{'ms a row':>10}")
    for (network, rows), seconds in sorted(costs.items()):
        print(f"  {network:<14}{rows:>6}{1000 * seconds:>9.2f}{1000 * seconds / rows:>10.2f}")
