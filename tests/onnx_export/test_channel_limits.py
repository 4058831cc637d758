"""A channel's range in few prompts limits neither that channel nor its neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engines.parity.findings import relative_norm
from onnx_export.calibration import StepClock
from onnx_export.quantisation import channel_limits, quantise
from onnx_export.recipes import INT8, matching
from onnx_export.reference import fake_quantise

FIRST, SECOND = "ff.net.0.proj", "ff.net.2"
CHANNELS = 256
ROUNDED = 0.05
"""the largest error of a product that rounding to 8 bits may cause"""


def test_channels_within_the_headroom_share_a_limit() -> None:
    maxima = torch.tensor([1.0, 2.0, 3.0, 2.0])
    assert channel_limits(maxima, 4.0).tolist() == [3.0] * 4


def test_a_channel_far_above_the_others_keeps_a_limit_of_its_own() -> None:
    maxima = torch.tensor([*[1.0] * 99, 101.0])
    assert channel_limits(maxima, 4.0).tolist() == [8.0] * 99 + [101.0], "the mean is 2"


def test_a_channel_that_never_fired_counts_as_the_mean_one() -> None:
    maxima = torch.tensor([*[0.0] * 6, 40.0, 8.0])
    assert channel_limits(maxima, 4.0).tolist() == [24.0] * 6 + [40.0, 32.0], "the mean is 6"
    assert channel_limits(torch.zeros(3), 4.0).tolist() == [0.0] * 3


def test_every_smoothed_layer_has_headroom() -> None:
    names = [f"blocks.0.{name}" for name in (FIRST, SECOND, "attn1.to_q", "attn2.to_q")]
    found = {name: rule.headroom for name, rule in matching(INT8, names).items()}
    assert found == dict(zip(names, (4.0, 8.0, 4.0, 4.0), strict=True))


def feed_forward() -> nn.Module:
    torch.manual_seed(0)
    first, second = (nn.Linear(CHANNELS, CHANNELS) for _ in range(2))
    net = nn.ModuleDict({"0": nn.ModuleDict({"proj": first}), "2": second})
    return nn.ModuleDict({"blocks": nn.ModuleDict({"ff": nn.ModuleDict({"net": net})})})


def calibrated_error(layer: str, seen: Tensor, later: Tensor, folder: Path) -> float:
    """Return the error of the layer's product on `later`, with scales calibrated on `seen`."""
    calibrated, rounded, exact = (feed_forward() for _ in range(3))

    def run(_: StepClock) -> None:
        for each in (FIRST, SECOND):
            calibrated.get_submodule(f"blocks.{each}")(seen)

    found = quantise(calibrated, INT8, run, torch.float32)
    save_file(dict(found.tensors), folder / "numbers.safetensors")
    fake_quantise(rounded, folder / "numbers.safetensors")
    with torch.no_grad():
        ours, theirs = (whole.get_submodule(f"blocks.{layer}")(later) for whole in (rounded, exact))
    return relative_norm(ours, theirs)


@pytest.mark.parametrize(("layer", "seldom"), [(FIRST, 0.3), (SECOND, 0.05)])
def test_a_channel_that_seldom_fired_is_not_cut_off_when_it_does(
    layer: str, seldom: float, tmp_path: Path
) -> None:
    later = torch.randn(256, CHANNELS, generator=torch.Generator().manual_seed(1))
    seen = later.roll(1, 0)
    seen[:, ::2] *= seldom
    error = calibrated_error(layer, seen, later, tmp_path)
    assert error <= ROUNDED, f"{error:.3f}, at most {ROUNDED}"


@pytest.mark.parametrize("layer", [FIRST, SECOND])
def test_one_channel_far_above_the_others_does_not_coarsen_them(layer: str, tmp_path: Path) -> None:
    """Smoothing prevents it: with one limit for all channels the others would round to zero."""
    seen = torch.randn(256, CHANNELS, generator=torch.Generator().manual_seed(1))
    seen[:, 0] *= 100.0
    later = seen.roll(1, 0)
    later[:, 0] = 0.0
    error = calibrated_error(layer, seen, later, tmp_path)
    assert error <= 4 * ROUNDED, f"{error:.3f}, at most {4 * ROUNDED}"
