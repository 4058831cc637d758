"""What a picture is made from: one frozen dataclass, validated once, and its one error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

SCHEDULERS = ("euler", "euler_karras", "euler_a", "ddim", "dpmpp_2m", "dpmpp_2m_karras")
MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARS = 10_000


class InvalidParams(ValueError):
    """A request that cannot be served as asked: which field, what it held, what it may hold."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {value!r} is not allowed; {allowed}")
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> Any:
        return InvalidParams, (self.field, self.value, self.allowed)


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
        is_within = _is_int(value) and self.minimum <= value <= self.maximum
        if not is_within or value % self.multiple:
            allowed = f"needed a multiple of {self.multiple} from {self.minimum} to {self.maximum}"
            raise InvalidParams(side, value, allowed)
        return value


@dataclass(frozen=True)
class GenerationParams:
    """One image. Defaults are the embedded model's best; None is filled by `resolve`."""

    prompt: str = ""
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int = 20
    guidance: float = 5.0
    seed: int | None = None
    scheduler: str = "euler"
    cache_interval: int = 2
    deep_steps: tuple[int, ...] | None = None
    """An explicit, possibly uneven plan: the steps that run the whole UNet. Overrides interval."""

    def __post_init__(self) -> None:
        _check_text("prompt", self.prompt)
        if self.negative_prompt is not None:
            _check_text("negative_prompt", self.negative_prompt)
        _check_int("steps", self.steps, 1, 1000)
        if not (_is_number(self.guidance) and 0 <= self.guidance <= 100):
            raise InvalidParams("guidance", self.guidance, "needed a number from 0 to 100")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.scheduler not in SCHEDULERS:
            raise InvalidParams(
                "scheduler", self.scheduler, f"needed one of {', '.join(SCHEDULERS)}"
            )
        _check_int("cache_interval", self.cache_interval, 1, 1000)
        if self.deep_steps is not None:
            _check_deep_steps(self.deep_steps, self.steps)

    @property
    def is_guided(self) -> bool:
        """Guidance of 1 or less means none, as in diffusers: one row instead of two."""
        return self.guidance > 1

    def resolve(self, sizes: Sizes, new_seed: Callable[[], int]) -> GenerationParams:
        """The same request with nothing left open, checked against what the model allows."""
        return replace(
            self,
            width=sizes.resolve("width", self.width),
            height=sizes.resolve("height", self.height),
            seed=new_seed() if self.seed is None else self.seed,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationParams:
        """From JSON; a key it does not know is an error, never dropped."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise InvalidParams(key, values[key], f"needed one of {', '.join(known)}")
        plan = values.get("deep_steps")
        if plan is not None and not isinstance(plan, list | tuple):
            raise InvalidParams("deep_steps", plan, "needed a list of step numbers")
        return cls(**{**values, "deep_steps": None if plan is None else tuple(plan)})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if not _is_int(value) or not low <= value <= high:  # type: ignore[operator]
        raise InvalidParams(field, value, f"needed a whole number from {low} to {high}")


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidParams(field, value, "needed text")
    if len(value) > MAX_PROMPT_CHARS:
        raise InvalidParams(field, f"{len(value)} characters", f"at most {MAX_PROMPT_CHARS}")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise InvalidParams(field, value, "needed valid Unicode, without lone surrogates")


def _check_deep_steps(plan: tuple[int, ...], steps: int) -> None:
    is_numbers = bool(plan) and all(_is_int(step) for step in plan)
    is_rising = is_numbers and all(a < b for a, b in itertools.pairwise(plan))
    if not is_rising or plan[0] != 0 or plan[-1] >= steps:
        raise InvalidParams(
            "deep_steps", plan, f"needed rising step numbers from 0 to {steps - 1}, 0 the first"
        )
