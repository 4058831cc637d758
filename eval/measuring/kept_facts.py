"""The settings of a run, stored beside its results: a run resumes only with the same settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdxl.files import prepare_folder, write_json
from sdxl.params import InvalidParams


def check_facts(folder: Path, file: str, facts: Mapping[str, Any], kind: str) -> None:
    """Write the facts into an empty folder; raise if the folder holds a `kind` with other facts."""
    prepare_folder(folder)
    path = folder / file
    if not path.exists():
        write_json(path, facts, sort_keys=True)
    elif path.read_text(encoding="utf-8") != json.dumps(facts, indent=1, sort_keys=True) + "\n":
        needed = f"must be a new or empty folder: it holds another {kind}"
        raise InvalidParams("out", str(folder), needed)
