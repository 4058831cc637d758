"""At any size, Deep equals diffusers' UNet, and Shallow with Deep's cache equals Deep."""

from __future__ import annotations

import pytest
import torch

from sdxl.specs import CUTS, SDXL_1_0, Cut, network_specs
from tests.sdxl.control_nets import (
    check_equal,
    copied_unet,
    diffusers_noise,
    mini_unet,
    random_tensors,
    unet_results,
)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("rows", "h", "w"), [(2, 16, 16), (1, 24, 16), (3, 17, 15), (2, 18, 22)])
def test_deep_equals_diffusers_and_shallow_on_its_cache_equals_deep(
    cut: Cut, rows: int, h: int, w: int
) -> None:
    t = random_tensors(rows, h, w)
    found = unet_results(t, [], cut)
    check_equal(found["noise"], diffusers_noise(mini_unet(), t))
    check_equal(found["shallow"], found["noise"])


def test_the_unet_still_takes_an_encoded_prompt() -> None:
    """A UNet from which Deep was made still works in diffusers."""
    t = random_tensors(2, 16, 16)
    unet_results(t, [])
    assert torch.equal(*(diffusers_noise(unet, t) for unet in (copied_unet(), mini_unet())))


def test_wrong_inputs_are_refused_with_the_reason() -> None:
    spec = network_specs(SDXL_1_0)["unet_prompt"]
    shapes = {t.name: tuple(t.shape(dict.fromkeys(t.free_axes.values(), 8))) for t in spec.inputs}
    with pytest.raises(ValueError, match=r"'context'.*\(8, 8, 3\).*2048"):
        spec.axes({**shapes, "context": (8, 8, 3)})
    with pytest.raises(ValueError, match="'pooled' is missing"):
        spec.axes({k: v for k, v in shapes.items() if k != "pooled"})
    with pytest.raises(ValueError, match=r"rows.*8"):
        spec.axes({**shapes, "pooled": (7, 1280)})
