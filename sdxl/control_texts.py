"""Writes and reads ControlNets and image prompts in the `parameters` text, in the format of
sd-webui-controlnet ("units"), which has no place for pictures. It knows no files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    """Return a ControlNet's text; `hash` is its file's. Guess mode becomes the nearest mode."""
    is_canny = control.preprocess == CANNY
    labels = {mode: label for label, mode in MODES.items()}
    resizes = {resize: label for label, resize in RESIZES.items()}
    thresholds = {LOW: control.low, HIGH: control.high} if is_canny else {}
    facts: dict[str, object] = {RESIZE: resizes[control.resize or CROP], **thresholds}
    return _text(control, hash, control.preprocess, facts, labels.get(control.mode, OF_GUESS))


def prompt_text(prompt: ImagePrompt, hash: str) -> str:
    """Return an image prompt's text; `hash` is the short hash of the adapter's file."""
    facts = {} if prompt.mode == USUAL else {WEIGHT_TYPE: prompt.mode}
    return _text(prompt, hash, AUTO, facts, BALANCED)


def _text(unit: Pictured, hash: str, module: str, more: Mapping[str, object], mode: str) -> str:
    facts = {
        MODULE: module,
        MODEL: f"{unit.name} [{hash}]" if hash else unit.name,
        WEIGHT: f"{unit.strength:g}",
        **more,
        START: f"{unit.start:g}",
        END: f"{unit.end:g}",
        "Pixel Perfect": True,
        MODE: mode,
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
    name, module = match["name"], facts.get(MODULE, NONE).lower()
    shared: dict[str, Any] = {
        "strength": float(facts.get(WEIGHT, 1)),
        "start": float(facts.get(START, 0)),
        "end": float(facts.get(END, 1)),
    }
    known = {*READ, *UNUSED}
    unit: Pictured
    if is_of_ip_adapter(module) or is_of_ip_adapter(name):
        mode = facts.get(WEIGHT_TYPE, USUAL)
        unit = ImagePrompt(name, mode=mode if mode in IMAGE_MODES else USUAL, **shared)
        unit.check("image_prompts")
        if mode in IMAGE_MODES:
            known.add(WEIGHT_TYPE)
        if facts.get(MODE, BALANCED) != BALANCED:
            known.remove(MODE)
    else:
        unit = Control(
            name,
            mode=MODES.get(facts.get(MODE, ""), MODES[BALANCED]),
            preprocess=module if module in PREPROCESSORS else NONE,
            low=_threshold(facts, LOW, Control.low),
            high=_threshold(facts, HIGH, Control.high),
            resize=RESIZES.get(facts.get(RESIZE, "")),
            **shared,
        )
        unit.check("controls")
        if module not in PREPROCESSORS:
            known.remove(MODULE)
    return unit, [f"{name}: {value}" for name, value in facts.items() if name not in known]


def _pair(part: str) -> tuple[str, str]:
    name, mark, value = part.strip().partition(": ")
    if not mark:
        raise ValueError(f"must be NAME: VALUE, got {part!r}")
    return name, value


def _threshold(facts: Mapping[str, str], name: str, usual: int) -> int:
    """Read a threshold; a negative one means the default."""
    value = float(facts.get(name, -1))
    return round(value) if value >= 0 else usual
