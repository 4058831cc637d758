"""Checkpoints of SDXL's refiner: which are read, and which are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from engines.pytorch.torch_engine import load_torch
from sdxl.checkpoint import MINI, CheckpointError, check_model, find, find_refiner
from sdxl.checkpoint_checks import shapes_of_network
from sdxl.engine import call
from sdxl.networks.attention import cross_attentions
from sdxl.single_file.configs import REFINER_1_0
from sdxl.specs import Architecture, network_specs
from tests.sdxl.refiners import random_unet, write_refiner
from tests.sdxl.single_files import assert_same_weights, write_refiner_file, write_single_file


def test_its_architecture_is_that_of_its_configs(small_refiner: Path) -> None:
    arch = find_refiner(str(small_refiner)).arch
    assert arch.is_refiner and arch.context_width == 64
    widths = tuple(layer.to_k.out_features for layer in cross_attentions(random_unet()))
    assert arch.attention_widths == widths
    specs = network_specs(arch)
    assert "clip_l" not in specs
    assert specs["unet_prompt"].inputs[2].dims == ("rows", 5)


def test_deep_and_shallow_equal_diffusers(small_refiner: Path) -> None:
    engines = load_torch(find_refiner(str(small_refiner)), device="cpu")
    draw = torch.Generator().manual_seed(1)
    sample, context, pooled = (
        torch.randn(shape, generator=draw) for shape in ((2, 4, 18, 22), (2, 77, 64), (2, 64))
    )
    time_ids = torch.tensor([[144.0, 176.0, 0, 0, 6.0], [144.0, 176.0, 0, 0, 2.5]])
    timestep = torch.tensor([199.0, 1.5])
    conditions = {"context": context, "pooled": pooled, "time_ids": time_ids}
    given = {"sample": sample, "timestep": timestep}
    given |= call(engines["unet_prompt"], engines.arch, conditions)
    deep = call(engines["unet_deep"], engines.arch, given)
    noise = deep.pop("noise")
    added = {"text_embeds": pooled, "time_ids": time_ids}
    expected = random_unet()(sample, timestep, context, added_cond_kwargs=added).sample
    read = {t.name for t in engines["unet_shallow"].spec.inputs}
    shallow = call(
        engines["unet_shallow"],
        engines.arch,
        {n: t for n, t in (given | deep).items() if n in read},
    )["noise"]
    for found in (noise, shallow):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def file(small_refiner: Path) -> Path:
    return write_refiner_file(small_refiner, small_refiner.with_suffix(".safetensors"))


def test_a_single_file_equals_the_folder_it_was_made_from(
    small_refiner: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file with the embedded model's widths gets its configuration.
    monkeypatch.setattr("sdxl.checkpoint.MINI", small_refiner)
    found, whole = find_refiner(str(file)), find_refiner(str(small_refiner))
    assert (found.name, found.arch, found.scheduler) == ("small", whole.arch, whole.scheduler)
    assert found.tokenizers[1].encode("a ring") == whole.tokenizers[1].encode("a ring")
    assert_same_weights(found, whole)


def test_a_file_of_the_original_s_widths_has_its_configs() -> None:
    """sd_xl_refiner_1.0.safetensors, in halves, has 6.08 GB."""
    shapes = (shapes_of_network(part, config).values() for part, config in REFINER_1_0.items())
    numbers = sum(math.prod(shape) for part in shapes for shape in part)
    assert 2 * numbers == pytest.approx(6.08e9, rel=0.01)
    unet, vae, clip_g = (REFINER_1_0[part] for part in ("unet", "vae", "text_encoder_2"))
    assert Architecture.from_configs(unet, vae, None, clip_g).is_refiner


@pytest.mark.parametrize("kind", ["small_refiner", "file"])
def test_it_is_refused_as_a_model(kind: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue(kind)
    with pytest.raises(CheckpointError, match=r"is the SDXL refiner; expected .* as --refiner"):
        find(str(place))


def test_a_service_starts_with_a_file(file: Path) -> None:
    check_model(str(file), is_refiner=True)
    with pytest.raises(CheckpointError, match="is the SDXL refiner"):
        check_model(str(file))


def test_another_model_is_refused_as_a_refiner(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model_index\.json lacks"):
        find_refiner(str(MINI))
    with pytest.raises(CheckpointError, match="is SDXL; expected the SDXL refiner"):
        find_refiner(str(write_single_file(MINI, tmp_path / "model.safetensors")))


def test_another_unet_is_refused(tmp_path: Path) -> None:
    folder = write_refiner(tmp_path / "other")
    path = folder / "unet" / "config.json"
    config = json.loads(path.read_text()) | {"addition_embed_type": "text"}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="an SDXL refiner has 'text_time'"):
        find_refiner(str(folder)).part("unet")
