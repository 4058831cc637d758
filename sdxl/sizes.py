"""The image sides that a model takes."""

from __future__ import annotations

from dataclasses import dataclass

from sdxl.parameter import InvalidParams, is_int


@dataclass(frozen=True)
class Sizes:
    """The image sides a model takes, in pixels."""

    default: int
    minimum: int
    maximum: int
    multiple: int = 8

    def resolve(self, side: str, value: int | None) -> int:
        """This side in pixels, or the default where it was left open."""
        if value is None:
            return self.default
        is_within = is_int(value) and self.minimum <= value <= self.maximum
        if not is_within or value % self.multiple:
            allowed = f"must be a multiple of {self.multiple} from {self.minimum} to {self.maximum}"
            raise InvalidParams(side, value, allowed)
        return value
