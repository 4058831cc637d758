"""What an exported part depends on, as one digest: as long as it stays, nothing is exported again.

It reads sources and files, and loads no model.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onnx_export.calibration import encoders_of
from onnx_export.export_spec import ExportSpec
from onnx_export.recipes import RECIPES
from sdxl.checkpoint import NETWORK_FOLDERS

LIBRARIES = ("torch", "onnxscript", "onnx_ir", "diffusers", "transformers")
SOURCES = (
    "onnx_export/binding.py",
    "onnx_export/calibration.py",
    "onnx_export/channel_limits.py",
    "onnx_export/prompts.py",
    "engines/lora.py",
    "onnx_export/mean_calibrator.py",
    "onnx_export/quantisation.py",
    "onnx_export/stored.py",
    "onnx_export/tracing.py",
    "onnx_export/translations.py",
    "sdxl/networks/*.py",
)
"""the code that decides what is in a graph; specs and recipes count by their values"""


def versions() -> dict[str, str]:
    """Without the suffix that tells a CPU's build from a GPU's: both give the same graphs."""
    return {name: version(name).partition("+")[0] for name in LIBRARIES}


def of_parts(order: ExportSpec) -> dict[str, str]:
    """By part: the digest of all that decides what its graphs and their data are."""
    common = [order.cut, versions(), _sources()]
    return {part: _digest([*common, *_of_part(order, part)]) for part in NETWORK_FOLDERS}


def _of_part(order: ExportSpec, part: str) -> list[Any]:
    is_quantised = part == "unet" and order.precision in RECIPES
    files = order.checkpoint.file_digests
    # A calibration runs the encoders too.
    parts = (part, *encoders_of(order.checkpoint)) if is_quantised else (part,)
    facts: list[Any] = [
        {name: digest for name, digest in files.items() if name.partition("/")[0] in parts},
        # A part's place in the specs is not stated here: a changed tensor changes them all.
        repr(order.specs),
        [lora.as_dict() for lora in order.loras],
    ]
    if is_quantised:
        facts += [
            repr(RECIPES[order.precision]),
            order.prompts,
            repr(order.settings),
            version("nvidia-modelopt"),
        ]
    return facts


def _sources() -> str:
    root = Path(__file__).parent.parent
    files = [path for pattern in SOURCES for path in sorted(root.glob(pattern))]
    return _digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
