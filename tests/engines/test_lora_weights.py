"""LoRA files of every layout are read for SDXL's layers; other files are refused in one line."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextConfig

from engines.lora import layers_of
from engines.lora_weights import LoraError, LowRank, read_lora
from sdxl.checkpoint_checks import network_class
from sdxl.single_file.configs import SDXL_1_0
from tests.mutants import change_bytes
from tests.sdxl.single_files import UNET, original_unet

Tensors = dict[str, Tensor]
RANK, ALPHA = 2, 0.5
TO_Q = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
CONV = "unet.down_blocks.1.resnets.0.conv1"
FC1 = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
SMALL = {TO_Q: (8, 6), CONV: (8, 4, 3, 3), FC1: (12, 5)}


@pytest.fixture(scope="module")
def sdxl() -> dict[str, tuple[int, ...]]:
    """The shapes of SDXL's layers at their real sizes."""
    clip_l = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12)
    clip_g = CLIPTextConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, projection_dim=1280
    )
    with torch.device("meta"):
        parts = {
            "unet": network_class("unet")(**SDXL_1_0["unet"]),
            "text_encoder": network_class("text_encoder")(clip_l),
            "text_encoder_2": network_class("text_encoder_2")(clip_g),
        }
    shapes = layers_of(parts)
    assert len(shapes) == 794 + 6 * 12 + 6 * 32 + 1, "all linear layers and convolutions"
    return shapes


def random_pairs(shapes: Mapping[str, tuple[int, ...]], rank: int = RANK) -> dict[str, Any]:
    """Return down and up of each layer as in files, where a convolution's have kernels."""
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for name, (outputs, *inputs) in shapes.items():
        down = torch.randn(rank, *inputs, generator=generator).half()
        up = torch.randn(outputs, rank, *[1] * len(inputs[1:]), generator=generator).half()
        pairs[name] = down, up
    return pairs


def without(part: str) -> str:
    return part.partition(".")[2]


def as_kohya(layer: str, name: str) -> str:
    part = layer.partition(".")[0]
    start = {"unet": "unet", "text_encoder": "te1", "text_encoder_2": "te2"}[part]
    return f"lora_{start}_" + full_text_name(layer, name).replace(".", "_")


def full_text_name(layer: str, name: str) -> str:
    """Return a text encoder's layer name as in files, which follow transformers 4."""
    is_short = layer.startswith("text_encoder") and name.startswith("encoder.")
    return f"text_model.{name}" if is_short else name


def in_stability_names(layer: str) -> str:
    name = without(layer)
    if layer.startswith("unet."):
        (name,) = original_unet({f"{name}.weight": torch.empty(0)})
        name = name.removeprefix(UNET).removesuffix(".weight")
    return as_kohya(layer, name)


def in_old_diffusers_names(layer: str) -> str:
    name = f"{layer.partition('.')[0]}.{full_text_name(layer, without(layer))}"
    name = re.sub(r"(attn[12])\.to_(q|k|v|out)(\.0)?$", r"\1.processor.to_\2_lora", name)
    name = re.sub(r"self_attn\.(q|k|v|out)_proj$", r"self_attn.to_\1_lora", name)
    return name if name.endswith("_lora") else f"{name}.lora_linear_layer"


def as_comfy(layer: str, unet: str = "diffusion_model.", clip: str = "clip_{}.") -> str:
    part, _, name = layer.partition(".")
    starts = {"unet": unet, "text_encoder": clip.format("l"), "text_encoder_2": clip.format("g")}
    return starts[part] + full_text_name(layer, name)


@dataclass(frozen=True)
class Layout:
    """A program's names of a layer and of its two matrices."""

    name: Callable[[str], str]
    sides: tuple[str, str]
    parts: tuple[str, ...] = ("unet", "text_encoder", "text_encoder_2")
    has_alpha: bool = False

    def tensors(self, pairs: Mapping[str, Any]) -> Tensors:
        tensors = {}
        for layer, matrices in pairs.items():
            for side, matrix in zip(self.sides, matrices, strict=True):
                tensors[f"{self.name(layer)}.{side}.weight"] = matrix
            if self.has_alpha:
                tensors[f"{self.name(layer)}.alpha"] = torch.tensor(ALPHA)
        return tensors


DOWN_UP, A_B = ("lora_down", "lora_up"), ("lora_A", "lora_B")
LAYOUTS = {
    "kohya, Stability AI's names": Layout(in_stability_names, DOWN_UP, has_alpha=True),
    "kohya, diffusers' names": Layout(
        lambda layer: as_kohya(layer, without(layer)), DOWN_UP, has_alpha=True
    ),
    "diffusers": Layout(str, A_B),
    "diffusers, 0.2x": Layout(str, ("lora.down", "lora.up")),
    "diffusers, 0.1x": Layout(in_old_diffusers_names, ("down", "up")),
    "of the UNet alone": Layout(without, A_B, ("unet",)),
    "ComfyUI": Layout(as_comfy, A_B),
    "ComfyUI, whole names": Layout(
        lambda layer: as_comfy(
            layer, "model.diffusion_model.", "text_encoders.clip_{}.transformer."
        ),
        DOWN_UP,
    ),
    "an adapter's name": Layout(str, ("lora_A.default_0", "lora_B.default_0")),
    "PEFT": Layout(lambda layer: "base_model.model." + without(layer), A_B, ("unet",)),
}


def file_of(folder: Path, tensors: Tensors, config: Any = None, **metadata: str) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path, metadata or None)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return path


def check(found: Mapping[str, LowRank], pairs: Mapping[str, Any], strength: float = 1.0) -> None:
    assert set(found) == set(pairs)
    for layer, (down, up) in pairs.items():
        torch.testing.assert_close(found[layer].down, down.float().flatten(1), rtol=0, atol=0)
        torch.testing.assert_close(found[layer].up, up.float().flatten(1) * strength)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_for_all_layers_of_sdxl(
    name: str, sdxl: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    pairs = random_pairs({k: v for k, v in sdxl.items() if k.partition(".")[0] in layout.parts})
    path = file_of(tmp_path, layout.tensors(pairs), {"lora_alpha": ALPHA})
    is_scaled = layout.has_alpha or name == "PEFT"
    check(read_lora(path, sdxl), pairs, ALPHA / RANK if is_scaled else 1.0)


def test_two_convolutions_are_the_change_of_one(tmp_path: Path) -> None:
    pairs = random_pairs({CONV: SMALL[CONV]})
    found = read_lora(file_of(tmp_path, LAYOUTS["diffusers"].tensors(pairs)), SMALL)[CONV]
    x, (down, up) = torch.randn(1, 4, 5, 5), (each.float() for each in pairs[CONV])
    expected = F.conv2d(F.conv2d(x, down, padding=1), up)
    changed = F.conv2d(x, (found.up @ found.down).view(SMALL[CONV]), padding=1)
    torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "alpha"), [({}, 3.0), ({"to_q": 5}, 5.0), ({"^down.x$": 5, "attn1\\.to_q": 7}, 7.0)]
)
def test_peft_s_configuration_gives_each_layers_alpha(
    pattern: dict[str, float], alpha: float, tmp_path: Path
) -> None:
    pairs = random_pairs({TO_Q: SMALL[TO_Q]})
    config = {"lora_alpha": 3, "alpha_pattern": pattern}
    beside = file_of(tmp_path, LAYOUTS["PEFT"].tensors(pairs), config)
    check(read_lora(beside, SMALL), pairs, alpha / RANK)
    inside = {f"unet.{key}": value for key, value in config.items()}
    tensors, text = LAYOUTS["diffusers"].tensors(pairs), json.dumps(inside)
    check(
        read_lora(file_of(tmp_path, tensors, lora_adapter_metadata=text), SMALL), pairs, alpha / 2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 128])
def test_ranks_and_types_of_real_files_are_read(
    rank: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    pairs = {k: (d.to(dtype), u.to(dtype)) for k, (d, u) in random_pairs(SMALL, rank).items()}
    check(read_lora(file_of(tmp_path, LAYOUTS["diffusers"].tensors(pairs)), SMALL), pairs)


def wrong_files() -> dict[str, tuple[Tensors, str]]:
    down, up, kohya = torch.ones(2, 6), torch.ones(8, 2), as_kohya(TO_Q, without(TO_Q))
    sd1 = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"

    def pair(name: str = kohya, down: Tensor = down, up: Tensor = up, **more: Tensor) -> Tensors:
        others = {f"{name}.{key}": tensor for key, tensor in more.items()}
        return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, **others}

    in_8_bits = up.to(torch.float8_e4m3fn)
    other = "which is not supported .*; expected a LoRA or LoCon"
    return {
        "DoRA": (pair(dora_scale=up), f"is a DoRA, {other}"),
        "DoRA of PEFT": ({f"{TO_Q}.lora_magnitude_vector": up}, f"is a DoRA, {other}"),
        "LoHa": ({f"{kohya}.hada_w1_a": up}, f"is a LoHa, {other}"),
        "LoKr": ({f"{kohya}.lokr_w1": up}, f"is a LoKr, {other}"),
        "OFT": ({f"{kohya}.oft_blocks": up}, f"is an OFT, {other}"),
        "Tucker": ({f"{kohya}.lora_mid.weight": up}, f"is a Tucker decomposition, {other}"),
        "full": (
            {f"{kohya}.diff": up, f"{kohya}.diff_b": up},
            f"is a file of full weights, {other}",
        ),
        "embeddings": (
            pair() | {"bundle_emb.ink.clip_l": up},
            f"is a LoRA with embeddings in it, {other}",
        ),
        "SD 1.5's layer": (pair(sd1), f"is for another model: no layer here for '{sd1}"),
        "SD 1.5's encoder": (pair("lora_te_text_model_encoder_layers_0_mlp_fc1"), "no layer here"),
        "SD 1.5's width": (
            pair(down=torch.ones(2, 5)),
            r"another model.*to_q have the shapes \(2, 5\) and \(8, 2\), expected \(rank, 6\)",
        ),
        "FLUX": (pair("transformer.single_transformer_blocks.0.attn.to_q"), "no layer here"),
        "empty": ({}, "has nothing in it"),
        "one key more": (pair(scale=up), r"has the key .*\.scale'; expected names of LoRA"),
        "a bias": (pair() | {f"{kohya}.lora_up.bias": up}, r"has the key .*\.lora_up\.bias'"),
        "an embedding": ({"clip_l": up, "clip_g": up}, "has the key 'clip_"),
        "one matrix": ({f"{kohya}.lora_down.weight": down}, f"has no up matrix for {TO_Q}"),
        "alpha alone": ({f"{kohya}.alpha": down}, f"has no down matrix for {TO_Q}"),
        "two of one": (pair() | pair(TO_Q), "for one matrix"),
        "rank 129": (pair(down=torch.ones(129, 6), up=torch.ones(8, 129)), "has rank 129 in"),
        "rank 0": (pair(down=torch.ones(0, 6), up=torch.ones(8, 0)), "has rank 0 in"),
        "two ranks": (pair(down=torch.ones(4, 6)), "has rank 4 and 2 in"),
        "a wide up": (pair(up=torch.ones(8, 2, 3, 3)), "is for another model"),
        "alphas": (pair(alpha=torch.ones(2)), r"more than one number in .*alpha'"),
        "NaN": (pair(down=down * torch.nan), f"has numbers in {TO_Q} that are not finite"),
        "infinite": (pair(up=up / 0), "not finite"),
        "NaN alpha": (pair(alpha=torch.tensor(torch.nan)), "not finite"),
        "8 bits": (pair(up=in_8_bits), r"lora_up.weight' in F8_E4M3; expected one of"),
        "whole numbers": (pair(up=up.to(torch.int8)), "in I8; expected one of F32, F16, BF16"),
    }


@pytest.mark.parametrize("case", wrong_files())
def test_what_cannot_be_used_wholly_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    tensors, message = wrong_files()[case]
    with pytest.raises(LoraError, match=f"(?m)^.*{message}.*$") as caught:
        read_lora(file_of(tmp_path, tensors), SMALL)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "expected adapter_model.safetensors, and adapter_config.json beside it"),
        ([], "has no object in adapter_config.json"),
        ({}, "has the alpha None for"),
        ({"lora_alpha": "4"}, "has the alpha '4' for"),
        ({"lora_alpha": float("nan")}, "has the alpha nan for"),
        ({"lora_alpha": 4, "use_dora": True}, "has use_dora, which is not supported"),
        ({"lora_alpha": 4, "use_rslora": True}, "has use_rslora, which is not supported"),
        ({"lora_alpha": 4, "alpha_pattern": []}, ""),
        ({"lora_alpha": 4, "alpha_pattern": [1]}, "alpha_pattern that is no object"),
        ({"lora_alpha": 4, "alpha_pattern": {".*q": 1}}, "expected names of layers"),
        ({"lora_alpha": 4, "alpha_pattern": {"to_q": {}}}, "has the alpha {} for"),
    ],
)
def test_a_configuration_of_peft_must_be_understood(
    config: Any, message: str, tmp_path: Path
) -> None:
    tensors = LAYOUTS["PEFT"].tensors(random_pairs({TO_Q: SMALL[TO_Q]}))
    path = file_of(tmp_path, tensors, config)
    if not message:
        assert set(read_lora(path, SMALL)) == {TO_Q}
        return
    with pytest.raises(LoraError, match=message):
        read_lora(path, SMALL)


def test_a_renamed_file_of_peft_lacks_its_configuration(tmp_path: Path) -> None:
    tensors = LAYOUTS["PEFT"].tensors(random_pairs({TO_Q: SMALL[TO_Q]}))
    path = file_of(tmp_path, tensors, {"lora_alpha": 4}).rename(tmp_path / "ink.safetensors")
    with pytest.raises(LoraError, match="adapter_config.json beside it"):
        read_lora(path, SMALL)


class _Payload:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "a.safetensors", tmp_path / "a.pt"):
        path.write_bytes(pickle.dumps(_Payload()))
        with pytest.raises(LoraError, match="is not a whole safetensors file"):
            read_lora(path, SMALL)
    assert not (tmp_path / "ran").exists()


def mutated(rng: random.Random) -> bytes:
    """Return a file with some of its keys, tensors or bytes changed."""
    layout = LAYOUTS[rng.choice(["kohya, diffusers' names", "diffusers", "PEFT"])]
    tensors = layout.tensors(random_pairs(SMALL, rng.choice([1, 2, 128, 129])))
    for key in rng.sample(sorted(tensors), rng.randint(0, 3)):
        tensor = tensors.pop(key)
        match rng.randrange(7):
            case 0:
                at = rng.randrange(len(key))
                tensors[key[:at] + rng.choice(["", ".", "_", "0", "é"]) + key[at + 1 :]] = tensor
            case 1:
                tensors[key] = torch.full_like(tensor, rng.choice([torch.nan, torch.inf, 0]))
            case 2:
                kinds = (torch.float64, torch.int8, torch.bool, torch.bfloat16, torch.float8_e5m2)
                tensors[key] = tensor.to(rng.choice(kinds))
            case 3:
                tensors[key] = torch.zeros([rng.randrange(4) for _ in range(rng.randrange(5))])
            case 4:
                tensors[key] = tensor.flatten()
            case 5:
                tensors[key + rng.choice([".weight", ".bias", "_b", ""])] = tensor
    metadata = {"lora_adapter_metadata": rng.choice(["", "{", "[]", '{"unet.lora_alpha": 1}'])}
    whole = save(tensors, metadata if rng.random() < 0.2 else None)
    return change_bytes(whole, rng) if rng.random() < 0.7 else whole


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_file_is_read_or_refused_in_one_line(seed: int, tmp_path: Path) -> None:
    rng, path = random.Random(seed), tmp_path / "adapter_model.safetensors"
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 1}')
    outcomes = {True: 0, False: 0}
    for _ in range(50):
        path.write_bytes(mutated(rng))
        try:
            found = read_lora(path, SMALL)
        except LoraError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        for layer, change in found.items():
            assert (change.up @ change.down).numel() == math.prod(SMALL[layer])
            assert bool(torch.isfinite(change.up).all()) and bool(torch.isfinite(change.down).all())
    assert all(outcomes.values()), f"read and refused: {outcomes}"
