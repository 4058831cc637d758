"""ControlNet files of every layout are read to the same weights; others are refused in one line."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.controlnets.controlnet import ControlNetModel
from diffusers.models.controlnets.controlnet_union import ControlNetUnionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.control_weights import CONFIG, DIFFUSERS_FILE, LORA_MARK, ControlFile, read_control
from engines.lora_weights import LoraError
from sdxl.checkpoint import Checkpoint, find
from sdxl.networks.control import control_networks
from sdxl.single_file import configs
from tests.sdxl.altered import write_inpainting
from tests.sdxl.control_nets import (
    HINT_WIDTHS,
    MEDIUM,
    SMALL,
    architecture_of,
    changed,
    diffusers_residuals,
    mini_unet,
    random_control,
    random_tensors,
    random_union,
)
from tests.sdxl.single_files import UNET, original_unet

Tensors = dict[str, Tensor]
RANK = 3
HINT_LAYERS = {"conv_in": 0, **{f"blocks.{n}": 2 * n + 2 for n in range(6)}, "conv_out": 14}


def tensors_of(net: nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def in_stability_layout(tensors: Mapping[str, Any], prefix: str = "control_model.") -> Any:
    """Rename the tensors as in stable-diffusion-webui and ComfyUI."""
    made = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if layer.startswith("controlnet_cond_embedding."):
            theirs = f"input_hint_block.{HINT_LAYERS[layer.partition('.')[2]]}.{kind}"
        elif layer.startswith("controlnet_down_blocks."):
            theirs = f"zero_convs.{layer.rpartition('.')[2]}.0.{kind}"
        elif layer == "controlnet_mid_block":
            theirs = f"middle_block_out.0.{kind}"
        else:
            theirs = next(iter(original_unet({name: tensor}))).removeprefix(UNET)
        made[prefix + theirs] = tensor
    return made


def write(path: Path, tensors: Tensors) -> Path:
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, path)
    return path


def write_plain(folder: Path, net: Any) -> Path:
    return write(folder / "net.safetensors", tensors_of(net))


def write_folder(folder: Path, net: Any) -> Path:
    write(folder / DIFFUSERS_FILE, tensors_of(net))
    (folder / CONFIG).write_text(json.dumps(dict(net.config)))
    return folder


def write_stability(folder: Path, net: Any) -> Path:
    return write(folder / "net.safetensors", in_stability_layout(tensors_of(net)))


def write_bare_stability(folder: Path, net: Any) -> Path:
    return write(folder / "net.safetensors", in_stability_layout(tensors_of(net), ""))


NETS: Mapping[str, Callable[[], Any]] = {
    "full": random_control,
    "medium": lambda: random_control(**MEDIUM),
    "small": lambda: random_control(**SMALL),
    "union": lambda: random_union(types=6),
    "promax": lambda: random_union(types=8),
}
LAYOUTS = (write_plain, write_folder, write_stability, write_bare_stability)
CASES = [
    (name, layout) for layout in LAYOUTS[:2] for name in NETS
] + [("full", layout) for layout in LAYOUTS[2:]]  # fmt: skip


def check_weights(found: nn.Module, expected: Mapping[str, Tensor]) -> None:
    tensors = found.state_dict()
    assert tensors.keys() == expected.keys()
    wrong = [name for name, each in expected.items() if not torch.equal(tensors[name], each)]
    assert not wrong, f"{len(wrong)} tensors differ, such as {wrong[0]}"


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_layout_is_read_to_the_same_weights(name: str, layout: Any, tmp_path: Path) -> None:
    net = NETS[name]()
    found = read_control(layout(tmp_path, net), find("mini"))
    assert found.architecture == architecture_of(net)
    assert found.numbers == sum(each.numel() for each in net.state_dict().values())
    check_weights(found.network(), net.state_dict())


def test_half_precision_is_read(tmp_path: Path) -> None:
    halves = {name: each.half() for name, each in tensors_of(random_control()).items()}
    found = read_control(write(tmp_path / "net.safetensors", halves), find("mini"))
    check_weights(found.network(), {name: each.float() for name, each in halves.items()})


def test_a_net_that_reads_blue_first_equals_diffusers(tmp_path: Path) -> None:
    """Other nets read red first. The loader reverses the weights' channels, not the hints'."""
    net = changed(random_control(), controlnet_conditioning_channel_order="bgr")
    net.load_state_dict(random_control().state_dict())
    t = random_tensors(1, 16, 16)
    expected = diffusers_residuals(net, t)
    networks = control_networks(read_control(write_folder(tmp_path, net), find("mini")).network())
    ready = networks["control_prompt"](t["context"], t["pooled"], t["time_ids"], t["hint"])
    found = networks["control_deep"](t["sample"], t["timestep"], torch.ones(1, 10), *ready)
    for each, other in zip(found, expected, strict=True):
        assert (each - other).norm() <= 1e-5 * other.norm()


def control_lora(seed: int = 0) -> tuple[Tensors, Tensors]:
    """Return a Control-LoRA's tensors, and the equivalent net's weights. As in Stability AI's
    files, weights have matrices, everything else is whole, and the second level has no matrices."""
    generator = torch.Generator().manual_seed(seed)
    own, unet = tensors_of(random_control(seed)), mini_unet().state_dict()
    made: Tensors = {}
    for name, tensor in list(own.items()):
        if name not in unet or tensor.dim() < 2:
            made[name] = tensor
        elif name.startswith("down_blocks.1."):
            own[name] = unet[name]
        else:
            outputs, *inputs = tensor.shape
            up = torch.randn(outputs, RANK, *[1] * len(inputs[1:]), generator=generator) * 0.05
            down = torch.randn(RANK, *inputs, generator=generator) * 0.05
            layer = name.removesuffix(".weight")
            made |= {f"{layer}.up": up, f"{layer}.down": down}
            own[name] = unet[name] + (up.flatten(1) @ down.flatten(1)).view_as(tensor)
    return in_stability_layout(made, "") | {LORA_MARK: torch.zeros(0)}, own


def test_a_control_lora_is_its_merged_net(tmp_path: Path) -> None:
    tensors, expected = control_lora()
    assert sum(each.numel() for each in tensors.values()) < 0.7 * sum(
        each.numel() for each in expected.values()
    )
    found = read_control(write(tmp_path / "lora.safetensors", tensors), find("mini"))
    assert found.architecture == architecture_of(random_control())
    check_weights(found.network(), expected)


# -- files for other models -------------------------------------------------------------------


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write a sparse file of half-precision zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def shapes_on_meta(kind: Any, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in kind(**config).state_dict().items()}


def test_a_model_for_inpainting_takes_nets_and_refuses_control_loras(tmp_path: Path) -> None:
    """A net reads only the latents, so the weights that a Control-LoRA adds to are missing."""
    model = Checkpoint("masked", write_inpainting(tmp_path / "model"))
    net = random_control()
    check_weights(read_control(write_plain(tmp_path, net), model).network(), net.state_dict())
    lora = write(tmp_path / "lora.safetensors", control_lora()[0])
    with pytest.raises(
        LoraError, match=r"conv_in.weight is \(32, 4, 3, 3\); it is \(32, 9, 3, 3\) here"
    ):
        read_control(lora, model)


@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
def test_a_control_lora_equals_diffusers(tmp_path: Path) -> None:
    """The biases are the UNet's: diffusers ignores the file's biases of layers with matrices."""
    tensors, unet = control_lora()[0], original_unet(mini_unet().state_dict())
    for layer in [name.removesuffix(".up") for name in tensors if name.endswith(".up")]:
        if f"{layer}.bias" in tensors:
            tensors[f"{layer}.bias"] = unet[f"{UNET}{layer}.bias"]
    file = write(tmp_path / "lora.safetensors", tensors)
    net = ControlNetModel.from_unet(mini_unet(), conditioning_embedding_out_channels=HINT_WIDTHS)
    net.load_lora_adapter(str(tmp_path), weight_name=file.name, prefix=None, use_safetensors=True)
    t = random_tensors(2, 16, 16)
    own = read_control(file, find("mini")).network()
    with torch.inference_mode():
        pairs = zip(diffusers_residuals(own, t), diffusers_residuals(net.eval(), t), strict=True)
        distances = [float((each - other).norm() / other.norm()) for each, other in pairs]
    assert max(distances) <= 1e-5, distances


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """SDXL 1.0's configs and UNet at full size."""
    folder = tmp_path_factory.mktemp("sdxl")
    (folder / "model_index.json").write_text("{}")
    for part, config in configs.SDXL_1_0.items():
        (folder / part).mkdir()
        (folder / part / CONFIG).write_text(json.dumps(config))
    return Checkpoint("sdxl", folder)


XL = {
    name: value
    for name, value in configs.SDXL_1_0["unet"].items()
    if name not in ("up_block_types", "out_channels", "sample_size")
}
XL_SMALL = {**XL, **SMALL}
XL_UNION = {**XL, "num_control_type": 8}


@pytest.mark.parametrize(
    ("kind", "config", "count", "types"),
    [
        (ControlNetModel, XL, 34, 0),
        (ControlNetModel, {**XL, **MEDIUM}, 3, 0),
        (ControlNetModel, XL_SMALL, 0, 0),
        (ControlNetUnionModel, XL_UNION, 34, 8),
    ],
)
def test_files_of_sdxls_real_size_are_recognised(
    kind: Any, config: Any, count: int, types: int, sdxl: Checkpoint, tmp_path: Path
) -> None:
    shapes = shapes_on_meta(kind, config)
    found = read_control(write_header(tmp_path / "net.safetensors", shapes), sdxl)
    assert found.shapes == shapes
    assert (len(found.architecture.attention_widths), found.architecture.types) == (count, types)


def test_a_net_for_sdxl_is_not_for_the_embedded_model(tmp_path: Path) -> None:
    file = write_header(tmp_path / "net.safetensors", shapes_on_meta(ControlNetModel, XL))
    with pytest.raises(LoraError, match=r"^is for another model: its context is 2048 wide; expec"):
        read_control(file, find("mini"))
    small = write_header(tmp_path / "small.safetensors", shapes_on_meta(ControlNetModel, XL_SMALL))
    with pytest.raises(LoraError, match=r"^is for another model: conv_in.weight has shape \(320, "):
        read_control(small, find("mini"))


def of_context(width: int) -> Any:
    return shapes_on_meta(ControlNetModel, {"cross_attention_dim": width})


FOREIGN: Mapping[str, tuple[Callable[[], Any], str]] = {
    "SD 1.5": (lambda: of_context(768), "is for Stable Diffusion 1;"),
    "SD 1.5, Stability AI's layout": (
        lambda: {
            "control_model.input_hint_block.0.weight": (16, 3, 3, 3),
            "control_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768),
        },
        "is for Stable Diffusion 1;",
    ),
    "SD 2": (lambda: of_context(1024), "is for Stable Diffusion 2;"),
    "SD 3": (lambda: {"pos_embed_input.proj.weight": (8, 4)}, "is for Stable Diffusion 3;"),
    "FLUX": (lambda: {"controlnet_x_embedder.weight": (8, 4)}, "is for FLUX;"),
    "T2I-Adapter": (lambda: {"adapter.conv_in.weight": (8, 4, 3, 3)}, "is a T2I-Adapter;"),
    "IP-Adapter": (lambda: {"ip_adapter.1.to_k_ip.weight": (8, 4)}, "is an IP-Adapter;"),
    "LoRA": (lambda: {"lora_unet_x.lora_down.weight": (8, 4)}, "is a LoRA;"),
    "UNet": (lambda: shapes_of(mini_unet()), "is a UNet;"),
    "checkpoint": (lambda: {f"{UNET}input_blocks.0.0.weight": (8, 4, 3, 3)}, "is a checkpoint;"),
    "LLLite": (lambda: {"lllite_unet_input.conditioning1.0.bias": (8,)}, "is a ControlNet-LLLite;"),
    "VAE": (lambda: {"decoder.conv_in.weight": (8, 4, 3, 3)}, "is a VAE;"),
    "anything": (lambda: {"weight": (8, 4)}, "is nothing that is known;"),
    "nothing": (dict, "is nothing that is known;"),
}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in module.state_dict().items()}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_kinds_are_refused_by_name(name: str, tmp_path: Path) -> None:
    shapes, message = FOREIGN[name]
    file = write_header(tmp_path / "file.safetensors", shapes())
    with pytest.raises(LoraError, match=f"^{message} expected a ControlNet of SDXL"):
        read_control(file, find("mini"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("norm_eps", 1e-4, r"has norm_eps 0.0001 in config.json; expected 1e-05"),
        ("attention_head_dim", [1, 2, 4], r"has attention_head_dim \[1.*; expected \[2, 4, 5\]"),
        ("global_pool_conditions", True, "has global_pool_conditions True.*; expected False"),
        ("controlnet_conditioning_channel_order", "grb", "'grb' .*; expected 'rgb' or 'bgr'"),
    ],
)
def test_a_config_that_shapes_do_not_show_is_compared(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, random_control())
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {name: value}))
    with pytest.raises(LoraError, match=message):
        read_control(folder, find("mini"))


# -- damaged files ----------------------------------------------------------------------------


def flipped(path: Path, rng: random.Random) -> None:
    """Change bytes in the header or after it."""
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little") if rng.random() < 0.8 else len(content)
    for _ in range(rng.choice([1, 1, 3, 40])):
        content[rng.randrange(end)] = rng.randrange(256)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def rearranged(path: Path, rng: random.Random) -> None:
    """Change a tensor's name, shape, type or numbers, or leave it out."""
    tensors = load_file(path)
    for _ in range(rng.choice([1, 1, 5])):
        name = rng.choice(sorted(tensors))
        tensor = tensors.pop(name)
        change = rng.randrange(6)
        if change == 0:
            digit = rng.choice(["0", "7", "99999", "-1"])
            tensors[re.sub(r"\d+", digit, name, count=1)] = tensor
        elif change == 1:
            tensors[name] = tensor.flatten()[: rng.randrange(3)]
        elif change == 2:
            tensors[name] = tensor.to(rng.choice([torch.int8, torch.float64, torch.bfloat16]))
        elif change == 3:
            tensors[name] = torch.full_like(tensor, rng.choice([math.nan, math.inf]))
        elif change == 4:
            tensors[name], tensors[f"{name}.{rng.choice(['up', 'down', 'lora_A'])}"] = (
                tensor,
                tensor,
            )
    write(path, tensors)


DAMAGED: Mapping[str, Callable[[], Tensors]] = {
    "diffusers": lambda: tensors_of(random_control()),
    "stability": lambda: in_stability_layout(tensors_of(random_control())),
    "union": lambda: tensors_of(random_union()),
    "control-lora": lambda: control_lora()[0],
}


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", DAMAGED)
def test_damaged_files_are_refused_in_one_line_or_read_whole(
    layout: str, count: int, tmp_path: Path
) -> None:
    halves = {name: each.half() for name, each in DAMAGED[layout]().items()}
    path = write(tmp_path / "net.safetensors", halves)
    whole, rng, refused = path.read_bytes(), random.Random(layout), 0
    for number in range(count):
        path.write_bytes(whole)
        rng.choice([flipped, cut, rearranged])(path, rng)
        try:
            found: ControlFile = read_control(path, find("mini"))
            for name, each in found.network().state_dict().items():
                assert tuple(each.shape) == found.shapes[name], (number, name)
        except LoraError as error:
            refused += 1
            line = str(error)
            assert "\n" not in line and 10 < len(line) < 400, (number, line)
            assert str(tmp_path) not in line, "a server's path is no client's business"
    assert 0.6 * count <= refused < count, refused
