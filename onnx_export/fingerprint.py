"""A digest of everything that an exported part depends on. A part is exported again when its digest
changes.

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
    "engines/lora.py",
    "engines/lora_weights.py",
    "onnx_export/quantisation.py",
    "onnx_export/stored.py",
    "onnx_export/tracing.py",
    "sdxl/networks/*.py",
)
"""the code that decides the content of graphs; specs and recipes are included by their values"""


def versions() -> dict[str, str]:
    """Return the libraries' versions without the suffix for CPU or GPU: both give equal graphs."""
    return {name: version(name).partition("+")[0] for name in LIBRARIES}


def of_parts(order: ExportSpec) -> dict[str, str]:
    """Return the digest of each part."""
    common = [order.cut, versions(), digest_sources()]
    return {part: _digest([*common, *_of_part(order, part)]) for part in NETWORK_FOLDERS}


def _of_part(order: ExportSpec, part: str) -> list[Any]:
    is_quantised = part == "unet" and order.precision in RECIPES
    files = order.checkpoint.file_digests
    # A calibration also runs the encoders.
    parts = (part, *encoders_of(order.checkpoint)) if is_quantised else (part,)
    facts: list[Any] = [
        {name: digest for name, digest in files.items() if name.partition("/")[0] in parts},
        # A changed tensor in any spec changes every part.
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


def digest_sources() -> str:
    root = Path(__file__).parent.parent
    files = [path for pattern in SOURCES for path in sorted(root.glob(pattern))]
    return _digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
