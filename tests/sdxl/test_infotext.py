"""Parameters that other programs write into pictures are read where they have a meaning here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdxl.attachments import Lora
from sdxl.infotext import parameters_text, read_graph, read_text, scheduler_of
from sdxl.params import GenerationParams
from sdxl.scheduler_names import SCHEDULE_LABELS, SCHEDULERS

# As stable-diffusion-webui 1.10 writes it.
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


@pytest.mark.parametrize("text", ["", "a cat", "Steps: 20", "Negative prompt:", ":::,,,\n,:,"])
def test_any_text_is_read(text: str) -> None:
    assert isinstance(read_text(text).params["prompt"], str)


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
    graph, each = json.loads(json.dumps(COMFY)), SCHEDULERS[name]
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
    graph = json.loads(json.dumps(COMFY))
    graph["6"]["inputs"] = {"text": ["6", 0]}
    assert "prompt" not in read_graph(graph).params
