"""Writes and reads ControlNets and image prompts in the `parameters` text, in the format of
sd-webui-controlnet ("units"), which has no place for pictures. It knows no files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sdxl.controls import CANNY, CROP, FILL, NONE, PREPROCESSORS, STRETCH, Control
from sdxl.image_prompts import MODES as IMAGE_MODES
from sdxl.image_prompts import USUAL, ImagePrompt
from sdxl.pictured import Pictured

UNIT = "ControlNet "
"""the start of a unit's name; its number follows"""
MODULE, MODEL, WEIGHT = "Module", "Model", "Weight"
RESIZE, MODE = "Resize Mode", "Control Mode"
LOW, HIGH, START, END = "Threshold A", "Threshold B", "Guidance Start", "Guidance End"
READ = (MODULE, MODEL, WEIGHT, RESIZE, MODE, LOW, HIGH, START, END, "Pixel Perfect")
UNUSED = ("Processor Res",)
"""facts without effect on `none`, and on `canny` at the picture's size"""
RESIZES = {"Crop and Resize": CROP, "Resize and Fill": FILL, "Just Resize": STRETCH}
BALANCED, OF_GUESS = "Balanced", "ControlNet is more important"
MODES = {BALANCED: "balanced", "My prompt is more important": "prompt", OF_GUESS: "control"}
IP_ADAPTER, AUTO = "ip-adapter", "ip-adapter-auto"
"""the start of the names of IP-Adapters' modules and models, and the module for any model"""
WEIGHT_TYPE = "Weight Type"
"""this project's fact for the mode of an image prompt, unless it is the usual one"""
NAME = re.compile(r"(?P<name>.+?)( \[[0-9a-f]{8}\])?", re.DOTALL)


def unit_text(control: Control, hash: str) -> str:
    """Return a ControlNet's text; `hash` is the short hash of its file. Guess mode is written as
    the nearest mode."""
    is_canny = control.preprocess == CANNY
    labels = {mode: label for label, mode in MODES.items()}
    resizes = {resize: label for label, resize in RESIZES.items()}
    facts = {
        MODULE: control.preprocess,
        MODEL: f"{control.name} [{hash}]" if hash else control.name,
        WEIGHT: f"{control.strength:g}",
        RESIZE: resizes[control.resize or CROP],
        **({LOW: control.low, HIGH: control.high} if is_canny else {}),
        START: f"{control.start:g}",
        END: f"{control.end:g}",
        "Pixel Perfect": True,
        MODE: labels.get(control.mode, OF_GUESS),
    }
    return ", ".join(f"{name}: {value}" for name, value in facts.items())


def prompt_text(prompt: ImagePrompt, hash: str) -> str:
    """Return an image prompt's text; `hash` is the short hash of the adapter's file."""
    facts = {
        MODULE: AUTO,
        MODEL: f"{prompt.name} [{hash}]" if hash else prompt.name,
        WEIGHT: f"{prompt.strength:g}",
        **({} if prompt.mode == USUAL else {WEIGHT_TYPE: prompt.mode}),
        START: f"{prompt.start:g}",
        END: f"{prompt.end:g}",
        "Pixel Perfect": True,
        MODE: BALANCED,
    }
    return ", ".join(f"{name}: {value}" for name, value in facts.items())


def is_of_ip_adapter(name: str) -> bool:
    """True for the name of an IP-Adapter's module or model."""
    return name.rpartition("/")[2].lower().startswith(IP_ADAPTER)


def read_unit(text: str) -> tuple[Pictured, list[str]]:
    """Return a unit's ControlNet or image prompt, without its picture, and the facts that are not
    supported. Raise ValueError for a text that is not a unit."""
    facts = dict(_pair(part) for part in text.split(","))
    match = NAME.fullmatch(facts.get(MODEL, ""))
    if match is None:
        raise ValueError(f"must name a model, got {text!r}")
    module = facts.get(MODULE, NONE).lower()
    if is_of_ip_adapter(module) or is_of_ip_adapter(match["name"]):
        return _read_prompt(match["name"], facts)
    control = Control(
        match["name"],
        strength=float(facts.get(WEIGHT, 1)),
        start=float(facts.get(START, 0)),
        end=float(facts.get(END, 1)),
        mode=MODES.get(facts.get(MODE, ""), MODES[BALANCED]),
        preprocess=module if module in PREPROCESSORS else NONE,
        low=_threshold(facts, LOW, Control.low),
        high=_threshold(facts, HIGH, Control.high),
        resize=RESIZES.get(facts.get(RESIZE, "")),
    )
    control.check("controls")
    known = {*READ, *UNUSED} - (set() if module in PREPROCESSORS else {MODULE})
    return control, [f"{name}: {value}" for name, value in facts.items() if name not in known]


def _read_prompt(name: str, facts: Mapping[str, str]) -> tuple[ImagePrompt, list[str]]:
    mode = facts.get(WEIGHT_TYPE, USUAL)
    prompt = ImagePrompt(
        name,
        strength=float(facts.get(WEIGHT, 1)),
        start=float(facts.get(START, 0)),
        end=float(facts.get(END, 1)),
        mode=mode if mode in IMAGE_MODES else USUAL,
    )
    prompt.check("image_prompts")
    unread = {MODE} if facts.get(MODE, BALANCED) != BALANCED else set()
    unread |= {WEIGHT_TYPE} if mode not in IMAGE_MODES else set()
    known = {*READ, *UNUSED, WEIGHT_TYPE} - unread
    return prompt, [f"{name}: {value}" for name, value in facts.items() if name not in known]


def _pair(part: str) -> tuple[str, str]:
    name, mark, value = part.strip().partition(": ")
    if not mark:
        raise ValueError(f"must be NAME: VALUE, got {part!r}")
    return name, value


def _threshold(facts: Mapping[str, str], name: str, usual: int) -> int:
    """Read a threshold; a negative one means the default."""
    value = float(facts.get(name, -1))
    return round(value) if value >= 0 else usual
