"""What a folder of graphs and one of plans have in common: which model lies there, in which form. A
JSON file beside them says it; this module does not know what else that file says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sdxl.files import write_json
from sdxl.specs import Architecture, Cut


@dataclass(frozen=True)
class ModelFolder(ABC):
    """Where it lies, and of which model."""

    DESCRIPTION: ClassVar[str]
    """the name of the JSON file"""

    folder: Path
    model: str
    model_digest: str
    precision: str
    cut: Cut
    arch: Architecture

    @abstractmethod
    def as_dict(self) -> dict[str, Any]: ...

    def write(self, folder: Path | None = None) -> None:
        """Here or in another folder; the same bytes for the same facts."""
        path = (folder or self.folder) / self.DESCRIPTION
        write_json(path, self.as_dict(), sort_keys=True, ensure_ascii=False)
