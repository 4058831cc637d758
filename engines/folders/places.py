"""The default places of exports and engines. It makes no folder."""

from __future__ import annotations

import re
from pathlib import Path

from sdxl.places import home
from sdxl.specs import Cut


def export_place(model: str, digest: str, precision: str, cut: Cut = "reference") -> Path:
    return home() / "onnx" / _name(model, digest, precision, cut)


def plans_root() -> Path:
    return home() / "plans"


def plans_place(model: str, digest: str, precision: str, cut: Cut = "reference") -> Path:
    """The folder of a model's engines, with a folder for each GPU and backend."""
    return plans_root() / _name(model, digest, precision, cut)


def _name(model: str, digest: str, precision: str, cut: Cut) -> str:
    safe = re.sub(r"[^\w.-]", "_", model)
    return "-".join([safe, digest[:12], precision, *([] if cut == "reference" else [cut])])
