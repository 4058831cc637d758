"""Profiles cover the loop's calls, and follow from the specs alone."""

from __future__ import annotations

import pytest

from engines.folders.profiles import (
    buckets,
    choose,
    image_limits,
    latent_sides,
    most_chunks,
    profiles,
)
from engines.folders.targets import TARGETS
from sdxl.conditioning import MAX_CHUNKS_PER_CALL
from sdxl.specs import (
    SDXL_1_0,
    Architecture,
    ControlArchitecture,
    ModelSpec,
    ShapeError,
    control_specs,
    image_axes,
    level_axes,
    network_specs,
    variants_of,
)
from tests.fakes import ARCH

BATCHES = sorted({target.max_batch for target in TARGETS.values()})
SPECS = network_specs(SDXL_1_0, "float16")
VARIED = variants_of(SPECS, SDXL_1_0)
UNION = control_specs(SDXL_1_0, ControlArchitecture((640, 1280), types=6), "float16")


def shapes(spec: ModelSpec, **axes: int) -> dict[str, tuple[int, ...]]:
    usual = {"rows": 2, "tokens": 77, "latent_h": 128, "latent_w": 128, "chunks": 2, "batch": 1}
    found = usual | {"images": 2, "image_tokens": 16} | axes
    found |= image_axes(SDXL_1_0, found["latent_h"], found["latent_w"])
    found |= level_axes(found["latent_h"], found["latent_w"]) | {"hints": 2, "pictures": 1}
    return {t.name: t.shape(found) for t in spec.inputs}


@pytest.mark.parametrize("max_batch", [1, 3, *BATCHES])
@pytest.mark.parametrize(
    "name", ["unet_deep", "unet_shallow", "unet_deep+control", "unet_deep+image"]
)
def test_every_bucket_has_a_profile_near_it_and_powers_of_two_an_exact_one(
    name: str, max_batch: int
) -> None:
    spec = (SPECS | VARIED)[name]
    found = profiles(spec, SDXL_1_0, max_batch)
    for rows in buckets(max_batch):
        profile = found[choose(name, found, shapes(spec, rows=rows))]
        assert profile is not found[-1], f"{rows} rows meet the wide profile"
        low, usual, high = (shape[0] for shape in profile.ranges["sample"])
        assert low <= rows <= usual == high < 2 * low
        if rows.bit_count() == 1 or rows == 2 * max_batch:
            assert low == high == rows


def test_builds_stay_short() -> None:
    """TensorRT times each profile separately."""
    assert len(profiles(SPECS["unet_deep"], SDXL_1_0, 16)) == 9


@pytest.mark.parametrize("has_exact", [True, False])
@pytest.mark.parametrize(
    "axes",
    [
        {"rows": 1},
        {"rows": 32, "tokens": 231},
        {"latent_h": 96, "latent_w": 168},
        {"latent_h": 65, "latent_w": 255},
        {"chunks": 1},
        {"chunks": MAX_CHUNKS_PER_CALL},
    ],
)
def test_the_wide_profile_takes_the_rest(axes: dict[str, int], has_exact: bool) -> None:
    for name, spec in (SPECS | VARIED | UNION).items():
        found = profiles(spec, SDXL_1_0, 16, has_exact=has_exact)
        chosen = choose(name, found, shapes(spec, **axes))
        assert found[chosen].admits(shapes(spec, **axes))


@pytest.mark.parametrize("arch", [SDXL_1_0, ARCH])
def test_a_profile_names_the_inputs_of_its_network(arch: Architecture) -> None:
    for spec in network_specs(arch).values():
        for profile in profiles(spec, arch, 4):
            assert list(profile.ranges) == [t.name for t in spec.inputs]


def test_a_shape_that_no_profile_allows_is_refused_with_the_allowed_shapes() -> None:
    spec = SPECS["unet_deep"]
    with pytest.raises(ShapeError, match=r"'keys_0' has shape .2, 308, 640., the engine was"):
        choose(spec.name, profiles(spec, SDXL_1_0, 4), shapes(spec, tokens=308))


def test_the_sides_that_the_widest_profile_takes() -> None:
    for spec in network_specs(SDXL_1_0, "float16").values():
        if any("latent_h" in tensor.dims for tensor in spec.inputs):
            found = profiles(spec, SDXL_1_0, 8)
            assert latent_sides(spec, found) == (64, 256), spec.name


def test_the_longest_prompt_that_the_widest_profile_takes() -> None:
    spec = SPECS["unet_deep"]
    for has_exact in (True, False):
        found = profiles(spec, SDXL_1_0, 4, has_exact=has_exact)
        most = most_chunks(spec, found)
        choose(spec.name, found, shapes(spec, tokens=77 * most))
        with pytest.raises(ShapeError):
            choose(spec.name, found, shapes(spec, tokens=77 * (most + 1)))


def test_the_most_image_prompts_that_the_widest_profile_takes() -> None:
    spec = VARIED["unet_deep+image"]
    found = profiles(spec, SDXL_1_0, 4)
    limits = image_limits(spec, found)
    images, tokens = limits["most_images"], limits["most_image_tokens"]
    choose(spec.name, found, shapes(spec, images=images, image_tokens=tokens))
    for more in ({"images": images + 1}, {"image_tokens": tokens + 1}):
        with pytest.raises(ShapeError):
            choose(spec.name, found, shapes(spec, **more))
