"""The compared variants: diffusers eager, compiled and with the DeepCache package; ours by backend,
precision and interval. Each makes image tensors from prompts. Nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import engines
from engines.folders.export_folder import ExportError
from engines.trt.flavours import BackendMissing
from sdxl.checkpoint import find
from sdxl.params import GenerationParams, InvalidParams

if TYPE_CHECKING:
    from sdxl.pipeline import Pipeline, WithPictures

STEPS = 20
INTERVALS = (1, 2)
PROMPTS = (
    "a red circle on a blue background",
    "a small yellow star above a green square on a white background",
    "two purple triangles on a black background",
    "a large orange ring on a white background",
)
EAGER, CACHED, COMPILED = "diffusers eager", "diffusers + DeepCache", "diffusers + torch.compile"
COMPILED_CACHED = "diffusers + torch.compile + DeepCache"
PEERS = (EAGER, CACHED, COMPILED, COMPILED_CACHED)
COMPILED_PARTS = ("attentions", "resnet", "downsampler", "upsampler")
"""the DeepCache package's names of parts that it wraps and that contain no other wrapped part"""
OURS = {
    "cpu": ("torch:fp32", "onnxruntime:fp32", "onnxruntime:int8"),
    "cuda": ("torch:fp16", "tensorrt:fp16", "tensorrt:fp8", "tensorrt:int8"),
}
"""backend and precision; unavailable variants are reported"""

Paint = Callable[[Sequence[str]], object]


@dataclass(frozen=True)
class BenchSetting:
    """The settings of all variants."""

    model: str
    side: int | None
    steps: int = STEPS

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.device == "cuda" else torch.float32


def variant_name(ours: str, interval: int) -> str:
    backend, precision = ours.split(":")
    return f"ours, {backend} {precision}, interval {interval}"


@dataclass(frozen=True)
class Loaded:
    """The available variants by name, and why the others are unavailable."""

    paints: dict[str, Paint]
    passed_over: dict[str, str] = field(default_factory=dict)


def load_all(setting: BenchSetting, ours: Sequence[str], has_compile: bool) -> Loaded:
    peers = PEERS if has_compile else (EAGER, CACHED)
    loaded = Loaded({name: _peer(setting, name) for name in peers})
    for each in ours:
        try:
            pipeline = _ours(setting, each)
        except (BackendMissing, ExportError, InvalidParams) as error:
            loaded.passed_over[each] = str(error)
            continue
        for interval in INTERVALS:
            name = variant_name(each, interval)
            loaded.paints[name] = partial(paint, pipeline, setting, interval)
    return loaded


def load_one(setting: BenchSetting, name: str, ours: Sequence[str]) -> Paint:
    if name in PEERS:
        return _peer(setting, name)
    each, interval = next((o, i) for o in ours for i in INTERVALS if variant_name(o, i) == name)
    return partial(paint, _ours(setting, each), setting, interval)


def _ours(setting: BenchSetting, each: str) -> Pipeline:
    backend, precision = each.split(":")
    return engines.load(setting.model, backend, precision=precision)


def paint(
    pipeline: Pipeline, setting: BenchSetting, interval: int, prompts: Sequence[str]
) -> object:
    return generate(pipeline, requests_of(setting, interval, prompts))


def generate(pipeline: Pipeline, requests: Iterable[GenerationParams | WithPictures]) -> object:
    """Make the pictures; raise the first error."""
    results = pipeline.generate(requests)
    if errors := [result.error for result in results if result.error]:
        raise errors[0]
    return results


def requests_of(
    setting: BenchSetting, interval: int, prompts: Sequence[str]
) -> list[GenerationParams]:
    size: Any = {"width": setting.side, "height": setting.side}
    return [
        GenerationParams(prompt, steps=setting.steps, seed=i, cache_interval=interval, **size)
        for i, prompt in enumerate(prompts)
    ]


def _peer(setting: BenchSetting, name: str) -> Paint:
    from diffusers import StableDiffusionXLPipeline

    options: Any = {"torch_dtype": setting.dtype, "add_watermarker": False}
    loaded: Any = StableDiffusionXLPipeline.from_pretrained(find(setting.model).folder, **options)
    pipe = loaded.to(setting.device)
    if setting.dtype == torch.float16:
        # The VAE runs in fp16, as with the fp16 VAE fix; float32 would take twice as long.
        pipe.vae.register_to_config(force_upcast=False)
    pipe.set_progress_bar_config(disable=True)
    if name == COMPILED:
        pipe.unet = torch.compile(pipe.unet)
    if name in (CACHED, COMPILED_CACHED):
        _cache(pipe, is_compiled=name == COMPILED_CACHED)
    return partial(_diffuse, pipe, setting)


def _cache(pipe: Any, *, is_compiled: bool) -> None:
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    if is_compiled:
        # The package chooses the parts of a step in Python, so compile each part alone.
        torch._dynamo.config.recompile_limit = 64
        helper.function_dict |= {
            key: torch.compile(part)
            for key, part in helper.function_dict.items()
            if key[1] in COMPILED_PARTS
        }


def _diffuse(pipe: Any, setting: BenchSetting, prompts: Sequence[str]) -> object:
    generators = [torch.Generator("cpu").manual_seed(i) for i in range(len(prompts))]
    return pipe(
        list(prompts),
        num_inference_steps=setting.steps,
        guidance_scale=GenerationParams().guidance,
        generator=generators,
        width=setting.side,
        height=setting.side,
        output_type="pt",
    )
