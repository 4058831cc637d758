"""An untrusted checkpoint loads, or is refused in one line, in bounded time and memory."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdxl.checkpoint import MINI, NETWORK_FOLDERS, WEIGHT_NAMES, Checkpoint, CheckpointError, find
from sdxl.images import BrokenPreviewMap, load_preview_map
from sdxl.schedulers import table
from tests.mutants import bounded, change_bytes, change_json, check_each

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
    shutil.copytree(MINI, tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, part: str, **changes: Any) -> None:
    path = folder / part / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(folder: Path, part: str) -> str:
    with bounded(part), pytest.raises(CheckpointError) as caught:
        found = find(str(folder))
        _ = found.arch
        found.part(part)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
        ("vae", {"block_out_channels": [64] * 1000}, "block_out_channels of the VAE"),
        ("vae", {"down_block_types": ["x"]}, "vae: "),
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused(
    part: str, changes: dict[str, Any], message: str, folder: Path
) -> None:
    edit(folder, part, **changes)
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


def test_mutated_checkpoints_are_read_or_refused(folder: Path) -> None:
    check_each(150, lambda chance: read_mutant(folder, FILES, False, chance))
    check_each(150, lambda chance: read_index(folder, chance))


@pytest.mark.long
def test_many_mutated_checkpoints_load_or_are_refused(folder: Path) -> None:
    check_each(2000, lambda chance: read_mutant(folder, FILES, False, chance))
    networks = [name for name in FILES if name.partition("/")[0] in NETWORK_FOLDERS]
    check_each(600, lambda chance: read_mutant(folder, networks, True, chance))
    check_each(2000, lambda chance: read_index(folder, chance))
