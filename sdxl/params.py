"""The parameters of a picture: a frozen dataclass whose fields are the table of parameters.

A field states a parameter's name, type, default, bounds, REST name, name in other programs, label
and help. Flags, the REST body and its schema, batch columns, pictures' metadata and the web page's
controls are derived from the table. This module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from sdxl.attachments import Lora, merged, take_tags
from sdxl.controls import Control
from sdxl.image_prompts import ImagePrompt
from sdxl.parameter import (
    FEW_STEPS,
    USUAL_INTERVAL,
    Attachment,
    needed_steps,
    parameter,
    table_of,
)
from sdxl.parameter import MAX_STEPS as MAX_STEPS
from sdxl.parameter import SIZE as SIZE
from sdxl.parameter import InvalidParams as InvalidParams
from sdxl.parameter import Parameter as Parameter
from sdxl.pictured import Pictured
from sdxl.scheduler_names import OTHER_NAMES, SCHEDULERS, full_label
from sdxl.sizes import Sizes as Sizes

T = TypeVar("T")
MAX_SEED = 2**63 - 1
DRAWN_SEEDS = 2**32
"""Random seeds are below this, so that they can be copied by hand."""
MAX_PROMPT_CHARS = 10_000
EDIT_STRENGTH, MASK_STRENGTH = 0.8, 1.0
"""Default strengths without and with a mask."""
MAX_MASK_BLUR, MAX_MASK_PADDING = 64, 1024
"""In pixels."""
ENCODINGS = ("mean", "sample")
"""How the VAE encodes an image: the mean of its latents, or a sample."""
UPSCALERS = LANCZOS, LATENT = "lanczos", "latent"
"""A Lanczos filter enlarges the decoded picture; `latent` interpolates its latents."""
UPSCALE_STRENGTH = 0.4
REFINER_SWITCH_AT = 0.8
MAX_NAME_CHARS = 500
MAX_UPSCALE = 4.0
"""The model's largest size may allow less."""
DEEPCACHE, GUIDANCE, EDITING = "DeepCache", "Guidance", "Editing"
VARIATION = "Variation"
UPSCALING, ADAPTERS = "Upscale", "LoRAs and ControlNets"
"""Groups of parameters."""


@dataclass(frozen=True)
class GenerationParams:
    """The parameters of one picture. Defaults suit the embedded model; `resolve` fills None."""

    prompt: str = parameter(
        "", "Prompt", "what to draw; (word:1.3) gives a word more weight", high=MAX_PROMPT_CHARS
    )
    negative_prompt: str | None = parameter(
        None,
        "Negative prompt",
        "what to keep out of the picture",
        high=MAX_PROMPT_CHARS,
        is_always_stored=True,
        placeholder="What you do not want to see",
    )
    width: int | None = parameter(
        None, "Width", "in pixels (default: the model's own)", rest=SIZE, metavar="PIXELS"
    )
    height: int | None = parameter(
        None, "Height", "in pixels (default: the model's own)", rest=SIZE, metavar="PIXELS"
    )
    steps: int = parameter(
        20,
        "Steps",
        "denoising steps",
        low=1,
        high=MAX_STEPS,
        aliases=("num_inference_steps",),
        infotext="Steps",
    )
    guidance: float = parameter(
        5.0,
        "Guidance",
        "how closely to follow the prompt; 1 or less = no guidance",
        low=0,
        high=100,
        rest="guidance_scale",
        aliases=("cfg_scale", "cfg"),
        infotext="CFG scale",
    )
    seed: int | None = parameter(
        None,
        "Seed",
        "fixes the noise; picture i of n uses seed + i (default: random)",
        low=0,
        high=MAX_SEED,
        infotext="Seed",
        placeholder="new each time",
    )
    variation_strength: float | None = parameter(
        None,
        "Variation",
        "share of variation_seed's noise in the noise; 0 = off",
        low=0,
        high=1,
        aliases=("subseed_strength",),
        infotext="Variation seed strength",
        placeholder="0",
        group=VARIATION,
    )
    variation_seed: int | None = parameter(
        None,
        "Variation seed",
        "picture i of n uses variation_seed + i, and the same seed (default 0)",
        low=0,
        high=MAX_SEED,
        aliases=("subseed",),
        infotext="Variation seed",
        placeholder="0",
        group=VARIATION,
    )
    scheduler: str = parameter(
        "euler",
        "Scheduler",
        f"one of {', '.join(SCHEDULERS)}",
        choices=tuple(SCHEDULERS),
        labels={name: full_label(name) for name in SCHEDULERS},
        other_choices=OTHER_NAMES,
        aliases=("sampler_name", "sampler"),
        infotext="Sampler",
    )
    cache_interval: int | None = parameter(
        None,
        "DeepCache",
        f"full UNet every N steps; 1 = no caching (default {USUAL_INTERVAL}, "
        f"below {FEW_STEPS} steps 1)",
        low=1,
        high=MAX_STEPS,
        infotext="Cache interval",
        placeholder=f"{USUAL_INTERVAL}, below {FEW_STEPS} steps 1",
        group=DEEPCACHE,
    )
    deep_steps: tuple[int, ...] | None = parameter(
        None,
        "Deep steps",
        "step numbers, from 0, that run the full UNet; replaces cache_interval",
        infotext="Deep steps",
        is_always_stored=True,
        placeholder="such as 0,2,5",
        metavar="I,J,…",
        group=DEEPCACHE,
    )
    guidance_interval: tuple[float, float] | None = parameter(
        None,
        "Guidance interval",
        "apply guidance only in this range of the steps: 0,0.6 = the first 6 of 10; "
        "a step without guidance costs half",
        infotext="Guidance interval",
        placeholder="0,1",
        metavar="FROM,TO",
        group=GUIDANCE,
    )
    guided_steps: tuple[int, ...] | None = parameter(
        None,
        "Guided steps",
        "step numbers, from 0, that are guided; replaces guidance_interval",
        infotext="Guided steps",
        placeholder="such as 0,1,2",
        metavar="I,J,…",
        group=GUIDANCE,
    )
    strength: float | None = parameter(
        None,
        "Strength",
        "how much to change the image, above 0; 1 = completely (default "
        f"{EDIT_STRENGTH}, with a mask {MASK_STRENGTH:g})",
        low=0,
        high=1,
        aliases=("denoising_strength",),
        infotext="Denoising strength",
        is_for_edits=True,
        edit_defaults=(EDIT_STRENGTH, MASK_STRENGTH),
        placeholder=f"{EDIT_STRENGTH}, with a mask {MASK_STRENGTH:g}",
        group=EDITING,
    )
    mask_blur: int | None = parameter(
        None,
        "Mask blur",
        "soften the mask's edges by this many pixels (default 0)",
        low=0,
        high=MAX_MASK_BLUR,
        infotext="Mask blur",
        is_for_edits=True,
        is_for_masks=True,
        placeholder="none",
        group=EDITING,
    )
    mask_padding: int | None = parameter(
        None,
        "Mask padding",
        "redraw only the masked part, enlarged, with this many pixels around it",
        low=0,
        high=MAX_MASK_PADDING,
        infotext="Masked area padding",
        is_for_edits=True,
        is_for_masks=True,
        switch="Only masked",
        switch_value=32,
        group=EDITING,
    )
    encoding: str | None = parameter(
        None,
        "Encoding",
        "VAE encoding of the image: mean (deterministic) or sample (random, by the seed)",
        choices=ENCODINGS,
        is_for_edits=True,
        placeholder=ENCODINGS[0],
        group=EDITING,
    )
    upscale: float | None = parameter(
        None,
        "Upscale",
        "upscale factor, then refine; 1 = off",
        low=1,
        high=MAX_UPSCALE,
        infotext="Hires upscale",
        placeholder="1",
        metavar="TIMES",
        group=UPSCALING,
    )
    upscaler: str | None = parameter(
        None,
        "Upscaler",
        "enlarge the picture (lanczos) or its latents (latent)",
        choices=UPSCALERS,
        infotext="Hires upscaler",
        placeholder=LANCZOS,
        group=UPSCALING,
    )
    upscale_strength: float | None = parameter(
        None,
        "Upscale strength",
        "how much to change the enlarged picture, above 0; 1 = completely "
        f"(default {UPSCALE_STRENGTH})",
        low=0,
        high=1,
        infotext="Hires strength",
        placeholder=str(UPSCALE_STRENGTH),
        group=UPSCALING,
    )
    upscale_steps: int | None = parameter(
        None,
        "Upscale steps",
        "denoising steps at the larger size; upscale_strength is the part that runs (default: as "
        "steps)",
        low=1,
        high=MAX_STEPS,
        placeholder="as steps",
        group=UPSCALING,
    )
    loras: tuple[Lora, ...] | None = parameter(
        None,
        "LoRAs",
        "LoRAs to apply, each with its weight, 1 unless given; <lora:NAME:WEIGHT> in a prompt does "
        "the same",
        flag="lora",
        group=ADAPTERS,
    )
    controls: tuple[Control, ...] | None = parameter(
        None,
        "ControlNets",
        "ControlNets to apply, each with the picture of its map",
        flag="control",
        flag_help="; without =FILE the edited image is the map; :canny draws its edges; KEY is "
        "mode, resize, type, low or high",
        group=ADAPTERS,
    )
    image_prompts: tuple[ImagePrompt, ...] | None = parameter(
        None,
        "Image prompts",
        "pictures as prompts, each with the name of an IP-Adapter",
        flag="image-prompt",
        flag_help="; style or composition takes only that from the picture",
        group=ADAPTERS,
    )

    refiner: str | None = parameter(
        None,
        "Refiner",
        "name of a refiner that runs the last steps",
        flag_help=": mini, a folder, a safetensors file or a hub id; a service's in /v1/models",
        high=MAX_NAME_CHARS,
        infotext="Refiner",
        placeholder="none",
        metavar="NAME",
    )
    refiner_switch_at: float | None = parameter(
        None,
        "Refiner from",
        "part of the noise schedule after which the refiner takes over, by timesteps "
        f"(default {REFINER_SWITCH_AT})",
        low=0,
        high=1,
        infotext="Refiner switch at",
        placeholder=str(REFINER_SWITCH_AT),
    )

    def __post_init__(self) -> None:
        # The class is frozen. Another program's scheduler name is replaced before use.
        object.__setattr__(self, "scheduler", PARAMETERS["scheduler"].chosen(self.scheduler))
        for each in PARAMETERS.values():
            each.check(getattr(self, each.name))
        self._check_taken("strength", self.steps, self.strength)
        for name in ("deep_steps", "guided_steps"):
            numbers = getattr(self, name)
            if numbers is not None and numbers[-1] >= self.taken_steps:
                raise InvalidParams(name, numbers, needed_steps(self.taken_steps))
        if self.deep_steps is not None and self.deep_steps[0] != 0:
            raise InvalidParams("deep_steps", self.deep_steps, "must start with step 0")
        if not self.variation_strength:
            self._check_unset(("variation_seed",), "needs variation_strength above 0")
        if self.refiner is None:
            self._check_unset(("refiner_switch_at",), "needs refiner")
        if self.is_upscaled:
            strength = value_or(self.upscale_strength, UPSCALE_STRENGTH)
            self._check_taken("upscale_strength", self.upscale_steps or self.steps, strength)
        else:
            unused = ("upscaler", "upscale_strength", "upscale_steps")
            self._check_unset(unused, "needs upscale above 1")

    def _check_unset(self, names: Iterable[str], needed: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise InvalidParams(name, value, needed)

    def _check_taken(self, name: str, steps: int, strength: float | None) -> None:
        if strength is not None and int(steps * strength) < 1:
            needed = f"must be at least {1 / steps:.2g} with {steps} steps, to take one"
            raise InvalidParams(name, strength, needed)

    @property
    def is_edit(self) -> bool:
        return self.strength is not None

    @property
    def taken_steps(self) -> int:
        """The steps that run. An edit skips the first ones, as in diffusers."""
        return self.steps if self.strength is None else int(self.steps * self.strength)

    @property
    def first_step(self) -> int:
        return self.steps - self.taken_steps

    @property
    def has_few_steps(self) -> bool:
        """True if a leg's schedule has few steps. Steps that an edit skips count too."""
        return any(leg.steps < FEW_STEPS for leg in self.legs)

    @property
    def interval(self) -> int:
        """The cache interval; by default 1 for few steps."""
        return value_or(self.cache_interval, 1 if self.has_few_steps else USUAL_INTERVAL)

    @property
    def is_upscaled(self) -> bool:
        return value_or(self.upscale, 1.0) > 1

    @property
    def legs(self) -> tuple[GenerationParams, ...]:
        """The legs in order: the picture, then the refinement of an upscaled picture at the larger
        size. `deep_steps` and `guided_steps` apply to the first leg, a refiner to the last."""
        if not self.is_upscaled:
            return (self,)
        bare = replace(self, upscale=None, upscaler=None, upscale_strength=None, upscale_steps=None)
        enlarged = replace(
            bare,
            width=self._enlarged(self.width),
            height=self._enlarged(self.height),
            steps=self.upscale_steps or self.steps,
            strength=value_or(self.upscale_strength, UPSCALE_STRENGTH),
            deep_steps=None,
            guided_steps=None,
        )
        return replace(bare, refiner=None, refiner_switch_at=None), enlarged

    @property
    def all_steps(self) -> int:
        """Steps taken in all legs."""
        return sum(leg.taken_steps for leg in self.legs)

    @property
    def result_size(self) -> tuple[int, int]:
        """Width and height of the finished picture; the request must be resolved."""
        last = self.legs[-1]
        assert last.width and last.height
        return last.width, last.height

    def _enlarged(self, side: int | None) -> int | None:
        times = value_or(self.upscale, 1.0)
        return side and round(side * times / Sizes.multiple) * Sizes.multiple

    def for_edit(self, *, has_mask: bool) -> GenerationParams:
        """Return the request for an edit, with its strength filled. A request that only upscales
        its image becomes its own second leg."""
        if has_mask and self.is_upscaled:
            needed = "cannot be used with a mask; upscale the result in a second request"
            raise InvalidParams("upscale", self.upscale, needed)
        if not has_mask:
            for_masks = (each.name for each in PARAMETERS.values() if each.is_for_masks)
            self._check_unset(for_masks, "needs a mask")
        if self.is_upscaled and not self.is_edit:
            redrawn = "to upscale an image, or a strength to redraw it first"
            if self.upscaler == LATENT:
                raise InvalidParams("upscaler", LATENT, f"must be {LANCZOS} {redrawn}")
            self._check_unset(("deep_steps", "guided_steps"), f"cannot be set {redrawn}")
            return self.legs[-1]
        strength = PARAMETERS["strength"].edit_defaults[has_mask]
        return self if self.is_edit else replace(self, strength=strength)

    def check_plain(self) -> None:
        """Raise InvalidParams for a parameter of edits in a request without an image."""
        for_edits = (each.name for each in PARAMETERS.values() if each.is_for_edits)
        self._check_unset(for_edits, "needs an image to edit")

    @property
    def variation(self) -> tuple[int, float] | None:
        """The variation's seed, and the strength with which its noise is mixed in."""
        strength = self.variation_strength
        return (value_or(self.variation_seed, 0), strength) if strength else None

    def picture(self, number: int, first_seed: int) -> GenerationParams:
        """Return the parameters of one of the request's pictures; `number` starts at 0."""
        if self.variation is None:
            return replace(self, seed=first_seed + number)
        return replace(self, seed=first_seed, variation_seed=self.variation[0] + number)

    @property
    def is_guided(self) -> bool:
        """False for a guidance of 1 or less, as in diffusers."""
        return self.guidance > 1

    def resolve(self, sizes: Sizes, new_seed: Callable[[], int]) -> GenerationParams:
        """Fill every open field and check the request against the model's sizes."""
        resolved = replace(
            self.without_tags(),
            width=sizes.resolve("width", self.width),
            height=sizes.resolve("height", self.height),
            seed=new_seed() if self.seed is None else self.seed,
            cache_interval=self.interval,
            upscaler=value_or(self.upscaler, LANCZOS) if self.is_upscaled else None,
            upscale_strength=self.legs[-1].strength if self.is_upscaled else None,
            variation_strength=self.variation_strength or None,
            variation_seed=self.variation[0] if self.variation else None,
            refiner_switch_at=value_or(self.refiner_switch_at, REFINER_SWITCH_AT)
            if self.refiner is not None
            else None,
        )
        resolved.check_result(sizes)
        return resolved

    def without_tags(self) -> GenerationParams:
        """Move the LoRA tags of the prompts to `loras`."""
        prompt, positive_loras = take_tags(self.prompt, "prompt")
        negative, negative_loras = take_tags(self.negative_prompt or "", "negative_prompt")
        return replace(
            self,
            prompt=prompt,
            negative_prompt=(negative or None) if negative_loras else self.negative_prompt,
            loras=merged([*(self.loras or ()), *positive_loras, *negative_loras]) or None,
        )

    def check_result(self, sizes: Sizes) -> None:
        """Raise InvalidParams for an unsupported upscaled size. The size must be filled."""
        if not self.is_upscaled:
            return
        across, down = self.result_size
        if max(across, down) > sizes.maximum or across % sizes.multiple or down % sizes.multiple:
            result = f"{self.width}x{self.height} becomes {across}x{down}"
            allowed = f"must give multiples of {sizes.multiple} up to {sizes.maximum} ({result})"
            raise InvalidParams("upscale", self.upscale, allowed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_rest(self) -> dict[str, Any]:
        """Return the body of a REST request for this picture, without open fields."""
        values = self.as_dict()
        body = {p.client_name: values[p.name] for p in of_rest()}
        body |= {"cache_interval": self.interval}
        if self.width is not None and self.height is not None:
            body[SIZE] = f"{self.width}x{self.height}"
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationParams:
        """Read from JSON. Raise InvalidParams for an unknown key."""
        for key in values:
            if key not in PARAMETERS:
                raise InvalidParams.unknown_field(key, PARAMETERS)
        lists = {
            name: PARAMETERS[name].read_list(value)
            for name in LISTS
            if (value := values.get(name)) is not None
        }
        return cls(**{**values, **lists})


def value_or(value: T | None, default: T) -> T:
    return default if value is None else value


def of_rest() -> Iterator[Parameter]:
    """Yield the parameters that have their own REST field; width and height share `size`."""
    return (p for p in PARAMETERS.values() if p.rest != SIZE)


PARAMETERS: Mapping[str, Parameter] = table_of(GenerationParams)
LISTS = tuple(p.name for p in PARAMETERS.values() if p.is_list)
PICTURED: Mapping[str, Parameter] = {
    name: each
    for name, each in PARAMETERS.items()
    if each.kind is Attachment and issubclass(each.item, Pictured)
}
"""Parameters that are lists of entries with pictures."""
BY_NAME: Mapping[str, Parameter] = {name: p for p in PARAMETERS.values() for name in p.names}
COUNT_ALIASES = ("num_images_per_prompt",)
"""Other programs' names for `n`, the number of pictures."""


def renamed(values: Mapping[str, Any], name_of: Callable[[Parameter], str]) -> dict[str, Any]:
    """Replace other programs' parameter names; `name_of` returns the new name. Raise InvalidParams
    for a parameter that is given under two names."""
    result: dict[str, Any] = {}
    for given, value in values.items():
        name = name_of(BY_NAME[given]) if given in BY_NAME else given
        if name in result or (name != given and name in values):
            raise InvalidParams(given, None, f"must not be set beside {name}: it is the same")
        result[name] = value
    return result
