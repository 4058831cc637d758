"""ControlNets and image prompts in requests of stable-diffusion-webui, which its extension
sd-webui-controlnet reads from `alwayson_scripts`, and the extension's lists.

An unsupported field is refused by name. It knows no HTTP server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from sdxl.attachments import unknown_name
from sdxl.control_maps import Pictures, add_map
from sdxl.control_texts import AUTO, BALANCED, IP_ADAPTER, MODES, RESIZES
from sdxl.controls import CANNY, CROP, FILL, NONE, PREPROCESSORS, Control
from sdxl.parameter import MAX_ATTACHMENTS, table_of
from serve.errors import invalid, of_params, of_schema
from serve.front.a1111.wire import UNITS, Number, TextToImage, Whole, image_bytes
from serve.front.openai_images import bounds_of
from serve.orders import ModelCard

PARAM = "alwayson_scripts"
VERSION = 3
"""Version of the extension's API."""
NO_MODEL = "None"
ALIASES = {
    "input_image": "image",
    "mask_image": "mask",
    "guidance": "guidance_end",
    "guess_mode": "guessmode",
}
"""Other names of fields."""
OFF: Mapping[str, tuple[Any, ...]] = {
    "mask": ("",),
    "advanced_weighting": ([],),
    "effective_region_mask": ("",),
    "ipadapter_input": ("", []),
    "batch_images": ("", []),
    "input_mode": ("simple", 0),
    "animatediff_batch": (False,),
}
"""Unsupported features, and their values besides null that mean `off`."""
PICTURES = ("image", "input_image", "mask", "mask_image")
RESIZE_MODES = RESIZES | {
    "Inner Fit (Scale to Fit)": CROP,
    "Scale to Fit (Inner Fit)": CROP,
    "Outer Fit (Shrink to Fit)": FILL,
    "Envelope (Outer Fit)": FILL,
}
RESIZE_NUMBERS = ("Just Resize", "Crop and Resize", "Resize and Fill")
UNION_TYPES = {
    "OpenPose": "openpose",
    "Depth": "depth",
    "Soft Edge": "scribble",
    "Hard Edge": "canny",
    "Normal Map": "normal",
    "Segmentation": "segment",
    "Tile": "tile",
    "Inpaint": "repaint",
    "Unknown": None,
}
BOTH_LEGS = "Both"
IP_MODULES = (
    AUTO,
    *(f"{IP_ADAPTER}_clip_{each}" for each in ("h", "g", "sdxl", "sdxl_plus_vith")),
)
"""Preprocessors of the extension whose encoder comes with the model here."""
LOW, HIGH = (Control.low, Control.high)
SLIDER = range(1, 256)
"""Thresholds of canny; the extension replaces others by the defaults."""
FIELDS = table_of(Control)


class Unit(BaseModel):
    """A unit. Other fields, such as `processor_res`, do not affect the picture."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    enabled: StrictBool | None = True
    model: str | None = None
    module: str | None = None
    image: Any = None
    weight: Annotated[Number, *bounds_of(FIELDS["strength"])] | None = 1.0
    guidance_start: Annotated[Number, *bounds_of(FIELDS["start"])] | None = 0.0
    guidance_end: Annotated[Number, *bounds_of(FIELDS["end"])] | None = 1.0
    control_mode: Whole | str | None = None
    resize_mode: Whole | str | None = None
    threshold_a: Number | None = None
    threshold_b: Number | None = None
    guessmode: StrictBool | Whole | None = None
    union_control_type: str | None = None
    hr_option: str | None = BOTH_LEGS
    inpaint_crop_input_image: StrictBool | None = True

    @property
    def is_used(self) -> bool:
        return self.enabled is not False and self.model not in (None, "", NO_MODEL)


class Detection(BaseModel):
    """A request to preprocess pictures. `controlnet_images` is webuiapi's name for the images."""

    controlnet_module: str = NONE
    controlnet_input_images: Annotated[list[str], Field(max_length=MAX_ATTACHMENTS)] = []
    controlnet_images: Annotated[list[str], Field(max_length=MAX_ATTACHMENTS)] = []
    controlnet_threshold_a: Number | None = None
    controlnet_threshold_b: Number | None = None

    @property
    def images(self) -> list[str]:
        if not (images := self.controlnet_input_images or self.controlnet_images):
            name = "controlnet_input_images"
            raise invalid(name, f"{name} must be at least one picture")
        return images

    @property
    def fields(self) -> dict[str, Any]:
        """The preprocessor's fields of a Control."""
        module = preprocessor(self.controlnet_module, "controlnet_module", "controlnet_module")
        low, high = self.controlnet_threshold_a, self.controlnet_threshold_b
        return {"preprocess": module, "low": threshold(low, LOW), "high": threshold(high, HIGH)}


def lists_of(asked: TextToImage, card: ModelCard) -> tuple[dict[str, Any], Pictures]:
    """Return the request's units as `controls` and `image_prompts` of /v1, and their pictures.
    Raises Problem."""
    lists, maps = dict[str, list[dict[str, Any]]](), dict[str, bytes]()
    for number, given in enumerate(arguments_of(asked)):
        name = f"{PARAM}: ControlNet unit {number}"
        unit = unit_of(given, name)
        if unit is not None:
            check_features(unit, asked, name)
            field, model = model_of(unit.model or "", card)
            read = control_of if field == "controls" else image_prompt_of
            lists.setdefault(field, []).append({"name": model, **read(unit, maps, name)})
    if (count := sum(map(len, lists.values()))) > MAX_ATTACHMENTS:
        message = f"{PARAM}: ControlNet must have at most {MAX_ATTACHMENTS} units"
        raise invalid(PARAM, f"{message}, got {count}")
    return lists, maps


def arguments_of(asked: TextToImage) -> list[Any]:
    scripts = (asked.alwayson_scripts or {}).items()
    named = [script for name, script in scripts if name.lower() == UNITS]
    if len(named) > 1:
        raise invalid(PARAM, f"{PARAM}: ControlNet is given twice")
    script = named[0] if named else None
    arguments = script.get("args") if isinstance(script, dict) else script
    if arguments is None:
        return []
    if not isinstance(arguments, list):
        raise invalid(PARAM, f"{PARAM}: args of ControlNet must be a list of units")
    return arguments


def unit_of(given: Any, name: str) -> Unit | None:
    """Return the unit; None if it is not used."""
    if not given:
        return None
    if not isinstance(given, dict):
        raise invalid(PARAM, f"{name} must be an object, got {str(given)[:60]!r}")
    if given.get("enabled") is False:
        return None
    fields = {ALIASES.get(key, key): value for key, value in given.items() if value is not None}
    try:
        unit = Unit.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid(PARAM, f"{name}: {of_schema(str(first['loc'][0])[:60], first)}") from None
    # Also without a model: the extension has units that only preprocess.
    if (unit.module or "").lower() not in IP_MODULES:
        preprocessor(unit.module, PARAM, f"{name}: module")
    return unit if unit.is_used else None


def check_features(unit: Unit, asked: TextToImage, name: str) -> None:
    extra = unit.model_extra or {}
    for field, plain in OFF.items():
        if (value := extra.get(field)) is not None and value not in plain:
            raise invalid(PARAM, f"{name}: {field} is not possible here; leave it out")
    if asked.enable_hr and unit.hr_option not in (None, BOTH_LEGS):
        needed = f"must be {BOTH_LEGS!r} here, got {unit.hr_option[:60]!r}"
        raise invalid(PARAM, f"{name}: hr_option {needed}")
    is_part = getattr(asked, "mask", None) is not None
    is_part = is_part and getattr(asked, "inpaint_full_res", False) is not False
    if is_part and unit.image and unit.inpaint_crop_input_image is False:
        message = f"{name}: inpaint_crop_input_image must be true with inpaint_full_res"
        raise invalid(PARAM, f"{message}: a map lies over the whole image")


def control_of(unit: Unit, maps: dict[str, bytes], name: str) -> dict[str, Any]:
    union_type = unit.union_control_type
    mode = meaning_of(unit.control_mode, MODES, BALANCED, f"{name}: control_mode", [*MODES])
    resize = meaning_of(
        unit.resize_mode, RESIZE_MODES, RESIZE_NUMBERS[1], f"{name}: resize_mode", RESIZE_NUMBERS
    )
    return {
        **picture_of(unit, maps, name),
        "mode": "guess" if unit.guessmode else mode,
        "preprocess": preprocessor(unit.module, PARAM, f"{name}: module"),
        "low": threshold(unit.threshold_a, LOW),
        "high": threshold(unit.threshold_b, HIGH),
        "resize": resize,
        "type": meaning_of(union_type, UNION_TYPES, "Unknown", f"{name}: union_control_type"),
    }


def image_prompt_of(unit: Unit, maps: dict[str, bytes], name: str) -> dict[str, Any]:
    if (module := (unit.module or NONE).lower()) not in (NONE, *IP_MODULES):
        needed = f"must be {NONE} or one of {', '.join(IP_MODULES)}, got {module[:60]!r}"
        raise invalid(PARAM, f"{name}: module {needed}")
    mode = meaning_of(unit.control_mode, MODES, BALANCED, f"{name}: control_mode", [*MODES])
    if mode != MODES[BALANCED] or unit.guessmode:
        needed = f"control_mode must be {BALANCED!r}, without guessmode, for an IP-Adapter"
        raise invalid(PARAM, f"{name}: {needed}")
    return picture_of(unit, maps, name)


def picture_of(unit: Unit, maps: dict[str, bytes], name: str) -> dict[str, Any]:
    """Return the fields that ControlNets and image prompts share."""
    data = map_of(unit.image, name)
    return {
        "image": "" if data is None else add_map(data, maps),
        "strength": 1.0 if unit.weight is None else unit.weight,
        "start": unit.guidance_start or 0.0,
        "end": 1.0 if unit.guidance_end is None else unit.guidance_end,
    }


def meaning_of(
    value: int | str | None,
    known: Mapping[str, Any],
    usual: str,
    name: str,
    numbers: Sequence[str] = (),
) -> Any:
    """Return the meaning of a text, or of its number."""
    text = usual if value is None else value
    if isinstance(text, int):
        text = numbers[text] if 0 <= text < len(numbers) else str(text)
    if text not in known:
        texts = ", ".join(map(repr, known))
        raise invalid(PARAM, f"{name} must be one of {texts}, got {text[:60]!r}")
    return known[text]


def preprocessor(module: str | None, param: str, name: str) -> str:
    text = (module or NONE).lower()
    if text not in PREPROCESSORS:
        needed = f"must be {' or '.join(PREPROCESSORS)}, got {text[:60]!r}; or send the map itself"
        raise invalid(param, f"{name} {needed}")
    return text


def threshold(value: float | None, usual: int) -> int:
    return usual if value is None or round(value) not in SLIDER else round(value)


def model_of(text: str, card: ModelCard) -> tuple[str, str]:
    """Return the list and the name of a model. `text` is a label of the extension's list, also
    without hash or folder. Raises Problem."""
    for field, models in (("controls", card.controlnets), ("image_prompts", card.ip_adapters)):
        shorts = {name.rpartition("/")[2]: name for name in reversed([*models])}
        names = {
            form.lower(): name
            for short, name in {**shorts, **{name: name for name in models}}.items()
            for form in (short, label_of(short, models[name]))
        }
        if name := names.get(text.strip().lower()):
            return field, name
    raise of_params(unknown_name(PARAM, text, models_of(card), "ControlNets"))


def map_of(image: Any, name: str) -> bytes | None:
    """Return a unit's picture from base64, or from an object or list of base64 and a mask."""
    while isinstance(image, list) and len(image) == 1:
        (image,) = image
    if isinstance(image, list) and len(image) == 2:
        image = {"image": image[0], "mask": image[1]}
    if isinstance(image, dict):
        if image.get("mask"):
            raise invalid(PARAM, f"{name}: mask is not possible here; leave it out")
        image = image.get("image")
    if image in (None, ""):
        return None
    if not isinstance(image, str):
        raise invalid(PARAM, f"{name}: image must be one picture in base64")
    return image_bytes(image, PARAM, f"{name}: image")


def without_pictures(asked: TextToImage) -> TextToImage:
    """Return the request without its units' pictures, which the answer does not repeat."""
    scripts = dict(asked.alwayson_scripts or {})
    for name, script in scripts.items():
        if name.lower() == UNITS and isinstance(script, dict):
            units = [
                {key: None if key in PICTURES else value for key, value in unit.items()}
                if isinstance(unit, dict)
                else unit
                for unit in script.get("args") or ()
            ]
            scripts[name] = {**script, "args": units}
    return asked.model_copy(update={"alwayson_scripts": scripts}) if scripts else asked


def label_of(name: str, hash: str) -> str:
    return f"{name} [{hash}]" if hash else name


def models_of(card: ModelCard) -> list[str]:
    models = (*card.controlnets.items(), *card.ip_adapters.items())
    return [label_of(name, hash) for name, hash in models]


def module_detail() -> dict[str, Any]:
    usual = {"name": "Resolution", "value": 512, "min": 64, "max": 2048, "step": 8}
    names = ("Canny Low Threshold", LOW), ("Canny High Threshold", HIGH)
    ends = {"min": SLIDER.start, "max": SLIDER.stop - 1, "step": 1}
    sliders = [usual, *({"name": name, "value": value, **ends} for name, value in names)]
    return {
        NONE: {"model_free": False, "sliders": []},
        CANNY: {"model_free": False, "sliders": sliders},
        AUTO: {"model_free": False, "sliders": []},
    }


def control_types(card: ModelCard) -> dict[str, Any]:
    models = models_of(card)
    of_edges = [each for each in models if any(w in each.lower() for w in (CANNY, "union"))]
    images = models[len(card.controlnets) :]
    each = {
        "All": (NONE, models, NO_MODEL),
        CANNY.capitalize(): (CANNY, of_edges, (*of_edges, NO_MODEL)[0]),
        "IP-Adapter": (AUTO, images, (*images, NO_MODEL)[0]),
    }
    return {
        name: {
            "module_list": list(module_detail()),
            "model_list": [NO_MODEL, *listed],
            "default_option": option,
            "default_model": model,
        }
        for name, (option, listed, model) in each.items()
    }
