"""What a picture is made from: one table of fields, and the frozen dataclass that holds them.

Each parameter is stated here once: name, type, default, bounds, what it is called over REST and by
other programs, label and help. Flags, the REST body and its schema, a batch's columns, pictures'
metadata and the web page's controls are derived from the table. Without any heavy import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from sdxl.parameter import FEW_STEPS, USUAL_INTERVAL, kind_of, needed_steps
from sdxl.parameter import MAX_STEPS as MAX_STEPS
from sdxl.parameter import SIZE as SIZE
from sdxl.parameter import InvalidParams as InvalidParams
from sdxl.parameter import Parameter as Parameter
from sdxl.scheduler_names import SCHEDULERS
from sdxl.sizes import Sizes as Sizes

T = TypeVar("T")
MAX_SEED = 2**63 - 1
DRAWN_SEEDS = 2**32
"""A seed that nobody names is drawn below this, so that a person can read it out."""
MAX_PROMPT_CHARS = 10_000
EDIT_STRENGTH, MASK_STRENGTH = 0.8, 1.0
"""of who names none; what is masked is made anew altogether"""
MAX_MASK_BLUR, MAX_MASK_PADDING = 64, 1024
"""pixels"""
ENCODINGS = ("mean", "sample")
"""of an image: the mean of its latents, or a sample of them"""
UPSCALERS = LANCZOS, LATENT = "lanczos", "latent"
"""what is enlarged: the decoded picture by Lanczos' filter, or its latents between their values"""
UPSCALE_STRENGTH = 0.4
MAX_UPSCALE = 4.0
"""the model's largest size allows less"""


def parameter(default: Any, label: str, text: str, **facts: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(label, text, **facts)})


@dataclass(frozen=True)
class GenerationParams:
    """One image. Defaults are the embedded model's best; None is filled by `resolve`."""

    prompt: str = parameter(
        "", "Prompt", "what to draw; (word:1.3) weighs it", high=MAX_PROMPT_CHARS
    )
    negative_prompt: str | None = parameter(
        None,
        "Negative prompt",
        "what to keep out of it",
        high=MAX_PROMPT_CHARS,
        placeholder="What you do not want to see",
    )
    width: int | None = parameter(
        None, "Width", "the model's own size unless given", rest=SIZE, metavar="PIXELS"
    )
    height: int | None = parameter(
        None, "Height", "the model's own size unless given", rest=SIZE, metavar="PIXELS"
    )
    steps: int = parameter(20, "Steps", "denoising steps", low=1, high=MAX_STEPS, infotext="Steps")
    guidance: float = parameter(
        5.0,
        "Guidance",
        "how closely to follow the prompt; 1 or less for no guidance",
        low=0,
        high=100,
        rest="guidance_scale",
        infotext="CFG scale",
    )
    seed: int | None = parameter(
        None,
        "Seed",
        "start of the noise; image i of n uses seed + i; random unless given",
        low=0,
        high=MAX_SEED,
        infotext="Seed",
        placeholder="new each time",
    )
    scheduler: str = parameter(
        "euler",
        "Scheduler",
        f"one of {', '.join(SCHEDULERS)}",
        choices=tuple(SCHEDULERS),
        infotext="Sampler",
        metavar="NAME",
    )
    cache_interval: int | None = parameter(
        None,
        "DeepCache",
        "run the whole UNet in one step of so many; 1 is the exact model (unless given: "
        f"{USUAL_INTERVAL}, with fewer than {FEW_STEPS} steps 1)",
        low=1,
        high=MAX_STEPS,
        infotext="Cache interval",
        placeholder=f"{USUAL_INTERVAL}, with fewer than {FEW_STEPS} steps 1",
    )
    deep_steps: tuple[int, ...] | None = parameter(
        None,
        "Deep steps",
        "the very steps that run the whole UNet, from 0; instead of cache_interval",
        infotext="Deep steps",
        placeholder="such as 0,2,5",
        metavar="I,J,…",
    )
    guidance_interval: tuple[float, float] | None = parameter(
        None,
        "Guidance interval",
        "the part of the steps that is guided, as two shares of them: 0,0.6 for the first six of "
        "ten; a step without guidance computes half as much",
        infotext="Guidance interval",
        is_told_if_given=True,
        placeholder="0,1",
        metavar="FROM,TO",
    )
    guided_steps: tuple[int, ...] | None = parameter(
        None,
        "Guided steps",
        "the very steps that are guided, from 0; instead of guidance_interval",
        infotext="Guided steps",
        is_told_if_given=True,
        placeholder="such as 0,1,2",
        metavar="I,J,…",
    )
    strength: float | None = parameter(
        None,
        "Strength",
        "the share of the steps that an image is made anew in, above 0 to 1 for all (unless "
        f"given: {EDIT_STRENGTH}, with a mask {MASK_STRENGTH:g})",
        low=0,
        high=1,
        infotext="Denoising strength",
        is_for_edits=True,
        edit_defaults=(EDIT_STRENGTH, MASK_STRENGTH),
        placeholder=f"{EDIT_STRENGTH}, with a mask {MASK_STRENGTH:g}",
    )
    mask_blur: int | None = parameter(
        None,
        "Mask blur",
        "how far to soften the mask's edges, in pixels; a sharp edge unless given",
        low=0,
        high=MAX_MASK_BLUR,
        infotext="Mask blur",
        is_for_edits=True,
        is_for_masks=True,
        placeholder="none",
    )
    mask_padding: int | None = parameter(
        None,
        "Only masked",
        "work at the masked part alone, enlarged, with so many pixels around it",
        low=0,
        high=MAX_MASK_PADDING,
        infotext="Masked area padding",
        is_for_edits=True,
        is_for_masks=True,
        placeholder="whole image",
    )
    encoding: str | None = parameter(
        None,
        "Encoding",
        f"of the image, one of {', '.join(ENCODINGS)}: the same every time, or drawn by the seed",
        choices=ENCODINGS,
        is_for_edits=True,
        metavar="NAME",
        placeholder=ENCODINGS[0],
    )
    upscale: float | None = parameter(
        None,
        "Upscale",
        "enlarge the finished picture so many times and make it anew at that size; 1 does not",
        low=1,
        high=MAX_UPSCALE,
        infotext="Hires upscale",
        is_told_if_given=True,
        placeholder="1",
        metavar="TIMES",
    )
    upscaler: str | None = parameter(
        None,
        "Upscaler",
        f"how upscale enlarges, one of {', '.join(UPSCALERS)}: the picture, or its latents",
        choices=UPSCALERS,
        infotext="Hires upscaler",
        is_told_if_given=True,
        metavar="NAME",
        placeholder=LANCZOS,
    )
    upscale_strength: float | None = parameter(
        None,
        "Upscale strength",
        "the share of the steps that are taken at the larger size, above 0 to 1 (unless given: "
        f"{UPSCALE_STRENGTH})",
        low=0,
        high=1,
        infotext="Hires strength",
        is_told_if_given=True,
        placeholder=str(UPSCALE_STRENGTH),
    )
    upscale_steps: int | None = parameter(
        None,
        "Upscale steps",
        "of the schedule at the larger size, of which upscale_strength takes its share; as many "
        "as steps unless given",
        low=1,
        high=MAX_STEPS,
        is_told_if_given=True,
        placeholder="as steps",
    )

    def __post_init__(self) -> None:
        for each in PARAMETERS.values():
            each.check(getattr(self, each.name))
        self._check_taken("strength", self.steps, self.strength)
        for name in ("deep_steps", "guided_steps"):
            numbers = getattr(self, name)
            if numbers is not None and numbers[-1] >= self.taken_steps:
                raise InvalidParams(name, numbers, needed_steps(self.taken_steps))
        if self.deep_steps is not None and self.deep_steps[0] != 0:
            raise InvalidParams("deep_steps", self.deep_steps, "needed 0 the first of them")
        if self.is_upscaled:
            strength = usual(self.upscale_strength, UPSCALE_STRENGTH)
            self._check_taken("upscale_strength", self.upscale_steps or self.steps, strength)
            return
        unread = ("upscaler", "upscale_strength", "upscale_steps")
        self._check_unsaid(unread, "needed upscale with it, above 1")

    def _check_unsaid(self, names: Iterable[str], needed: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise InvalidParams(name, value, needed)

    def _check_taken(self, name: str, steps: int, strength: float | None) -> None:
        if strength is not None and int(steps * strength) < 1:
            needed = f"{steps} steps need at least {1 / steps:.2g}, to take one"
            raise InvalidParams(name, strength, needed)

    @property
    def is_edit(self) -> bool:
        """A picture is made from another one."""
        return self.strength is not None

    @property
    def taken_steps(self) -> int:
        """An edit leaves out the first ones, as in diffusers."""
        return self.steps if self.strength is None else int(self.steps * self.strength)

    @property
    def first_step(self) -> int:
        return self.steps - self.taken_steps

    @property
    def has_few_steps(self) -> bool:
        """At one of its sizes. What counts is how far apart steps are, not how many are taken."""
        return any(leg.steps < FEW_STEPS for leg in self.legs)

    @property
    def interval(self) -> int:
        """One step in so many is deep; where nobody said, all of few."""
        return usual(self.cache_interval, 1 if self.has_few_steps else USUAL_INTERVAL)

    @property
    def is_upscaled(self) -> bool:
        return usual(self.upscale, 1.0) > 1

    @property
    def legs(self) -> tuple[GenerationParams, ...]:
        """What is denoised one after the other: the picture, and if it is upscaled, the same made
        anew at the larger size. Steps with numbers of their own are the first one's."""
        if not self.is_upscaled:
            return (self,)
        bare = replace(self, upscale=None, upscaler=None, upscale_strength=None, upscale_steps=None)
        enlarged = replace(
            bare,
            width=self.enlarged(self.width),
            height=self.enlarged(self.height),
            steps=self.upscale_steps or self.steps,
            strength=usual(self.upscale_strength, UPSCALE_STRENGTH),
            deep_steps=None,
            guided_steps=None,
        )
        return bare, enlarged

    @property
    def all_steps(self) -> int:
        """That are taken, of all legs."""
        return sum(leg.taken_steps for leg in self.legs)

    @property
    def result_size(self) -> tuple[int, int]:
        """Width and height of the finished picture, of a resolved request."""
        last = self.legs[-1]
        assert last.width and last.height
        return last.width, last.height

    def enlarged(self, side: int | None) -> int | None:
        times = usual(self.upscale, 1.0)
        return side and round(side * times / Sizes.multiple) * Sizes.multiple

    def for_edit(self, *, has_mask: bool) -> GenerationParams:
        """The same for a picture that is made from another one, its strength filled. Whoever asks
        for nothing but its upscaling gets the second leg alone, of the image at that size."""
        if has_mask and self.is_upscaled:
            needed = "needed no mask with it; upscale the result by itself"
            raise InvalidParams("upscale", self.upscale, needed)
        if not has_mask:
            of_masks = (each.name for each in PARAMETERS.values() if each.is_for_masks)
            self._check_unsaid(of_masks, "needed a mask with it")
        if self.is_upscaled and not self.is_edit:
            anew = "for an image, or a strength to make it anew by first"
            if self.upscaler == LATENT:
                raise InvalidParams("upscaler", LATENT, f"needed {LANCZOS} {anew}")
            self._check_unsaid(("deep_steps", "guided_steps"), f"needed none {anew}")
            return self.legs[-1]
        strength = PARAMETERS["strength"].edit_defaults[has_mask]
        return self if self.is_edit else replace(self, strength=strength)

    def check_plain(self) -> None:
        """That nothing is said of an image where none is given."""
        of_edits = (each.name for each in PARAMETERS.values() if each.is_for_edits)
        self._check_unsaid(of_edits, "needed an image with it, to make it anew")

    @property
    def is_guided(self) -> bool:
        """Guidance of 1 or less means none, as in diffusers: one row instead of two."""
        return self.guidance > 1

    def resolve(self, sizes: Sizes, new_seed: Callable[[], int]) -> GenerationParams:
        """The same request with nothing left open, checked against what the model allows."""
        resolved = replace(
            self,
            width=sizes.resolve("width", self.width),
            height=sizes.resolve("height", self.height),
            seed=new_seed() if self.seed is None else self.seed,
            cache_interval=self.interval,
            upscaler=usual(self.upscaler, LANCZOS) if self.is_upscaled else None,
            upscale_strength=self.legs[-1].strength if self.is_upscaled else None,
        )
        resolved.check_result(sizes)
        return resolved

    def check_result(self, sizes: Sizes) -> None:
        """That what is finished fits, too, of a request with its size filled."""
        if not self.is_upscaled:
            return
        across, down = self.result_size
        if max(across, down) > sizes.maximum or across % sizes.multiple or down % sizes.multiple:
            found = f"{self.width}x{self.height} becomes {across}x{down}"
            needed = f"{found}; needed multiples of {sizes.multiple} up to {sizes.maximum}"
            raise InvalidParams("upscale", self.upscale, needed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_rest(self) -> dict[str, Any]:
        """What a service is asked, so that it makes this picture; what is open stays unsaid."""
        body = {p.client_name: getattr(self, p.name) for p in of_rest()}
        body |= {"cache_interval": self.interval}
        if self.width and self.height:
            body[SIZE] = f"{self.width}x{self.height}"
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationParams:
        """From JSON; a key it does not know is an error, never dropped."""
        for key in values:
            if key not in PARAMETERS:
                raise InvalidParams(key, values[key], f"needed one of {', '.join(PARAMETERS)}")
        lists = {name: value for name in LISTS if (value := values.get(name)) is not None}
        for name, value in lists.items():
            if not isinstance(value, list | tuple):
                raise InvalidParams(name, value, "needed a list of numbers")
        return cls(**{**values, **{name: tuple(value) for name, value in lists.items()}})


def usual(value: T | None, default: T) -> T:
    return default if value is None else value


def of_rest() -> Iterator[Parameter]:
    """Those that REST has a field for, each its own."""
    return (p for p in PARAMETERS.values() if p.rest != SIZE)


def _read_table() -> dict[str, Parameter]:
    hints = get_type_hints(GenerationParams)
    return {
        f.name: replace(
            f.metadata["parameter"], name=f.name, default=f.default, **kind_of(hints[f.name])
        )
        for f in fields(GenerationParams)
    }


PARAMETERS: Mapping[str, Parameter] = MappingProxyType(_read_table())
LISTS = tuple(p.name for p in PARAMETERS.values() if p.kind is tuple)
