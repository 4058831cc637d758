"""IP-Adapter files: which are read, and which are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.image_weights import places_of, read_image_adapter
from engines.lora_weights import LoraError
from sdxl.catalogue import Catalogue
from sdxl.checkpoint import find
from sdxl.networks.attention import cross_attentions
from tests.sdxl.control_nets import random_control
from tests.sdxl.image_adapters import (
    PLAIN,
    PLUS,
    PROJECTED,
    TOKENS,
    plain_tensors,
    plus_tensors,
    random_encoder,
    write_adapters,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters for tests that at most add a file."""
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", [PLAIN, PLUS])
def test_headers_are_read(folder: Path, name: str) -> None:
    file = read_image_adapter(folder / f"{name}.safetensors", find("mini"))
    assert (file.tokens, file.side, file.encoder) == (TOKENS[name], 32, folder / "image_encoder")
    network = file.network(file.vision())
    assert sum(each.numel() for each in network.parameters()) == file.numbers


def test_places_are_the_unets() -> None:
    unet: Any = find("mini").part("unet")
    names = {id(module): name for name, module in unet.named_modules()}
    for place, module in zip(
        places_of(find("mini").config("unet")), cross_attentions(unet), strict=True
    ):
        way, block, index = place
        start = "mid_block." if way == "mid" else f"{way}_blocks.{block}."
        assert names[id(module)].startswith(f"{start}attentions.{index}."), place


def test_an_encoder_of_several_models_lies_in_their_folder(tmp_path: Path) -> None:
    """As in h94/IP-Adapter, the nearest encoder has another width."""
    folder = write_adapters(tmp_path)
    own = folder / "sdxl_models"
    own.mkdir()
    (folder / f"{PLAIN}.safetensors").rename(own / f"{PLAIN}.safetensors")
    (folder / "image_encoder").rename(folder / "kept")
    random_encoder(projected=16).save_pretrained(own / "image_encoder")
    path = own / f"{PLAIN}.safetensors"
    with pytest.raises(LoraError, match="of projection_dim 24 .*: its projection_dim is 16.0"):
        read_image_adapter(path, find("mini"))
    (folder / "models").mkdir()
    (folder / "kept").rename(folder / "models" / "image_encoder")
    assert read_image_adapter(path, find("mini")).encoder == folder / "models" / "image_encoder"
    assert [each.name for each in Catalogue(image_folders=[folder]).listed("image")] == [
        PLUS,
        f"sdxl_models/{PLAIN}",
    ]


def changed(kind: str, **more: Any) -> dict[str, Any]:
    tensors = plain_tensors(1) if kind == PLAIN else plus_tensors(2)
    for name, value in more.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    return tensors


def whole() -> torch.Tensor:
    return torch.zeros(64, 128, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: {"a": torch.zeros(1)}, "is nothing that is known; expected an IP-Adapter of SDXL"),
        (lambda: random_control(1).state_dict(), "is nothing that is known"),
        (lambda: changed(PLAIN, image_proj__proj__0__weight=torch.zeros(1)), "is a FaceID"),
        (lambda: changed(PLAIN, ip_adapter__1__to_k_ip__weight=None), "is for another model"),
        (lambda: changed(PLAIN, ip_adapter__1__to_k_lora__down__weight=torch.zeros(1)), "not"),
        (
            lambda: changed(PLAIN, ip_adapter__1__to_k_ip__weight=torch.zeros(64, 768)),
            "is for Stable Diffusion 1: 'ip_adapter.1.to_k_ip.weight' has shape",
        ),
        (lambda: changed(PLAIN, ip_adapter__1__to_k_ip__weight=whole()), "in I32; expected"),
        (lambda: changed(PLAIN, image_proj__norm__bias=None), "lacks norm.bias"),
        (lambda: changed(PLUS, image_proj__proj_out__bias=None), "lacks proj_out.bias"),
        (
            lambda: changed(PLUS, image_proj__latents=torch.zeros(1, 32, 40)),
            "has 32 tokens for a picture; expected at most 16",
        ),
        (
            lambda: changed(PLUS, image_proj__layers__1__0__to_kv__weight=torch.zeros(8, 40)),
            "has layers.1.attn.to_k.weight of shape (4, 40), expected (128, 40)",
        ),
        (lambda: changed(PLUS, image_proj__more=torch.zeros(1)), "has 'more', which is not"),
    ],
)
def test_other_files_are_refused_in_one_line(folder: Path, tensors: Any, message: str) -> None:
    path = folder / "other.safetensors"
    save_file(tensors(), path)
    with pytest.raises(LoraError) as refused:
        read_image_adapter(path, find("mini"))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_numbers_that_are_not_finite_are_refused(folder: Path) -> None:
    tensors = plain_tensors(1)
    tensors["image_proj.proj.bias"][0] = float("nan")
    save_file(tensors, path := folder / "broken.safetensors")
    file = read_image_adapter(path, find("mini"))
    with pytest.raises(LoraError, match="has numbers in image_proj.proj.bias that are not finite"):
        file.network(file.vision())


def test_a_file_without_an_encoder_is_refused(tmp_path: Path) -> None:
    save_file(plain_tensors(1), path := tmp_path / f"{PLAIN}.safetensors")
    with pytest.raises(LoraError, match="needs a folder image_encoder beside it with"):
        read_image_adapter(path, find("mini"))


def change_encoder(folder: Path, rename: Any, **entries: Any) -> None:
    """Rename tensors of the encoder, without those renamed to "", and add entries to its config."""
    weights, config = (folder / "image_encoder" / n for n in ("model.safetensors", "config.json"))
    renamed = {rename(name): tensor for name, tensor in load_file(weights).items()}
    save_file({n: t.clone() for n, t in renamed.items() if n}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))


def without_projection(name: str) -> str:
    return "" if name.startswith("visual_projection.") else name


@pytest.mark.parametrize("name", [PLAIN, PLUS])
@pytest.mark.parametrize(
    ("rename", "entries", "message"),
    [
        (lambda n: n.replace("vision_model.encoder", "visual.transformer"), {}, "without vision"),
        (lambda n: n if "layers.2.mlp.fc1" not in n else "", {}, r"without vision.*fc1\.bias"),
        (str, {"intermediate_size": 97}, "cannot be loaded"),
        (str, {"image_size": "large"}, "image_size is 'large'"),
    ],
)
def test_no_weight_of_an_encoder_is_random(
    name: str, rename: Any, entries: Any, message: str, tmp_path: Path
) -> None:
    change_encoder(write_adapters(tmp_path), rename, **entries)
    with pytest.raises(LoraError, match=f"has an encoder .*{message}"):
        read_image_adapter(tmp_path / f"{name}.safetensors", find("mini")).vision()


def test_only_a_plus_adapter_needs_no_projection_of_the_encoder(tmp_path: Path) -> None:
    change_encoder(write_adapters(tmp_path), without_projection)
    read_image_adapter(tmp_path / f"{PLUS}.safetensors", find("mini")).vision()
    with pytest.raises(LoraError, match="image_encoder: its weights lack visual_projection.weight"):
        read_image_adapter(tmp_path / f"{PLAIN}.safetensors", find("mini"))


@pytest.mark.parametrize("name", [PLAIN, PLUS])
def test_the_encoder_may_be_a_whole_clip(name: str, folder: Path, tmp_path: Path) -> None:
    """As in laion/CLIP-ViT-H-14; vision_config's projection_dim is not the model's."""
    alone, whole = (f / f"{name}.safetensors" for f in (folder, write_adapters(tmp_path)))
    vision = json.loads((tmp_path / "image_encoder" / "config.json").read_text())
    config = {"model_type": "clip", "projection_dim": PROJECTED, "text_config": {}}
    config["vision_config"] = vision | {"projection_dim": 512}
    (tmp_path / "image_encoder" / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "image_encoder" / "model.safetensors"
    text = {"text_model.x": torch.zeros(9), "text_projection.weight": torch.zeros(9)}
    save_file(load_file(weights) | text, weights, {"format": "pt"})
    files = [read_image_adapter(path, find("mini")) for path in (alone, whole)]
    assert (files[0].side, files[0].numbers) == (files[1].side, files[1].numbers)
    needed, found = (file.vision().state_dict() for file in files)
    assert all(torch.equal(needed[key], found[key]) for key in needed.keys() | found.keys())
