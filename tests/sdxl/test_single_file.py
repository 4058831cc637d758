"""A checkpoint in one file gives the folder's model; other files are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sdxl.checkpoint import MINI, Checkpoint, CheckpointError, find
from tests.sdxl.altered import write_inpainting
from tests.sdxl.single_files import (
    CLIP_G,
    CLIP_L,
    UNET,
    VAE,
    assert_same_weights,
    original_vae,
    saved,
    write_single_file,
)

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LABELS = [f"{UNET}label_emb.0.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]


def test_a_single_file_equals_the_folder_it_was_made_from(tmp_path: Path) -> None:
    found = find(str(write_single_file(MINI, tmp_path / "shapes.safetensors")))
    assert found.name == "shapes"
    assert found.file_digests == find("mini").file_digests
    assert (found.scheduler, found.sizes) == (find("mini").scheduler, find("mini").sizes)
    assert found.tokenizers[1].encode("a red circle") == find("mini").tokenizers[1].encode(
        "a red circle"
    )


def test_projections_of_text_have_the_names_of_other_programs_too(tmp_path: Path) -> None:
    tensors = load_file(write_single_file(MINI, tmp_path / "shapes.safetensors"))
    tensors[f"{CLIP_G}text_projection.weight"] = tensors.pop(f"{CLIP_G}text_projection").T
    tensors[f"{CLIP_L}text_projection.weight"] = torch.eye(4)
    found = find(str(saved(tensors, tmp_path / "renamed.safetensors")))
    assert found.file_digests == find("mini").file_digests


def test_a_checkpoint_made_for_inpainting_says_so_by_its_width(tmp_path: Path) -> None:
    folder = write_inpainting(tmp_path / "folder")
    found = find(str(write_single_file(folder, tmp_path / "inpainting.safetensors")))
    assert found.arch == Checkpoint("folder", folder).arch
    assert found.arch.masked_channels == 5
    assert_same_weights(found, Checkpoint("folder", folder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_stay_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    found = find(str(write_single_file(MINI, tmp_path / "half.safetensors", dtype)))
    assert_same_weights(found, find("mini"), dtype)


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_single_file(MINI, tmp_path / "shapes.safetensors")
    first = find(str(file)).folder
    monkeypatch.setattr("sdxl.single_file.folder._convert", None)
    assert find(str(file)).folder == first


@pytest.mark.slow
def test_other_weights_under_the_same_name_are_another_model(tmp_path: Path) -> None:
    file = write_single_file(MINI, tmp_path / "shapes.safetensors")
    first = find(str(file))
    write_single_file(MINI, file, torch.bfloat16)
    assert find(str(file)).digest != first.digest


@pytest.mark.parametrize(
    ("marks", "metadata", "needed"),
    [
        ((), {}, ("epsilon", False, "leading")),
        (("v_pred",), {}, ("v_prediction", False, "leading")),
        (("v_pred", "ztsnr"), {}, ("v_prediction", True, "trailing")),
        ((), {"modelspec.prediction_type": "v"}, ("v_prediction", False, "leading")),
    ],
)
def test_a_file_says_what_its_model_predicts(
    tmp_path: Path, marks: tuple[str, ...], metadata: dict[str, str], needed: Any
) -> None:
    more = {name: torch.zeros(1) for name in marks}
    file = write_single_file(MINI, tmp_path / "v.safetensors", more=more, metadata=metadata)
    read = find(str(file)).scheduler
    assert (read.prediction_type, read.rescale_betas_zero_snr, read.timestep_spacing) == needed


def test_a_vae_of_its_own_replaces_the_one_in_a_file_or_a_folder(tmp_path: Path) -> None:
    weights = load_file(next((MINI / "vae").glob("*.safetensors")))
    other = {name: tensor + 1 for name, tensor in weights.items()}
    vae = saved(original_vae(other, prefix=""), tmp_path / "other.safetensors")
    bare = write_single_file(MINI, tmp_path / "bare.safetensors", without=["vae"])
    for model in ("mini", str(bare)):
        found = find(f"{model},vae={vae}")
        (kept,) = (load_file(path) for path in found.weight_files("vae"))
        assert all(torch.equal(kept[name], other[name]) for name in other)
        assert found.config("unet") == find("mini").config("unet")
        assert found.digest != find("mini").digest
    with pytest.raises(CheckpointError, match="holds no VAE; give --vae"):
        find(str(bare))


@pytest.mark.parametrize("names", [ATTENTION, ("query", "key", "value", "proj_attn")])
def test_a_vae_with_diffusers_names_works_too(tmp_path: Path, names: tuple[str, ...]) -> None:
    weights = load_file(next((MINI / "vae").glob("*.safetensors")))
    for new, name in zip(ATTENTION, names, strict=True):
        weights = {key.replace(f".{new}.", f".{name}."): t for key, t in weights.items()}
    found = find(f"mini,vae={saved(weights, tmp_path / 'vae.safetensors')}")
    assert found.digest == find("mini").digest


def names(*keys: str, width: int = 768, channels: int = 4) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(keys, (1,))
    if UNET in keys:
        del shapes[UNET]
        shapes[f"{UNET}input_blocks.0.0.weight"] = (320, channels, 3, 3)
        to_k = "input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"
        shapes[f"{UNET}{to_k}"] = (640, width)
    return shapes


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        (names(UNET, "cond_stage_model.transformer.text_model.x"), "Stable Diffusion 1"),
        (names(UNET, width=768), "Stable Diffusion 1"),
        (names(UNET, "cond_stage_model.model.x", width=1024), "Stable Diffusion 2"),
        (names(UNET, "conditioner.embedders.0.model.x", width=1280), "the SDXL refiner"),
        (names("double_blocks.0.img_attn.norm.key_norm.scale"), "FLUX"),
        (names("model.diffusion_model.double_blocks.0.img_attn.proj.bias"), "FLUX"),
        (names("model.diffusion_model.joint_blocks.0.x"), "Stable Diffusion 3"),
        (names("lora_unet_down_blocks.lora_up.weight"), "a LoRA"),
        (names("control_model.time_embed.0.weight"), "a ControlNet"),
        (names(UNET, CLIP_L + "x", CLIP_G + "x", width=2048, channels=8), "an InstructPix2Pix"),
        (names(UNET, "cond_stage_model.transformer.x", channels=9), "Stable Diffusion 1"),
        (names("edm_mean"), "Playground 2.5"),
        (names("encoder.conv_in.bias", "decoder.conv_in.bias"), "a VAE alone"),
        (names("patchify_proj.weight"), "'ltx-video'"),
        (names("anything"), "nothing that is known"),
        (names(UNET, width=2048), "holds no first encoder, no second encoder"),
        (names(UNET, *LABELS, CLIP_L + "x", CLIP_G + "x", VAE + "x", width=2048), "lacks"),
    ],
)
def test_a_file_of_another_model_is_refused_by_name(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], kind: str
) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    file = saved(tensors, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError) as caught:
        find(str(file))
    assert str(file) in str(caught.value) and kind in str(caught.value)


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin", ".pth"])
def test_a_pickle_is_refused_unopened(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(CheckpointError, match="pickle weights can run code and are refused"):
        find(str(file))


def test_a_cut_off_download_is_refused(tmp_path: Path) -> None:
    file = write_single_file(MINI, tmp_path / "cut.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        find(str(file))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    wrong = {f"{UNET}out.2.bias": torch.zeros(5)}
    file = write_single_file(MINI, tmp_path / "wrong.safetensors", more=wrong)
    with pytest.raises(CheckpointError, match=r"unet conv_out.bias is \(5,\), expected \(4,\)"):
        find(str(file))


@pytest.mark.parametrize("name", ["time_embed.cond_proj.weight", "out.2.scale_weight", "other"])
def test_a_tensor_that_the_unet_has_no_place_for_is_named(tmp_path: Path, name: str) -> None:
    file = write_single_file(MINI, tmp_path / "lcm.safetensors", more={UNET + name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"unet has 1 tensors too many, '{UNET}{name}' the f"):
        find(str(file))


@pytest.mark.parametrize("channels", [4, 9])
def test_every_tensor_of_the_full_size_has_its_place(channels: int) -> None:
    """Names and shapes of SDXL 1.0's networks are converted to the original layout and back."""
    from sdxl.checkpoint_checks import shapes_of_network
    from sdxl.single_file.configs import SDXL_1_0
    from sdxl.single_file.conversion import parts_of
    from tests.sdxl.single_files import RENAMED

    configs = {**SDXL_1_0, "unet": {**SDXL_1_0["unet"], "in_channels": channels}}
    original: dict[str, torch.Tensor] = {}
    for part, rename in RENAMED.items():
        shapes = shapes_of_network(part, configs[part])
        wrapped = {wrapped_name(part, name): shape for name, shape in shapes.items()}
        original |= rename({n: torch.empty(s, device="meta") for n, s in wrapped.items()})
    parts = parts_of(Path("full"), original, configs)
    assert {part: len(tensors) for part, tensors in parts.items()} == {
        "text_encoder": 196,
        "text_encoder_2": 517,
        "unet": 1680,
        "vae": 248,
    }


def wrapped_name(part: str, name: str) -> str:
    is_bare = part == "text_encoder" and not name.startswith("text_model.")
    return f"text_model.{name}" if is_bare else name


def test_clips_vocabulary_is_the_published_one(tmp_path: Path) -> None:
    from sdxl.prompt import Tokenizer
    from sdxl.single_file.configs import write_tokenizer

    write_tokenizer(tmp_path / "tokenizer", "<|endoftext|>")
    tokenizer = Tokenizer.from_folder(tmp_path / "tokenizer")
    # These ids are printed in CLIP's repository and in every tutorial.
    assert tokenizer.encode("a photo of a cat") == [320, 1125, 539, 320, 2368]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (49406, 49407, 49407)
    write_tokenizer(tmp_path / "second", "!")
    assert Tokenizer.from_folder(tmp_path / "second").pad == 0
