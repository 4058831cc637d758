"""A checkpoint of SDXL's refiner: what is read of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engines.pytorch.torch_engine import load_torch
from sdxl.checkpoint import CheckpointError, find, find_refiner
from sdxl.engine import call
from sdxl.networks.attention import cross_attentions
from sdxl.specs import network_specs
from tests.sdxl.refiners import random_unet, write_refiner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_refiner(tmp_path_factory.mktemp("refiner") / "small")


def test_its_architecture_is_that_of_its_configs(folder: Path) -> None:
    arch = find_refiner(str(folder)).arch
    assert arch.is_refiner and arch.context_width == 64
    widths = tuple(layer.to_k.out_features for layer in cross_attentions(random_unet()))
    assert arch.attention_widths == widths
    specs = network_specs(arch)
    assert "clip_l" not in specs
    assert specs["unet_prompt"].inputs[2].dims == ("rows", 5)


def test_deep_and_shallow_equal_diffusers(folder: Path) -> None:
    engines = load_torch(find_refiner(str(folder)), device="cpu")
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
        difference = float((found - expected).abs().max())
        assert difference <= 1e-5, f"differs by {difference:.2e}, allowed 1e-5"


def test_it_is_refused_as_a_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is the SDXL refiner; expected a checkpoint of SDXL"):
        find(str(folder))


def test_another_model_is_refused_as_a_refiner() -> None:
    with pytest.raises(CheckpointError, match="refiner 'mini': model_index.json lacks"):
        find_refiner("mini")


def test_another_unet_is_refused(tmp_path: Path) -> None:
    folder = write_refiner(tmp_path / "other")
    path = folder / "unet" / "config.json"
    config = json.loads(path.read_text()) | {"addition_embed_type": "text"}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="an SDXL refiner has 'text_time'"):
        find_refiner(str(folder)).unet()
