"""FID's Inception: its structure with random weights, and the weights that it refuses."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eval.quality.inception import Inception, average, load_inception
from sdxl.params import InvalidParams

# torchvision documents 27,161,264 parameters, of which 3,326,696 are the auxiliary head's, for 1000
# classes; the weights of 2015 have 1008, and no auxiliary head.
PARAMETERS = 27_161_264 - 3_326_696 + 8 * 2049
INDEPENDENT = Path(sys.prefix) / "independent" / "torch_fidelity"


@pytest.fixture(scope="module")
def network() -> Inception:
    torch.manual_seed(0)
    return Inception().eval()


def test_the_parameter_count_is_the_published_one(network: Inception) -> None:
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS


def test_a_picture_of_any_side_becomes_2048_features(network: Inception) -> None:
    pictures = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        features = network(pictures)
    assert features.shape == (2, 2048) and torch.isfinite(features).all()
    assert (features >= 0).all(), "features are means of ReLU's outputs"


def test_features_equal_those_of_an_independent_implementation(
    network: Inception, tmp_path: Path
) -> None:
    """Compare with torch-fidelity's network of the same weights. Its input is replaced by the
    benchmark's, because torch-fidelity resizes and scales like TensorFlow 1."""
    if not INDEPENDENT.exists():
        assert not os.environ.get("CI_REQUIRES_TOOLS"), f"no torch-fidelity in {INDEPENDENT}"
        pytest.skip("torch-fidelity is not there; .ci/run says how to get it")
    other = independent(with_statistics(network), tmp_path / "weights.pth")
    pictures = torch.randint(0, 256, (3, 3, 96, 128), dtype=torch.uint8)
    scaled = pictures.float() / 255
    resized = F.interpolate(scaled, (299, 299), mode="bilinear", align_corners=False)
    other.Conv2d_1a_3x3.register_forward_pre_hook(lambda *_: (resized * 2 - 1,))
    with torch.no_grad():
        (expected,), features = other(pictures), network(pictures)
    worst = float((features - expected).abs().max() / expected.abs().max())
    assert expected.std() > 1e-3, "features differ"
    assert worst <= 1e-4, f"{worst:.2e} of the largest feature, at most 1e-4"


def with_statistics(network: Inception) -> Inception:
    """Set the activations' statistics, as training does; otherwise features vanish by layer."""
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    network.train()
    with torch.no_grad():
        network(torch.randint(0, 256, (4, 3, 128, 128), dtype=torch.uint8))
    return network.eval()


def independent(network: Inception, path: Path) -> Any:
    """Load torch-fidelity's network. Its package would import torchvision."""
    torch.save(network.state_dict(), path)
    package = ModuleType("torch_fidelity")
    package.__path__ = [str(INDEPENDENT)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_fidelity", package)
        module = import_module("torch_fidelity.feature_extractor_inceptionv3")
        extractor = module.FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path)
        )
    return extractor.eval()


def test_average_pools_do_not_count_their_padding() -> None:
    assert torch.equal(average(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))


def test_only_weights_of_the_usual_layout_load(network: Inception, tmp_path: Path) -> None:
    weights = dict(network.state_dict())
    names = {"Conv2d_1a_3x3.conv.weight", "Mixed_7c.branch3x3dbl_3b.bn.running_var", "fc.bias"}
    assert names <= set(weights) and weights["fc.weight"].shape == (1008, 2048)
    path = tmp_path / "inception.pth"
    torch.save(weights, path)
    torch.testing.assert_close(load_inception(path).fc.weight, network.fc.weight)
    del weights["Mixed_6b.branch7x7_2.conv.weight"]
    torch.save(weights, path)
    with pytest.raises(InvalidParams, match="inception must be .*Mixed_6b.branch7x7_2.conv.weight"):
        load_inception(path)
    path.write_text("not weights")
    with pytest.raises(InvalidParams, match="inception must be the weights of pt_inception"):
        load_inception(path)
