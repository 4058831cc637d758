"""What a run is of, kept beside its findings: a run goes on in a folder of its own kind alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdxl.files import prepare_folder, write_json
from sdxl.params import InvalidParams


def keep_facts(folder: Path, file: str, facts: Mapping[str, Any], what: str) -> None:
    """Written if none are there; others are an error, which says `what` they are of."""
    prepare_folder(folder)
    path = folder / file
    if not path.exists():
        write_json(path, facts, sort_keys=True)
    elif path.read_text(encoding="utf-8") != json.dumps(facts, indent=1, sort_keys=True) + "\n":
        needed = f"it holds another {what}; needed a new or empty folder"
        raise InvalidParams("out", str(folder), needed)
