"""The image sides that a model supports."""

from __future__ import annotations

from dataclasses import dataclass

from sdxl.parameter import InvalidParams, is_int

OFFICIAL_SIDE = 1024
OFFICIAL = ((1152, 896), (1216, 832), (1344, 768), (1536, 640))
"""Common sizes among those that SDXL was trained with (arXiv:2307.01952, appendix I)."""


@dataclass(frozen=True)
class Sizes:
    """The image sides that a model supports, in pixels."""

    default: int
    minimum: int
    maximum: int
    multiple: int = 8

    def usual(self, longest: int) -> tuple[str, ...]:
        """Return SDXL's official sizes, scaled to the model's default side, and the doubled
        default side; only sizes with sides up to `longest`."""
        scaled = [tuple(map(self._scaled, sides)) for sides in OFFICIAL]
        sizes = [sides for each in scaled for sides in (each, each[::-1])]
        sizes.append((2 * self.default,) * 2)
        return tuple(f"{a}x{b}" for a, b in dict.fromkeys(sizes) if max(a, b) <= longest)

    def _scaled(self, side: int) -> int:
        length = round(side * self.default / OFFICIAL_SIDE / self.multiple) * self.multiple
        return max(length, self.minimum)

    def resolve(self, side: str, value: int | None) -> int:
        """Return this side in pixels, checked; the default for None."""
        if value is None:
            return self.default
        is_within = is_int(value) and self.minimum <= value <= self.maximum
        if not is_within or value % self.multiple:
            allowed = f"must be a multiple of {self.multiple} from {self.minimum} to {self.maximum}"
            raise InvalidParams(side, value, allowed)
        return value
