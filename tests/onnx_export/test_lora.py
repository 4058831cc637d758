"""A LoRA file in either format gives diffusers' model; a bad file is refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.choice import EngineRequest, choose_engines
from engines.lora import LoraFile, fuse, load_parts
from engines.lora_weights import LoraError
from sdxl.checkpoint import Checkpoint, find
from sdxl.params import InvalidParams
from tests.onnx_export.exports import export_tiny

RANK, ALPHA, SCALE = 4, 2.0, 0.7
ENCODERS = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
ADAPTED = (*ENCODERS, "unet")
UNET_LAYERS = ("attn1.to_q", "attn2.to_v", "to_out.0", "ff.net.2", "proj_in")
ENCODER_LAYERS = ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1")
Tensors = dict[str, Tensor]


def modules(checkpoint: Checkpoint) -> dict[str, nn.Module]:
    return {part: checkpoint.part(part) for part in ADAPTED}


def adapters(
    parts: Mapping[str, nn.Module], seed: int = 0
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Return random down and up matrices by part and layer."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for part, module in parts.items():
        wanted = UNET_LAYERS if part == "unet" else ENCODER_LAYERS
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and name.endswith(wanted):
                down = torch.randn(RANK, layer.in_features, generator=generator) / 8
                up = torch.randn(layer.out_features, RANK, generator=generator) / 8
                found[part, name] = down, up
    return found


def full_name(name: str) -> str:
    return name if name.startswith("text_model.") else f"text_model.{name}"


def in_diffusers_format(parts: Mapping[str, nn.Module], seed: int = 0) -> Tensors:
    """The names are peft's, and no alpha is stored, because the weights are already scaled."""
    tensors = {}
    for (part, name), (down, up) in adapters(parts, seed).items():
        layer = f"{part}.{name if part == 'unet' else full_name(name)}"
        tensors[f"{layer}.lora_A.weight"] = down
        tensors[f"{layer}.lora_B.weight"] = up * (ALPHA / RANK)
    return tensors


def in_kohya_format(parts: Mapping[str, nn.Module], seed: int = 0) -> Tensors:
    tensors = {}
    for (part, name), (down, up) in adapters(parts, seed).items():
        bare = name if part == "unet" else full_name(name)
        layer = ENCODERS.get(part, "lora_unet_") + bare.replace(".", "_")
        tensors[f"{layer}.lora_down.weight"] = down
        tensors[f"{layer}.lora_up.weight"] = up
        tensors[f"{layer}.alpha"] = torch.tensor(ALPHA)
    return tensors


FORMATS = {"diffusers": in_diffusers_format, "kohya": in_kohya_format}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, parts = tmp_path_factory.mktemp("loras"), modules(find("mini"))
    paths = {name: folder / f"{name}.safetensors" for name in FORMATS}
    for name, path in paths.items():
        save_file(FORMATS[name](parts), path)
    return paths


def differences(found: nn.Module, expected: nn.Module) -> float:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert set(ours) == set(theirs), "the module has not the layers that it had"
    return max(float((ours[n].float() - theirs[n].float()).abs().max()) for n in theirs)


@pytest.mark.slow
def test_fused_weights_are_those_of_diffusers(files: dict[str, Path]) -> None:
    from diffusers import StableDiffusionXLPipeline

    checkpoint = find("mini")
    pipe: Any = StableDiffusionXLPipeline.from_pretrained(
        str(checkpoint.folder), torch_dtype=torch.float32
    )
    pipe.load_lora_weights(str(files["diffusers"]))
    pipe.fuse_lora(lora_scale=SCALE)
    pipe.unload_lora_weights()
    for name, path in files.items():
        parts = modules(checkpoint)
        fuse([LoraFile(path, SCALE)], parts)
        for part in ADAPTED:
            measured = differences(parts[part], getattr(pipe, part))
            assert measured <= 1e-6, f"{name}, {part}: differ by {measured:.2e}, at most 1e-6"


def test_loras_add_up(files: dict[str, Path]) -> None:
    once, twice = modules(find("mini")), modules(find("mini"))
    fuse([LoraFile(files["kohya"], 1.0)], once)
    fuse([LoraFile(files["diffusers"], 0.25), LoraFile(files["kohya"], 0.75)], twice)
    assert differences(twice["unet"], once["unet"]) <= 1e-6


def test_only_changed_weights_are_written_beside_the_graphs(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "one.safetensors"
    save_file(in_diffusers_format({"unet": tiny.part("unet")}), path)
    lora = LoraFile(path, SCALE)
    folder = export_tiny(tiny, tmp_path / "export", loras=(lora,))
    assert folder.loras == (lora.as_dict(),)
    asked = EngineRequest("tiny", tiny, folder=str(tmp_path / "export"), takes_unchecked=True)
    assert choose_engines(asked, "auto").description["loras"] == (lora.as_dict(),)
    assert folder.graphs["unet_deep"].data == ("unet.changed.safetensors", "unet.safetensors")
    written = load_file(tmp_path / "export" / "unet.changed.safetensors")
    fused = load_parts(tiny, (lora,), "unet")["unet"]
    for name, tensor in written.items():
        assert torch.equal(tensor, fused.get_parameter(name)), name
    layers = {name for _, name in adapters({"unet": tiny.part("unet")})}
    assert set(written) == {f"{layer}.weight" for layer in layers}


def test_a_bad_file_is_one_line_that_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"a.b.weight": torch.zeros(3)}, path)
    with pytest.raises(LoraError, match=f"^lora '{path}': has the key 'a.b.weight'; expected"):
        fuse([LoraFile(path)], modules(find("mini")))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "scale"),
    [("a.safetensors", 1.0), ("a.safetensors:0.5", 0.5), ("a.safetensors:-1", -1)],
)
def test_a_scale_may_follow_the_file(
    text: str, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.safetensors").touch()
    assert LoraFile.parse(text) == LoraFile(Path("a.safetensors"), scale)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("gone.safetensors", "an existing file"),
        ("a.ckpt", "ends in .safetensors"),
        ("a.safetensors:nan", "a finite number"),
        ("a.safetensors:strong", "ends in .safetensors"),
    ],
)
def test_anything_but_a_file_and_a_scale_is_refused(
    text: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.safetensors").touch()
    with pytest.raises(InvalidParams, match=f"lora must .*{needed}"):
        LoraFile.parse(text)
