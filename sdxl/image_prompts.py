"""A request's image prompts: picture, strength and steps of each. It knows no files and no
tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from typing import ClassVar, NamedTuple

from sdxl.parameter import MAX_NAME, parameter
from sdxl.pictured import MAX_PATH, Pictured, is_within

USUAL, STYLE, COMPOSITION = "usual", "style", "composition"
MODES = (USUAL, STYLE, COMPOSITION)
"""which layers attend to the picture: all, or those of InstantStyle (arXiv:2404.02733)"""
UNKNOWN_TOKENS = 16
"""tokens of a picture that are assumed until the adapter is loaded; IP-Adapter Plus has as many"""


class ImageWindow(NamedTuple):
    """The steps in which an image prompt guides a picture."""

    begin: float = 0.0
    """share of the picture's steps"""
    end: float = 1.0
    """share of the picture's steps"""
    tokens: int = UNKNOWN_TOKENS

    def covers(self, step: int, steps: int) -> bool:
        return is_within(self.begin, self.end, step, steps)


@dataclass(frozen=True)
class ImagePrompt(Pictured):
    FIELD: ClassVar[str] = "image_prompts"
    FORM: ClassVar[str] = "NAME=FILE[:STRENGTH[:START-END]][:style|composition]"
    BARE: ClassVar[str] = "mode"

    name: str = parameter(
        MISSING, "Name", "name of the IP-Adapter, as the model lists it", high=MAX_NAME
    )
    image: str = parameter("", "Picture", "the picture", high=MAX_PATH)
    mode: str = parameter(
        USUAL,
        "Mode",
        "usual; or only the picture's style or composition",
        choices=MODES,
    )

    @property
    def group(self) -> tuple[object, ...]:
        """Rows attend together to the pictures with equal groups."""
        return self.name, self.start, self.end, self.mode


def image_windows_of(prompts: Iterable[ImagePrompt]) -> tuple[ImageWindow, ...]:
    """Return the windows of image prompts, whose adapters need not be loaded."""
    groups: dict[object, ImageWindow] = {}
    for each in prompts:
        if each.strength:
            before = groups.get(each.group)
            tokens = UNKNOWN_TOKENS + (before.tokens if before else 0)
            groups[each.group] = ImageWindow(each.start, each.end, tokens)
    return tuple(groups.values())
