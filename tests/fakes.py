"""Engines that cost nothing: each output is a cheap function of its row's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sdxl.adapters import Adapters, Use
from sdxl.conditioning import Conditioning
from sdxl.engine import Engines, check_inputs
from sdxl.flight import PLAIN, Variant
from sdxl.specs import SDXL_1_0, Architecture, Axes, ModelSpec, network_specs

ARCH = replace(
    SDXL_1_0,
    stem_channels=2,
    cache_channels=3,
    embedding_width=6,
    attention_widths=(3, 4),
    clip_l_width=3,
    clip_g_width=5,
    pooled_width=5,
    sample_size=8,
)


@dataclass
class FakeEngine:
    """Fills every output from means over the inputs, row by row, so that a swapped, stale or
    missing row changes the numbers. If `fault` is set, the next call raises it."""

    spec: ModelSpec
    calls: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    fault: Exception | None = None
    on_call: Callable[[], object] = lambda: None

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        check_inputs(self.spec, inputs)
        self.calls.append({name: tuple(t.shape) for name, t in inputs.items()})
        self.on_call()
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        # In float64, and divided by 10: a mean's rounding depends on the number of rows, and a sine
        # of some hundreds, guided step after step, would make it visible.
        signal = sum(
            (i + 1) * inputs[t.name].double().flatten(1).mean(1)
            if inputs[t.name].dim() > 1
            else (i + 1) * inputs[t.name].double() / 1000
            for i, t in enumerate(self.spec.inputs)
        )
        assert isinstance(signal, Tensor)
        for i, t in enumerate(self.spec.outputs):
            shape = outputs[t.name].shape
            noisy = 0.1 * inputs["sample"][:, : shape[1]] if t.name == "noise" else 0.0
            wave = torch.sin(signal / 10 * (i + 1)).view(-1, *[1] * (len(shape) - 1)).expand(shape)
            outputs[t.name].copy_(wave + noisy)


def fake_engines(buckets: tuple[int, ...] = (1, 2, 4, 8), arch: Architecture = ARCH) -> Engines:
    specs = network_specs(arch)
    return Engines(arch, {n: FakeEngine(s) for n, s in specs.items()}, buckets=buckets)


class FakeShelf:
    """Accepts any file and applies none."""

    def delay_s(self, uses: Sequence[Use]) -> float:
        return 0.0

    def variant(self, uses: Sequence[Use]) -> Variant:
        return PLAIN

    def lease(self, uses: Sequence[Use]) -> Adapters:
        return Adapters(files=tuple((file, file.digests) for file, *_ in uses))


def axes(latent_h: int, latent_w: int, tokens: int = 77) -> Axes:
    """Return the axes that all images of a call share."""
    sizes = {"latent_h": latent_h, "latent_w": latent_w, "tokens": tokens}
    return network_specs(ARCH)["unet_deep"].shared_axes(sizes)


def fake_conditioning(
    seed: int, rows: int, tokens: int = 77, arch: Architecture = ARCH
) -> Conditioning:
    generator = torch.Generator().manual_seed(seed)
    return Conditioning(
        guidance_embedding=torch.randn(rows, arch.guidance_channels, generator=generator),
        context=torch.randn(rows, tokens, ARCH.context_width, generator=generator),
        pooled=torch.randn(rows, ARCH.pooled_width, generator=generator),
        time_ids=torch.tensor([[64.0, 64.0, 0, 0, 64.0, 64.0]] * rows),
    )


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now
