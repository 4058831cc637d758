"""stable-diffusion-webui's requests and answers as data, and their translation to /v1.

An unsupported field is refused by name, never ignored. It knows no HTTP server.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)

from sdxl.attachments import with_tags
from sdxl.infotext import schedule_steps, scheduler_of, without_hash
from sdxl.parameter import MAX_STEPS
from sdxl.params import (
    DRAWN_SEEDS,
    LANCZOS,
    MAX_UPSCALE,
    PARAMETERS,
    UPSCALERS,
    value_or,
)
from sdxl.scheduler_names import SCHEDULE_LABELS, SCHEDULERS, full_label
from sdxl.specs import SDXL_1_0
from sdxl.suggestions import did_you_mean
from serve.errors import Problem, invalid, of_schema
from serve.front.openai_images import NEEDED_UNICODE, ImageRequest, bounds_of, has_surrogate
from serve.models import ImageModel, M, choose
from serve.orders import Done, ModelCard
from serve.run_time_models import SUFFIX
from serve.settings import MAX_N


def not_boolean(value: Any) -> Any:
    """Refuse booleans, which pydantic reads as 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, got a boolean")
    return value


Whole = Annotated[int, BeforeValidator(not_boolean)]
Number = Annotated[float, BeforeValidator(not_boolean)]
FORMATS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}
CHECKPOINT, FORMAT, SKIPPED = "sd_model_checkpoint", "samples_format", "CLIP_stop_at_last_layers"
OPTIONS: dict[str, Any] = {FORMAT: "png", SKIPPED: 2}
"""A client's options besides the checkpoint. SDXL always skips CLIP's last layer."""
UNSET: dict[str, tuple[Any, ...]] = {
    "restore_faces": (False,),
    "tiling": (False,),
    "seed_resize_from_h": (0, -1),
    "seed_resize_from_w": (0, -1),
    "styles": ([],),
    "script_name": ("", "None"),
    "firstpass_image": ("",),
    "infotext": ("",),
    "s_churn": (0,),
    "s_tmin": (0,),
    "s_noise": (1,),
    "init_images": ([],),
}
"""Unsupported features, and their values besides null that mean `off`."""
UNSET_OF_HIRES: dict[str, tuple[Any, ...]] = {
    "hr_resize_x": (0,),
    "hr_resize_y": (0,),
    "hr_checkpoint_name": ("", "Use same checkpoint"),
    "hr_sampler_name": ("", "Use same sampler"),
    "hr_scheduler": ("", "Use same scheduler"),
    "hr_prompt": ("",),
    "hr_negative_prompt": ("",),
}
"""The same for the second leg."""
UNITS = "controlnet"
"""The script whose arguments controlnet.py reads."""
HIRES_UPSCALERS = {each.capitalize(): each for each in UPSCALERS}
HIRES_UPSCALER, HIRES_STRENGTH = "Latent", 0.75
"""Defaults of the second leg."""


class TextToImage(BaseModel):
    """A txt2img request. Other fields, such as where to save files, do not affect the picture."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    prompt: str = ""
    negative_prompt: str | None = None
    seed: Whole | None = -1
    subseed: Whole | None = -1
    subseed_strength: Annotated[Number, Field(ge=0, le=1)] | None = 0
    steps: Annotated[Whole, *bounds_of(PARAMETERS["steps"])] | None = None
    cfg_scale: Number | None = None
    width: Whole | None = None
    height: Whole | None = None
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    batch_size: Annotated[Whole, Field(ge=1, le=MAX_N)] | None = 1
    n_iter: Annotated[Whole, Field(ge=1, le=MAX_N)] | None = 1
    override_settings: dict[str, Any] | None = None
    alwayson_scripts: dict[str, Any] | None = None
    send_images: StrictBool | None = True
    enable_hr: StrictBool | None = False
    hr_scale: Number | None = 2.0
    hr_upscaler: str | None = None
    hr_second_pass_steps: Annotated[Whole, Field(ge=0, le=MAX_STEPS)] | None = 0
    denoising_strength: Annotated[Number, Field(ge=0, le=1)] | None = None
    refiner_checkpoint: str | None = None
    refiner_switch_at: Annotated[Number, Field(ge=0, le=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, fields: Any) -> Any:
        """Check all fields, also ignored ones, since the answer repeats them."""
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if has_surrogate(json.dumps([name, value], ensure_ascii=False)):
                raise invalid(name, f"{name[:100]}: {NEEDED_UNICODE}")
        return fields

    @property
    def count(self) -> int:
        return (self.batch_size or 1) * (self.n_iter or 1)


class PictureInfo(BaseModel):
    image: str


def model_in(options: dict[str, Any], models: Sequence[M]) -> M:
    """Return the model of the options, or raise Problem 404."""
    return choose(name_in(options), models)


def name_in(options: dict[str, Any]) -> str | None:
    title = options.get(CHECKPOINT)
    return None if title is None else str(title).removesuffix(SUFFIX)


def request_of(
    asked: TextToImage, chosen: dict[str, Any], usual_steps: int | None = None
) -> ImageRequest:
    """Return the same request for /v1. Raises Problem for unsupported features. `usual_steps`: the
    first leg's if `asked` has none."""
    check_features(asked)
    if asked.count > MAX_N:
        raise invalid("n_iter", f"batch_size × n_iter: {asked.count} images; at most {MAX_N}")
    seed = None if asked.seed in (None, -1) else asked.seed
    fields = {
        "prompt": asked.prompt,
        "model": name_in(chosen),
        "negative_prompt": asked.negative_prompt or None,
        "seed": seed,
        "steps": asked.steps,
        "guidance_scale": asked.cfg_scale,
        "size": size_asked(asked),
        "n": asked.count,
        "scheduler": scheduler_asked(asked),
        "output_format": FORMATS[chosen.get(FORMAT, "png")],
        **(upscale_of(asked, usual_steps) if asked.enable_hr else {}),
        **variation_of(asked),
        **refiner_of(asked),
    }
    try:
        return ImageRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise invalid(name, of_schema(name, first)) from None


def variation_of(asked: TextToImage) -> dict[str, Any]:
    if not asked.subseed_strength:
        return {}
    seed = secrets.randbelow(DRAWN_SEEDS) if asked.subseed in (None, -1) else asked.subseed
    return {"variation_seed": seed, "variation_strength": asked.subseed_strength}


def size_asked(asked: TextToImage) -> str | None:
    """Return the size; None if neither side is given."""
    for name, side, other in (("width", asked.width, "height"), ("height", asked.height, "width")):
        if not side and (asked.width or asked.height):
            raise invalid(name, f"{name} and {other} must be given together")
    return f"{asked.width}x{asked.height}" if asked.width else None


def upscale_of(asked: TextToImage, usual_steps: int | None) -> dict[str, Any]:
    """Return the fields of the second leg. A1111 counts the steps taken, /v1 those of the
    schedule."""
    check_unset(asked, UNSET_OF_HIRES)
    name = asked.hr_upscaler or HIRES_UPSCALER
    if name not in HIRES_UPSCALERS:
        needed = f"must be one of {', '.join(HIRES_UPSCALERS)}"
        raise invalid("hr_upscaler", f"hr_upscaler {needed}, got {name[:60]!r}")
    given = asked.denoising_strength
    taken = asked.hr_second_pass_steps or asked.steps or usual_steps
    strength = HIRES_STRENGTH if given is None else given
    if not strength or strength < (taken or 0) / MAX_STEPS:
        least = f"at least {taken / MAX_STEPS:g} for {taken} steps" if taken else "more than 0"
        raise invalid("denoising_strength", f"denoising_strength must be {least}, got {strength}")
    scale = 2.0 if asked.hr_scale is None else asked.hr_scale
    if not 1 < scale <= MAX_UPSCALE:
        needed = f"must be more than 1, at most {MAX_UPSCALE:g}"
        raise invalid("hr_scale", f"hr_scale {needed}, got {scale:g}")
    return {
        "upscale": scale,
        "upscaler": HIRES_UPSCALERS[name],
        "upscale_strength": strength,
        "upscale_steps": schedule_steps(taken, strength) if taken else None,
    }


def refiner_of(asked: TextToImage) -> dict[str, Any]:
    """Return the fields of the refiner; without one its switch is ignored."""
    if asked.refiner_checkpoint in (None, "", "None"):
        return {}
    name = without_hash(asked.refiner_checkpoint).removesuffix(SUFFIX)
    return {"refiner": name, "refiner_switch_at": asked.refiner_switch_at}


def check_features(asked: TextToImage) -> None:
    check_unset(asked, UNSET)
    for name, script in (asked.alwayson_scripts or {}).items():
        if name.lower() != UNITS and is_active(script):
            shown = name[:100]
            raise invalid("alwayson_scripts", f"alwayson_scripts: no script {shown!r} here")


def check_unset(asked: TextToImage, fields: Mapping[str, tuple[Any, ...]]) -> None:
    extra = asked.model_extra or {}
    for name, plain in fields.items():
        value = extra.get(name)
        if value is not None and value not in plain:
            raise invalid(name, f"{name}: {str(value)[:100]!r} is not possible here; leave it out")


def is_active(script: object) -> bool:
    """Return whether a script is used: clients also send scripts whose arguments turn them off."""
    arguments = script.get("args") if isinstance(script, dict) else script
    if isinstance(arguments, dict):
        return arguments.get("enabled", True) is not False
    if not isinstance(arguments, list):
        return bool(arguments)
    return any(
        argument
        for argument in arguments
        if not (isinstance(argument, dict) and argument.get("enabled") is False)
    )


def scheduler_asked(asked: TextToImage) -> str | None:
    sampler = asked.sampler_name or asked.sampler_index
    if not sampler:
        return None
    name = scheduler_of(sampler, asked.scheduler or "")
    if name is None:
        shown = f"{sampler[:60]!r} with scheduler {(asked.scheduler or '')[:60]!r}"
        names = () if scheduler_of(sampler) else map(full_label, SCHEDULERS)
        hint = did_you_mean(sampler, names)
        message = f"sampler_name must be one of {_samplers_with_schedules()}, got {shown}{hint}"
        raise invalid("sampler_name", message)
    return name


def _samplers_with_schedules() -> str:
    """List the samplers, with their other schedules in brackets."""
    by_label: dict[str, list[str]] = {}
    for each in SCHEDULERS.values():
        schedules = by_label.setdefault(each.label, [])
        if each.levels:
            schedules.append(SCHEDULE_LABELS[each.levels])
    return ", ".join(
        f"{label} ({', '.join(schedules)})" if schedules else label
        for label, schedules in by_label.items()
    )


def checked_options(options: dict[str, Any], models: Sequence[ImageModel]) -> dict[str, Any]:
    """Return the supported options, or raise Problem."""
    for name, value in options.items():
        if name == CHECKPOINT:
            try:
                model_in(options, models)
            except Problem as problem:
                raise replace(problem, param=CHECKPOINT) from None
        elif name == FORMAT:
            if not isinstance(value, str) or value not in FORMATS:
                raise invalid(FORMAT, f"{FORMAT} must be one of {', '.join(FORMATS)}")
        elif name == SKIPPED:
            if isinstance(value, bool) or value not in (0, 1, 2):
                raise invalid(SKIPPED, f"{SKIPPED} must be 1 or 2: SDXL skips one layer")
        else:
            known = ", ".join((CHECKPOINT, *OPTIONS))
            raise invalid(
                "options", f"options: {str(name)[:100]} is not supported; supported are {known}"
            )
    return {name: value for name, value in options.items() if value is not None}


def answer_of(
    asked: TextToImage, done: Sequence[Done], texts: Sequence[str], model: ImageModel
) -> dict[str, Any]:
    return {
        "images": [base64.b64encode(d.image).decode() for d in done] if asked.send_images else [],
        "parameters": asked.model_dump(),
        "info": json.dumps(info_of(asked, done, texts, model)),
    }


def info_of(
    asked: TextToImage, done: Sequence[Done], texts: Sequence[str], model: ImageModel
) -> dict[str, Any]:
    """Return facts about the pictures, from which some clients read seeds and texts."""
    all_params = [each.params for each in done]
    prompts = [with_tags(params.prompt, params.loras or ()) for params in all_params]
    facts: dict[str, Any] = {
        "all_prompts": prompts,
        "all_negative_prompts": [params.negative_prompt or "" for params in all_params],
        "all_seeds": [params.seed for params in all_params],
        "all_subseeds": [value_or(params.variation_seed, -1) for params in all_params],
        "batch_size": asked.batch_size or 1,
        "infotexts": list(texts),
        "index_of_first_image": 0,
        "sd_model_name": done[0].model if done else model.id,
        "extra_generation_params": {},
        "styles": [],
    }
    if not all_params:
        return facts
    first = all_params[0]
    return facts | {
        "prompt": prompts[0],
        "negative_prompt": first.negative_prompt or "",
        "seed": first.seed,
        "subseed": value_or(first.variation_seed, -1),
        "subseed_strength": first.variation_strength or 0,
        "width": first.width,
        "height": first.height,
        "steps": first.steps,
        "cfg_scale": first.guidance,
        "sampler_name": SCHEDULERS[first.scheduler].label,
    }


def title_of(name: str) -> str:
    return name + SUFFIX


def describe_model(name: str) -> dict[str, Any]:
    empty = {"hash": None, "sha256": None, "config": None}
    title = title_of(name)
    return {"title": title, "model_name": name, "filename": title, **empty}


def loras(card: ModelCard) -> list[dict[str, Any]]:
    """List the LoRAs. `path` is only a file name, since clients show it."""
    return [
        {"name": name, "alias": name, "path": name + SUFFIX, "metadata": {}} for name in card.loras
    ]


def embeddings(card: ModelCard) -> dict[str, dict[str, Any]]:
    unknown = dict.fromkeys(("step", "sd_checkpoint", "sd_checkpoint_name"))
    width = SDXL_1_0.context_width
    loaded = {
        name: {**unknown, "shape": width, "vectors": vectors}
        for name, vectors in card.embeddings.items()
    }
    return {"loaded": loaded, "skipped": {}}


def samplers() -> list[dict[str, Any]]:
    labels = {each.label: each.solver for each in SCHEDULERS.values()}
    return [{"name": n, "aliases": [solver], "options": {}} for n, solver in labels.items()]


def schedulers() -> list[dict[str, Any]]:
    rest = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    labels = ("Automatic", "Normal", *SCHEDULE_LABELS.values())
    return [{"name": n.lower().replace(" ", "_"), "label": n, **rest} for n in labels]


def upscalers() -> list[dict[str, Any]]:
    """List the upscalers of finished pictures."""
    empty = {"model_name": None, "model_path": None, "model_url": None}
    return [{"name": LANCZOS.capitalize(), **empty, "scale": MAX_UPSCALE}]


def image_bytes(text: str, param: str = "image", name: str = "image") -> bytes:
    """Decode base64, with or without the prefix of a data URL."""
    _, _, data = text.rpartition(",")
    try:
        # Some programs break the lines.
        return base64.b64decode("".join(data.split()), validate=True)
    except ValueError:
        raise invalid(param, f"{name} must be a picture in base64") from None
