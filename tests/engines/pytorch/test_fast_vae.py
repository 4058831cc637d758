"""The decoder as on a GPU: the same picture, from recordings, rounded on the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engines.cuda import recordings
from engines.cuda.recordings import RecordedEngine
from engines.pytorch import fast_vae, torch_engine
from engines.pytorch.fast_vae import rearrange_decoder
from sdxl.checkpoint import find
from sdxl.images import BrokenImage, rounded, to_pixels
from sdxl.networks.halves import fit_halves
from sdxl.networks.parts import networks_of
from sdxl.pipeline import Pipeline
from sdxl.specs import ModelSpec, network_specs
from tests.engines.distances import check_near
from tests.engines.trt_double import FakeDevice
from tests.fakes import ARCH, FakeEngine, fake_engines

SPEC = network_specs(ARCH)["vae_decoder"]
MOST_ERROR = 1e-5


@pytest.mark.parametrize("fits", [False, True])
def test_rearranged_it_decodes_the_same(fits: bool) -> None:
    vae = find("mini").part("vae")
    plain = networks_of("vae", copy.deepcopy(vae))["vae_decoder"]
    if fits:
        fit_halves(vae)
    placed = networks_of("vae", vae)["vae_decoder"].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ours: Any = placed
    rearrange_decoder(ours.decoder)
    latents = torch.randn(2, 4, 12, 9)
    with torch.inference_mode():
        (found,), (expected,) = ours(latents), plain(latents)
    check_near(found, expected, MOST_ERROR)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_the_largest_picture_fits_the_grids_of_a_gpu(precision: str) -> None:
    """CUDA starts at most 65,535 programs on the second and third axis."""
    pytest.importorskip("triton", reason="Triton comes for Linux alone")
    from tests.engines.meta_launches import launches_of_a_picture

    for launch in launches_of_a_picture(precision, 4096 // 8):
        first, *others = launch.grid
        assert first < 2**31 and max(others, default=1) <= 65_535, f"{launch.name}: {launch.grid}"


@pytest.mark.parametrize(("width", "expected"), [(256, "attend"), (288, "attend_by_products")])
def test_only_a_head_too_wide_for_a_fused_kernel_attends_by_products(
    width: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def note(name: str, query: Tensor, *_: Tensor, **__: int) -> Tensor:
        called.append(name)
        return query

    for name in ("attend", "attend_by_products"):
        monkeypatch.setattr(fast_vae, name, partial(note, name))
    same = nn.Identity()
    parts = {"to_q": same, "to_k": same, "to_v": same, "to_out": [same], "heads": 1}
    attention = SimpleNamespace(group_norm=nn.GroupNorm(32, width), **parts)
    fast_vae.DecoderAttention(attention)(torch.zeros(1, width, 2, 2))
    assert called == [expected]


@pytest.mark.parametrize(("precision", "fitted"), [("fp32", 0), ("fp16", 1), ("bf16", 0)])
def test_only_a_vae_in_halves_is_fitted_to_them(
    precision: str, fitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[object] = []
    monkeypatch.setattr(torch_engine, "fit_halves", modules.append)
    torch_engine.load_torch(find("mini"), device="cpu", precision=precision)
    assert [type(module).__name__ for module in modules] == ["AutoencoderKL"] * fitted


@dataclass
class Launching:
    """An engine that a capturing device records and does not run."""

    device: FakeDevice
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(SPEC))

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        if self.device.recorded is None:
            self.engine(inputs, outputs)
        else:
            self.device.recorded.append(lambda: self.engine(inputs, outputs))


def test_a_recorded_decoder_answers_for_the_latents_it_is_given() -> None:
    """Each picture's latents are new tensors at other addresses."""
    device = FakeDevice()
    engine = RecordedEngine(Launching(device), device)
    for seed in range(4):
        for side in (4, 6):
            latents = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(seed))
            found, expected = (torch.empty(1, 3, 8 * side, 8 * side) for _ in range(2))
            engine({"latents": latents}, {"image": found})
            FakeEngine(SPEC)({"latents": latents}, {"image": expected})
            assert torch.equal(found, expected), (seed, side)
    assert (device.captures, device.replays) == (2, 6)


def test_recordings_of_few_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device, sides = FakeDevice(), range(4, 11)
    engine = RecordedEngine(Launching(device), device)
    three = sum(4 * (4 + 3 * 64) * side**2 for side in sides[-3:])
    monkeypatch.setattr(recordings, "MOST_DECODER_BYTES", three)
    for side in sides:
        engine(
            {"latents": torch.zeros(1, 4, side, side)},
            {"image": torch.zeros(1, 3, 8 * side, 8 * side)},
        )
    kept = [key[0][-1] for key in engine.lanes]  # type: ignore[index]
    assert kept == [8, 9, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pixels_rounded_on_the_device_are_the_same_bytes(dtype: torch.dtype) -> None:
    halves = (torch.arange(256 * 3 * 4).view(3, 64, 16) % 256 + 0.5) / 127.5 - 1
    for image in (torch.randn(3, 64, 16), halves):
        pixels, is_whole = rounded(image.to(dtype))
        assert is_whole
        assert np.array_equal(pixels.numpy(), to_pixels(image.to(dtype).float()))
    assert not rounded(torch.full((3, 2, 2), torch.nan))[1]
    assert not rounded(torch.full((3, 2, 2), torch.inf))[1]


def test_an_asynchronous_device_hands_over_pixels_and_says_what_is_broken() -> None:
    """The device is a double: tensors on the CPU count as a GPU's."""

    class Elsewhere(str):
        type = "elsewhere"

    device: Any = Elsewhere("cpu")
    engines = replace(fake_engines(), device=device)
    pipeline, latents = Pipeline(find("mini"), engines), torch.randn(4, 8, 8)
    plain = Pipeline(find("mini"), fake_engines())
    assert np.array_equal(pipeline.pixels(latents), plain.pixels(latents))
    with pytest.raises(BrokenImage, match="NaN or infinity"):
        pipeline.pixels(torch.full((4, 8, 8), torch.nan))
