"""A picture to edit and its mask, as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

RED = (200, 40, 40)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    image = Image.new("RGBA", (128, 128), (*RED, 255))
    image.save(folder / "image.png")
    image.paste((0, 0, 0, 0), (32, 32, 96, 96))
    image.save(folder / "mask.png")
    return folder
