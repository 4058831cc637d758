"""Writes and reads a ControlNet as sd-webui-controlnet does in the `parameters` text, which has no
place for its map. It knows no files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sdxl.controls import CANNY, CROP, FILL, NONE, PREPROCESSORS, STRETCH, Control

UNIT = "ControlNet "
"""the beginning of a unit's name; its number follows"""
MODULE, MODEL, WEIGHT = "Module", "Model", "Weight"
RESIZE, MODE = "Resize Mode", "Control Mode"
LOW, HIGH, START, END = "Threshold A", "Threshold B", "Guidance Start", "Guidance End"
READ = (MODULE, MODEL, WEIGHT, RESIZE, MODE, LOW, HIGH, START, END, "Pixel Perfect")
UNUSED = ("Processor Res",)
"""without an effect on `none` and on a `canny` that sees the picture's size"""
RESIZES = {"Crop and Resize": CROP, "Resize and Fill": FILL, "Just Resize": STRETCH}
BALANCED, OF_GUESS = "Balanced", "ControlNet is more important"
MODES = {BALANCED: "balanced", "My prompt is more important": "prompt", OF_GUESS: "control"}
NAME = re.compile(r"(?P<name>.+?)( \[[0-9a-f]{8}\])?", re.DOTALL)


def unit_text(control: Control, hash: str) -> str:
    """Return a unit's text; `hash` is that of the model's file. Guess mode is written as the
    nearest mode."""
    is_canny = control.preprocess == CANNY
    labels = {ours: theirs for theirs, ours in MODES.items()}
    resizes = {ours: theirs for theirs, ours in RESIZES.items()}
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


def read_unit(text: str) -> tuple[Control, list[str]]:
    """Return a unit's ControlNet without its map, and the facts that have no meaning here. Raise
    ValueError for a text that is none."""
    facts = dict(_pair(part) for part in text.split(","))
    match = NAME.fullmatch(facts.get(MODEL, ""))
    if match is None:
        raise ValueError(f"must name a model, got {text!r}")
    module = facts.get(MODULE, NONE).lower()
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


def _pair(part: str) -> tuple[str, str]:
    name, mark, value = part.strip().partition(": ")
    if not mark:
        raise ValueError(f"must be NAME: VALUE, got {part!r}")
    return name, value


def _threshold(facts: Mapping[str, str], name: str, usual: int) -> int:
    """Read a threshold; a negative one stands for the default."""
    value = float(facts.get(name, -1))
    return round(value) if value >= 0 else usual
