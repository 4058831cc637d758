"""Which checkpoints load, and the messages that refuse other checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdxl.checkpoint import MINI, Checkpoint, CheckpointError, find

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(MINI, copy)
    return copy


def test_configs_and_tokenizers_need_neither_torch_nor_a_model_library() -> None:
    code = (
        "import sys; from sdxl.checkpoint import find; c = find('mini');"
        "assert 'tokenizers' not in sys.modules, 'not read yet';"
        "c.arch, c.sizes, c.scheduler, c.tokenizers;"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_variant_and_sharded_weights_load_unchanged(folder: Path, variant: str) -> None:
    expected = load_file(MINI / UNET)
    single = folder / f"unet/diffusion_pytorch_model{variant}.safetensors"
    (folder / UNET).rename(single)
    assert _same(find(str(folder)), expected)

    tensors = sorted(expected)
    single.unlink()
    names = [f"diffusion_pytorch_model{variant}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = dict(zip(names, (tensors[::2], tensors[1::2]), strict=True))
    for name, keys in parts.items():
        save_file({k: expected[k] for k in keys}, folder / "unet" / name, {"format": "pt"})
    weight_map = {key: name for name, keys in parts.items() for key in keys}
    index = {"metadata": {}, "weight_map": weight_map}
    path = folder / f"unet/diffusion_pytorch_model.safetensors.index{variant}.json"
    path.write_text(json.dumps(index))
    assert _same(find(str(folder)), expected)


@pytest.mark.parametrize("model", ["my/model--v2", "a/b.git"])
def test_a_name_that_is_no_hub_id_is_refused_in_one_line(model: str) -> None:
    with pytest.raises(CheckpointError, match=model):
        find(model)


def test_a_vocabulary_that_was_cut_off_is_named(folder: Path) -> None:
    path = folder / "tokenizer" / "vocab.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="vocab.json or merges.txt is broken"):
        _ = find(str(folder)).tokenizers


def _same(found: Checkpoint, expected: dict[str, torch.Tensor]) -> bool:
    state = found.part("unet").state_dict()
    return all(torch.equal(state[key], value.float()) for key, value in expected.items())


def refusal(model: Path | str, part: str = "unet") -> str:
    with pytest.raises(CheckpointError) as error:
        find(str(model)).part(part)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_pickle_is_refused_by_name(folder: Path) -> None:
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.bin")
    assert "diffusion_pytorch_model.bin: pickle weights can run code" in refusal(folder)


def test_missing_and_truncated_weights_are_refused(folder: Path) -> None:
    data = (folder / UNET).read_bytes()
    (folder / UNET).write_bytes(data[: len(data) // 2])
    assert f"{UNET}: not a whole safetensors file" in refusal(folder)
    (folder / UNET).unlink()
    assert "expected diffusion_pytorch_model.safetensors" in refusal(folder)
    shutil.rmtree(folder / "unet")
    assert "unet/config.json: not there; expected a folder in diffusers layout" in refusal(folder)


@pytest.mark.parametrize("name", ["unet/config.json", "vae/diffusion_pytorch_model.safetensors"])
def test_a_named_pipe_in_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        find(str(folder))


@pytest.mark.slow
def test_a_network_without_one_of_its_tensors_is_refused(folder: Path) -> None:
    tensors = load_file(folder / UNET)
    del tensors["conv_out.weight"]
    save_file(tensors, folder / UNET, {"format": "pt"})
    assert "1 tensors of the network are missing, 'conv_out.weight' the first" in refusal(folder)


def test_missing_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no model_index.json there" in refusal(tmp_path)
    assert "must be 'mini', a folder" in refusal("no such model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "'some/model' is neither a folder here nor could be fetched" in refusal("some/model")


def test_the_digest_is_that_of_the_weights(folder: Path) -> None:
    first = find(str(folder)).digest
    assert first == find("mini").digest
    (folder / "README.md").write_text("unrelated")
    assert find(str(folder)).digest == first
    tensors = load_file(folder / UNET)
    tensors["conv_out.bias"] += 1
    save_file(tensors, folder / UNET, {"format": "pt"})
    assert find(str(folder)).digest != first
