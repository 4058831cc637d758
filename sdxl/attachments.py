"""A request's LoRAs, and the tags in prompts that name LoRAs. It knows no files and no tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import MISSING, dataclass

from sdxl.parameter import MAX_NAME, Attachment, InvalidParams, parameter
from sdxl.suggestions import nearest

MAX_WEIGHT = 2
TAG = re.compile(r"( ?)<(lora|lyco|hypernet):([^<>]*)(>?)( ?)", re.IGNORECASE)
HYPERNETWORK = "hypernet"
TAG_FORM = "must name a LoRA as <lora:NAME:WEIGHT> or <lora:NAME:TEXT_WEIGHT:WEIGHT>"
WEIGHTS = ("te", "unet")
"""a tag's weights in order, by their names in a tag"""


@dataclass(frozen=True)
class Lora(Attachment):
    name: str = parameter(MISSING, "Name", "its name, as the model lists it", high=MAX_NAME)
    weight: float = parameter(
        1.0, "Weight", "1 = full strength, 0 = none", low=-MAX_WEIGHT, high=MAX_WEIGHT
    )
    text_weight: float | None = parameter(
        None,
        "Text weight",
        "weight in the text encoders (default: as weight)",
        low=-MAX_WEIGHT,
        high=MAX_WEIGHT,
    )

    @property
    def in_text(self) -> float:
        return self.weight if self.text_weight is None else self.text_weight

    @property
    def tag(self) -> str:
        """The LoRA's tag in a prompt."""
        weights = [self.weight] if self.in_text == self.weight else [self.in_text, self.weight]
        return f"<lora:{':'.join((self.name, *map(_shortest, weights)))}>"


def unknown_name(field: str, value: str, known: Collection[str], kinds: str) -> InvalidParams:
    """Return the error for an unlisted name, with the most similar names."""
    near = nearest(value, known, count=3, cutoff=0)
    needed = f"such as {', '.join(near)}" if near else "but the model has none"
    return InvalidParams(field, value, f"must name {kinds} of the model, {needed}")


def merged(loras: Iterable[Lora]) -> tuple[Lora, ...]:
    """Add up the weights of each name."""
    sums: dict[str, tuple[float, float]] = {}
    for each in loras:
        in_unet, in_text = sums.get(each.name, (0.0, 0.0))
        sums[each.name] = in_unet + each.weight, in_text + each.in_text
    return tuple(
        Lora(name, in_unet, None if in_text == in_unet else in_text)
        for name, (in_unet, in_text) in sums.items()
    )


def with_tags(prompt: str, loras: Sequence[Lora]) -> str:
    """Append the tags of these LoRAs to the prompt."""
    return " ".join((prompt, *(each.tag for each in loras))).lstrip() if loras else prompt


def take_tags(text: str, field: str) -> tuple[str, list[Lora]]:
    """Return the text without tags, and the tags' LoRAs."""
    matches = list(TAG.finditer(text))
    if not matches:
        return text, []
    loras = [_checked_tag(match, field) for match in matches]
    rest = TAG.sub(lambda match: match[1] or match[5], text).strip()
    if TAG.search(rest):
        raise InvalidParams(field, text, "must not have a tag within a tag")
    return rest, loras


def _checked_tag(match: re.Match[str], field: str) -> Lora:
    _, kind, content, end, _ = match.groups()
    shown = match[0].strip()[:60]
    if kind.lower() == HYPERNETWORK:
        raise InvalidParams(field, shown, "must not name hypernetworks: they are not supported")
    try:
        lora = _read_tag(content) if end else None
    except ValueError:
        lora = None
    if lora is None:
        raise InvalidParams(field, shown, TAG_FORM)
    lora.check(field)
    return lora


def _read_tag(content: str) -> Lora:
    """Read a tag as stable-diffusion-webui does: the text encoders' weight comes first, and is also
    the UNet's unless the tag gives another. Raise ValueError."""
    name, *parts = (part.strip() for part in content.split(":"))
    unnamed = [part for part in parts if "=" not in part]
    named = dict(part.split("=") for part in parts if "=" in part)
    if not name or len(unnamed) > len(WEIGHTS) or not named.keys() <= set(WEIGHTS):
        raise ValueError(content)
    weights = dict(zip(WEIGHTS, unnamed, strict=False)) | named
    in_text = float(weights.get("te", 1.0))
    in_unet = float(weights.get("unet", in_text))
    return Lora(name, in_unet, None if in_text == in_unet else in_text)


def _shortest(weight: float) -> str:
    """Return the shortest text that reads as the same number."""
    text = f"{weight:g}"
    return text if float(text) == weight else repr(float(weight))
