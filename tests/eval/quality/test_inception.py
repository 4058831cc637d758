"""FID's Inception: its structure on random weights, and what it does not take for its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.quality.inception import Inception, average, load_inception
from sdxl.params import InvalidParams

# torchvision documents 27,161,264 parameters, of which 3,326,696 are the auxiliary head's, for 1000
# classes; the weights of 2015 have 1008, and no auxiliary head.
PARAMETERS = 27_161_264 - 3_326_696 + 8 * 2049


@pytest.fixture(scope="module")
def network() -> Inception:
    torch.manual_seed(0)
    return Inception().eval()


def test_it_has_the_published_parameters(network: Inception) -> None:
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS


def test_a_picture_of_any_side_becomes_2048_features(network: Inception) -> None:
    pictures = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        found = network(pictures)
    assert found.shape == (2, 2048) and torch.isfinite(found).all()
    assert (found >= 0).all(), "features are means of ReLU's outputs"


def test_average_pools_do_not_count_their_padding() -> None:
    assert torch.equal(average(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))


def test_weights_of_the_usual_layout_load_strictly(network: Inception, tmp_path: Path) -> None:
    weights = dict(network.state_dict())
    names = {"Conv2d_1a_3x3.conv.weight", "Mixed_7c.branch3x3dbl_3b.bn.running_var", "fc.bias"}
    assert names <= set(weights) and weights["fc.weight"].shape == (1008, 2048)
    path = tmp_path / "inception.pth"
    torch.save(weights, path)
    torch.testing.assert_close(load_inception(path).fc.weight, network.fc.weight)
    del weights["Mixed_6b.branch7x7_2.conv.weight"]
    torch.save(weights, path)
    with pytest.raises(InvalidParams, match=r"inception: .*Mixed_6b.branch7x7_2.conv.weight"):
        load_inception(path)


def test_what_is_no_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "inception.pth"
    path.write_text("not weights")
    with pytest.raises(InvalidParams, match="inception: .*needed the weights of pt_inception"):
        load_inception(path)
