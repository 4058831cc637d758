"""Parameters that other programs write into pictures are read if they have a meaning here."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sdxl.attachments import Lora
from sdxl.controls import Control
from sdxl.image_prompts import ImagePrompt
from sdxl.infotext import parameters_text, read_graph, read_text, scheduler_of
from sdxl.params import GenerationParams
from sdxl.scheduler_names import SCHEDULE_LABELS, SCHEDULERS

# Written by stable-diffusion-webui 1.10.
A1111 = """a red <lora:detail:0.8>circle, (masterpiece:1.2)
on a blue background
Negative prompt: blurry, <lora:pixel:1:0.5> low quality
Steps: 30, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 1234567890, \
Size: 832x1216, Model hash: 31e35c80fc, Model: sd_xl_base_1.0, Clip skip: 2, \
Lora hashes: "detail: 7ae3a8f1c8e2, pixel: 1f2e3d4c5b6a", Version: v1.10.1"""


def test_the_webuis_text_is_read_and_the_rest_is_reported() -> None:
    found = read_text(A1111)
    assert found.params == {
        "prompt": "a red circle, (masterpiece:1.2)\non a blue background",
        "loras": [
            {"name": "detail", "weight": 0.8, "text_weight": None},
            {"name": "pixel", "weight": 0.5, "text_weight": 1.0},
        ],
        "negative_prompt": "blurry, low quality",
        "steps": 30,
        "scheduler": "dpmpp_2m_karras",
        "guidance": 6.5,
        "seed": 1234567890,
        "width": 832,
        "height": 1216,
    }
    assert "Clip skip: 2" in found.unread and "Version: v1.10.1" in found.unread
    GenerationParams.from_dict(found.params)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_is_written_is_read_again(scheduler: str) -> None:
    params = GenerationParams(
        prompt='a "red", circle: yes\nSteps of stone',
        negative_prompt="no, none",
        scheduler=scheduler,
        width=128,
        height=96,
        seed=2**63 - 1,
        steps=8,
        deep_steps=(0, 2, 5),
        guidance_interval=(0.0, 0.6),
        guided_steps=(1, 2),
        loras=(Lora("sub/a b", 0.8), Lora("c", -0.123456789, 0.0)),
    )
    files = {lora.name: {"sha256": "", "short": "7ae3a8f1c8e2"} for lora in params.loras or ()}
    text = parameters_text({**params.as_dict(), "lora_files": files})
    assert "of stone <lora:sub/a b:0.8> <lora:c:0:-0.123456789>" in text
    assert 'Lora hashes: "sub/a b: 7ae3a8f1c8e2, c: 7ae3a8f1c8e2"' in text
    found = read_text(text)
    assert GenerationParams.from_dict(found.params) == params and not found.unread
    assert found.params["scheduler"] == scheduler


UNIT = Control("edges", "", 0.8, 0, 0.6, preprocess="canny", low=50, resize="crop")
# Written by sd-webui-controlnet 1.1.455.
WEBUI_UNIT = (
    "Module: canny, Model: edges [1a2b3c4d], Weight: 0.8, Resize Mode: Crop and Resize, "
    "Processor Res: 512, Threshold A: 50, Threshold B: 200, Guidance Start: 0.0, "
    "Guidance End: 0.6, Pixel Perfect: True, Control Mode: Balanced"
)
DEPTH = WEBUI_UNIT.replace("canny", "depth_zoe").replace("50", "-1")


@pytest.mark.parametrize(
    ("text", "controls", "unread"),
    [
        (WEBUI_UNIT, [UNIT], []),
        (
            DEPTH.replace("Balanced", "ControlNet is more important").replace("Crop and", "Just"),
            [Control("edges", "", 0.8, 0, 0.6, mode="control", resize="stretch")],
            ["ControlNet 0: Module: depth_zoe"],
        ),
        (f"{WEBUI_UNIT}, Hr Option: Both", [UNIT], ["ControlNet 0: Hr Option: Both"]),
        ("Module: canny, Model: a, Weight: x", [], ["ControlNet 0: Module: canny, Model: a, "]),
        ("Module: canny, Weight: 1", [], ["ControlNet 0: Module"]),
        ("preprocessor: canny, starting/ending: (0, 1)", [], ["ControlNet 0: preprocessor"]),
        (WEBUI_UNIT.replace("50", "1e999"), [], ["ControlNet 0: Module"]),
    ],
)
def test_the_webuis_controlnets_are_read_without_their_maps(
    text: str, controls: list[Control], unread: list[str]
) -> None:
    found = read_text(f'a cat\nSteps: 8, Seed: 1, CFG scale: 5, ControlNet 0: "{text}"')
    found.params |= {"width": 64, "height": 64}
    assert list(GenerationParams.from_dict(found.params).controls or ()) == controls
    assert len(found.unread) == len(unread), found.unread
    assert all(map(str.startswith, found.unread, unread)), found.unread


def test_controlnets_are_written_as_the_webui_does_and_read_again() -> None:
    second = Control("sub/depth", "d" * 64, 1.25, 0.1, 1, mode="guess", resize="fill")
    params = GenerationParams("a", width=64, height=64, seed=1, controls=(UNIT, second))
    files = {"edges": {"sha256": "", "short": "1a2b3c4d"}}
    text = parameters_text({**params.as_dict(), "control_files": files})
    written = WEBUI_UNIT.replace("Processor Res: 512, ", "").replace("0.0", "0")
    assert f'ControlNet 0: "{written}"' in text
    assert 'ControlNet 1: "Module: none, Model: sub/depth, Weight: 1.25, ' in text
    found = read_text(text)
    assert not found.unread and found.params["controls"] == [
        asdict(UNIT),
        asdict(replace(second, image="", mode="control")),
    ]


@pytest.mark.parametrize("text", ["", "a cat", "Steps: 20", "Negative prompt:", ":::,,,\n,:,"])
def test_any_text_is_read(text: str) -> None:
    assert isinstance(read_text(text).params["prompt"], str)


@pytest.mark.parametrize("part", [" ", "a", "/ ", '"', 'ab: "', "ab:\\", "a:"])
def test_a_long_text_is_read_in_linear_time(part: str) -> None:
    assert read_text("a cat\nx" + part * 1_000_000 + "!").params["prompt"].startswith("a cat")


@pytest.mark.parametrize(
    ("sampler", "schedule", "name"),
    [
        ("Euler a", "Automatic", "euler_a"),
        ("Euler", "", "euler"),
        ("DPM++ 2M Karras", "", "dpmpp_2m_karras"),
        ("DPM++ 2M", "Automatic", "dpmpp_2m_karras"),
        ("DPM++ 2M", "Normal", "dpmpp_2m"),
        ("Euler", "Beta", "euler_beta"),
        ("Euler", "SGM Uniform", "euler_trailing"),
        ("Euler", "Align Your Steps", "euler_ays"),
        ("DPM++ 2M SDE", "Automatic", "dpmpp_2m_sde_exponential"),
        ("DPM++ 2M SDE Karras", "", "dpmpp_2m_sde_karras"),
        ("LCM", "Automatic", "lcm"),
        ("LCM", "Karras", None),
        ("Euler", "Polyexponential", None),
        ("UniPC", "", None),
        ("DDIM", "Karras", None),
        ("DPMSolverMultistepScheduler", "Karras", "dpmpp_2m_karras"),
        ("DPM++ 2M Karras", "Automatic", "dpmpp_2m_karras"),
    ],
)
def test_other_programs_names_of_schedulers(sampler: str, schedule: str, name: str | None) -> None:
    assert scheduler_of(sampler, schedule) == name


COMFY: dict[str, Any] = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 42,
            "steps": 25,
            "cfg": 7.0,
            "sampler_name": "euler",
            "denoise": 1,
            "scheduler": "normal",
            "model": ["10", 0],
            "latent_image": ["5", 0],
            "positive": ["6", 0],
            "negative": ["7", 0],
        },
    },
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 1024, "height": 768}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a star", "clip": ["4", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["4", 1]}},
    "10": {
        "class_type": "LoraLoader",
        "inputs": {
            "lora_name": "sub\\x.v1.safetensors",
            "strength_model": 0.8,
            "strength_clip": 1,
            "model": ["11", 0],
        },
    },
    "11": {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"lora_name": "y.safetensors", "strength_model": 0.5, "model": ["12", 0]},
    },
    "12": {"class_type": "LoraLoader", "inputs": {"lora_name": "z.safetensors"}},
}


def test_comfyuis_graph_is_read_from_its_sampler_on() -> None:
    found = read_graph(COMFY)
    assert found.params == {
        "prompt": "a star",
        "negative_prompt": "blurry",
        "seed": 42,
        "steps": 25,
        "guidance": 7.0,
        "width": 1024,
        "height": 768,
        "scheduler": "euler",
        "loras": [
            {"name": "y", "weight": 0.5, "text_weight": 0.0},
            {"name": "sub/x.v1", "weight": 0.8, "text_weight": 1.0},
        ],
    }
    assert found.unread == ["node LoraLoader"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_is_known_by_comfyuis_name(name: str) -> None:
    graph, each = copy.deepcopy(COMFY), SCHEDULERS[name]
    schedule = SCHEDULE_LABELS.get(each.levels, "normal").lower().replace(" ", "_")
    graph["3"]["inputs"] |= {"sampler_name": each.comfy, "scheduler": schedule}
    assert read_graph(graph).params["scheduler"] == name


def test_render_takes_the_parameters_of_other_programs_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image, PngImagePlugin

    from serve.render.command import stored_params

    for name, text in (("parameters", A1111), ("prompt", json.dumps(COMFY))):
        chunks = PngImagePlugin.PngInfo()
        chunks.add_text(name, text)
        Image.new("RGB", (8, 8)).save(tmp_path / "other.png", pnginfo=chunks)
        found = stored_params(str(tmp_path / "other.png"))
        assert found["prompt"] and found["steps"] in (25, 30) and "model" not in found
        assert "left out: " in capsys.readouterr().err


def test_a_graph_with_a_cycle_is_read_to_an_end() -> None:
    graph = copy.deepcopy(COMFY)
    graph["6"]["inputs"] = {"text": ["6", 0]}
    assert "prompt" not in read_graph(graph).params


def test_comfyuis_controlnets_are_read_without_their_maps() -> None:
    graph = copy.deepcopy(COMFY)

    def apply(kind: str, loader: str, **inputs: Any) -> dict[str, Any]:
        given = {"control_net": [loader, 0], "image": ["30", 0], "strength": 0.5, **inputs}
        return {"class_type": kind, "inputs": given}

    def load(name: str) -> dict[str, Any]:
        return {"class_type": "ControlNetLoader", "inputs": {"control_net_name": name}}

    graph["3"]["inputs"] |= {"positive": ["20", 0], "negative": ["20", 1]}
    links = {"positive": ["21", 0], "negative": ["7", 0]}
    window = {"start_percent": 0.1, "end_percent": 0.6}
    graph |= {
        "20": apply("ControlNetApplyAdvanced", "22", **links, **window),
        "21": apply("ControlNetApply", "23", conditioning=["24", 0], strength=1),
        "24": apply("ControlNetApply", "25", conditioning=["6", 0]),
        "22": load("sub\\edges.safetensors"),
        "23": load("depth/diffusion_pytorch_model.safetensors"),
        "25": {"class_type": "SetUnionControlNetType", "inputs": {"control_net": ["22", 0]}},
        "30": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
    }
    found = read_graph(graph)
    assert (found.params["prompt"], found.params["negative_prompt"]) == ("a star", "blurry")
    first, second = Control("depth"), Control("sub/edges", "", 0.5, 0.1, 0.6)
    assert found.params["controls"] == [asdict(first), asdict(second)]
    nodes = ("ControlNetApply", "LoadImage", "LoraLoader", "SetUnionControlNetType")
    assert found.unread == [f"node {kind}" for kind in nodes]


@pytest.mark.parametrize("mode", ["usual", "style"])
def test_image_prompts_are_units_behind_those_of_controlnets(mode: str) -> None:
    prompt = ImagePrompt("more/ip-adapter_sdxl", "a" * 64, 0.7, 0.1, 0.8, mode)
    params = GenerationParams(
        "a ring", width=64, height=64, seed=1, controls=(Control("edges"),), image_prompts=(prompt,)
    )
    files = {"image_prompt_files": {prompt.name: {"short": "0123abcd"}}}
    text = parameters_text({**params.as_dict(), **files})
    weight = "" if mode == "usual" else f"Weight Type: {mode}, "
    assert (
        'ControlNet 1: "Module: ip-adapter-auto, Model: more/ip-adapter_sdxl [0123abcd], '
        f"Weight: 0.7, {weight}Guidance Start: 0.1, Guidance End: 0.8, "
        'Pixel Perfect: True, Control Mode: Balanced"'
    ) in text
    found = read_text(text)
    assert found.params["image_prompts"] == [asdict(replace(prompt, image=""))]
    assert [each["name"] for each in found.params["controls"]] == ["edges"]
    assert not any("ControlNet" in each for each in found.unread)


def test_units_of_ip_adapters_by_other_programs_are_read() -> None:
    text = (
        "a ring\nSteps: 20, Sampler: Euler, CFG scale: 5, Seed: 1, Size: 64x64, ControlNet 0: "
        '"Module: ip-adapter_clip_h, Model: ip-adapter-plus_sdxl_vit-h [f1f19f7d], Weight: 0.5, '
        "Resize Mode: Crop and Resize, Processor Res: 512, "
        'Control Mode: My prompt is more important"'
    )
    found = read_text(text)
    (prompt,) = found.params["image_prompts"]
    assert (prompt["name"], prompt["strength"]) == ("ip-adapter-plus_sdxl_vit-h", 0.5)
    assert found.unread == ["ControlNet 0: Control Mode: My prompt is more important"]
