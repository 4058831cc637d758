"""Which checkpoints load, and which are refused: each in one line, in bounded time and memory."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdxl.checkpoint import MINI, NETWORK_FOLDERS, WEIGHT_NAMES, Checkpoint, CheckpointError, find
from sdxl.images import BrokenPreviewMap, load_preview_map
from sdxl.schedulers import table
from tests.mutants import bounded, change_bytes, change_json, check_each

UNET = "unet/diffusion_pytorch_model.safetensors"
SHARDED = {part: f"{part}/{name}.safetensors.index.json" for part, name in WEIGHT_NAMES.items()}
FILES = [
    *("model_index.json", "preview.json", "scheduler/scheduler_config.json"),
    *(f"{part}/config.json" for part in NETWORK_FOLDERS),
    *(f"{part}/{name}.safetensors" for part, name in WEIGHT_NAMES.items()),
    *(f"tokenizer/{name}" for name in ("vocab.json", "merges.txt", "tokenizer_config.json")),
]
HEADER_BYTES = 100_000
"""the header of a safetensors file; numbers follow"""


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
    assert model in refusal(model)


def test_a_vocabulary_that_was_cut_off_is_named(folder: Path) -> None:
    path = folder / "tokenizer" / "vocab.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="vocab.json or merges.txt is broken"):
        _ = find(str(folder)).tokenizers


def _same(found: Checkpoint, expected: dict[str, torch.Tensor]) -> bool:
    state = found.part("unet").state_dict()
    return all(torch.equal(state[key], value.float()) for key, value in expected.items())


def refusal(model: Path | str, part: str = "unet") -> str:
    with bounded(part), pytest.raises(CheckpointError) as caught:
        found = find(str(model))
        _ = found.arch
        found.part(part)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("text_encoder", {"num_hidden_layers": 1_000_000}, "num_hidden_layers is above 256"),
        ("text_encoder", {"hidden_size": 2**20, "num_attention_heads": 1}, "clip_l_width is"),
        ("text_encoder_2", {"intermediate_size": 2**20}, "describes a network of .* hold"),
        ("text_encoder", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("text_encoder", {"attn_implementation": "org/kernel"}, "attn_implementation"),
        ("text_encoder", {"text_config": {"num_hidden_layers": 9}}, "has text_config"),
        ("text_encoder", {"hidden_act": "no such thing"}, "text_encoder: .*no such thing"),
        ("unet", {"layers_per_block": 10**9}, "layers_per_block is 1000000000, expected"),
        ("unet", {"transformer_layers_per_block": 10**9}, "transformer_layers_per_block is"),
        ("unet", {"block_out_channels": [16_384] * 3}, "describes a network of .* hold"),
        ("unet", {"block_out_channels": "x"}, "block_out_channels is 'x', expected a list"),
        ("unet", {"sample_size": 10**9}, "sample_size is 1000000000, expected"),
        ("unet", {"transformer_layers_per_block": [1]}, "do not fit"),
        ("unet", {"addition_embed_type": "text"}, "addition_embed_type is 'text', an SDXL has"),
        ("unet", {"mid_block_type": None}, "mid_block_type is None, an SDXL has 'UNetMid"),
        ("unet", {"reverse_transformer_layers_per_block": [2, 1, 1]}, "an SDXL has None"),
        ("vae", {"block_out_channels": [64] * 1000}, "block_out_channels of the VAE"),
        ("vae", {"down_block_types": ["x"]}, "vae: "),
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused(
    part: str, changes: dict[str, Any], message: str, folder: Path
) -> None:
    path = folder / part / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    error = refusal(folder, part)
    assert re.search(message, error), error


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "text_encoder/adapter_config.json").write_text("{}")
    assert "adapter_config.json: names another model" in refusal(folder, "text_encoder")


def test_a_config_nested_too_deep_is_not_json(folder: Path) -> None:
    (folder / "vae/config.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    assert "vae/config.json: not readable as JSON" in refusal(folder, "vae")


@pytest.mark.parametrize(
    "weight_map", [[], {}, 5, {"a": 5}, {"a": ["x"]}, {"a": "../x.safetensors"}, {"a": "x.bin"}]
)
def test_an_index_that_names_no_files_is_refused(weight_map: object, folder: Path) -> None:
    (folder / "unet/diffusion_pytorch_model.safetensors").unlink()
    (folder / SHARDED["unet"]).write_text(json.dumps({"weight_map": weight_map}))
    assert f"{SHARDED['unet']}: needs" in refusal(folder, "unet")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "5", '{"latent_rgb_factors": 5, "latent_rgb_bias": 6}', "[" * 200_000),
        '{"latent_rgb_factors": [["a"]], "latent_rgb_bias": [[]]}',
        '{"latent_rgb_factors": [[1, 2, 3]], "latent_rgb_bias": [0, 0, 0]}',
        json.dumps({"latent_rgb_factors": [[float("nan")] * 3] * 4, "latent_rgb_bias": [0] * 3}),
    ],
)
def test_an_invalid_preview_map_is_refused(text: str, folder: Path) -> None:
    (folder / "preview.json").write_text(text)
    with pytest.raises(BrokenPreviewMap, match="preview.json: "):
        load_preview_map(folder, 4)


# -- mutants --------------------------------------------------------------------------------


def read_all(model: Checkpoint) -> None:
    """Read everything that can be read without a network."""
    _ = model.arch, model.sizes, model.tokenizers, model.force_zeros, model.index
    table("euler", 10, model.scheduler)
    load_preview_map(model.folder, model.arch.latent_channels)
    for part in NETWORK_FOLDERS:
        model.weight_files(part)


def read_mutant(folder: Path, names: list[str], reads_network: bool, chance: random.Random) -> None:
    name = chance.choice(names)
    path, original = folder / name, (MINI / name).read_bytes()
    part = name.partition("/")[0]
    if name.endswith(".json"):
        changed = change_json(original.decode(), chance)
    else:
        changed = change_bytes(original[:HEADER_BYTES], chance) + original[HEADER_BYTES:]
    path.write_bytes(changed)
    try:
        model = find(str(folder))
        if reads_network and part in NETWORK_FOLDERS:
            model.part(part)
        else:
            read_all(model)
    finally:
        path.write_bytes(original)


def read_index(folder: Path, chance: random.Random) -> None:
    part = chance.choice(NETWORK_FOLDERS)
    single, index = folder / part / f"{WEIGHT_NAMES[part]}.safetensors", folder / SHARDED[part]
    if single.exists():
        single.rename(single.with_name("one.safetensors"))
    weight_map = {"a": "one.safetensors", "b": "one.safetensors"}
    index.write_bytes(change_json(json.dumps({"metadata": {}, "weight_map": weight_map}), chance))
    find(str(folder)).weight_files(part)


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_mutated_checkpoints_are_read_or_refused(folder: Path, count: int) -> None:
    check_each(count, lambda chance: read_mutant(folder, FILES, False, chance))
    check_each(count, lambda chance: read_index(folder, chance))


@pytest.mark.long
def test_mutated_networks_load_or_are_refused(folder: Path) -> None:
    networks = [name for name in FILES if name.partition("/")[0] in NETWORK_FOLDERS]
    check_each(600, lambda chance: read_mutant(folder, networks, True, chance))
