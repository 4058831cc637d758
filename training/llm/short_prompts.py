"""Short prompts: the facts that a prompt may state about a scene, the words for them, and whether
another scene keeps them. The other half of the training data is `sdxl.mini.scenes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sdxl.mini.scenes import COLOURS, PLACES, SIZES, Scene, Thing, pick, sample_scene

SAID_SIZES = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "medium-sized"),
    "large": ("large", "big", "huge"),
}
SAID_PLACES = {
    "on the left": ("on the left", "left", "on the left side", "to the left"),
    "on the right": ("on the right", "right", "on the right side", "to the right"),
    "at the top": ("at the top", "top", "on top", "up"),
    "at the bottom": ("at the bottom", "bottom", "on the bottom", "down"),
    "in the center": ("in the center", "in the middle", "center", "centered", "in the centre"),
}
SAID_RELATIONS = {
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath"),
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
}
SAID_COUNTS = {2: ("two", "2", "a pair of"), 3: ("three", "3")}
OPENINGS = (
    "draw",
    "please draw",
    "paint",
    "make",
    "show me",
    "i want",
    "a picture of",
    "an image of",
    "can you draw",
)
ENDINGS = (".", "!", " please", "?")
ANYTHING = ("", "anything", "a scene", "surprise me", "something", "a picture", "hello", "hi", "?")


@dataclass(frozen=True)
class Stated:
    """A prompt's facts about one thing; None is open."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None

    def fits(self, thing: Thing) -> bool:
        pairs = ((self.shape, thing.shape), (self.colour, thing.colour), (self.size, thing.size))
        return all(stated is None or stated == value for stated, value in pairs)


@dataclass(frozen=True)
class WantedScene:
    """A short prompt's facts; everything else is open."""

    things: tuple[Stated, ...] = ()
    counts: tuple[int, ...] = (1, 2, 3)
    background: str | None = None
    place: str | None = None
    relation: str | None = None

    def is_kept_by(self, scene: Scene) -> bool:
        if self.things and len(self.things) != len(scene.things):
            return False
        if not all(stated.fits(t) for stated, t in zip(self.things, scene.things, strict=False)):
            return False
        pairs = (
            (self.background, scene.background),
            (self.place, scene.place),
            (self.relation, scene.relation),
        )
        has_rest = all(stated is None or stated == value for stated, value in pairs)
        return has_rest and scene.count in self.counts


def full_scene(rng: np.random.Generator, held_out: bool = False) -> Scene:
    while True:
        scene = sample_scene(rng, held_out)
        if scene.is_full:
            return scene


def wanted_of(scene: Scene, rng: np.random.Generator) -> WantedScene:
    """Choose some of the scene's facts. Their number differs from prompt to prompt."""
    share_stated = rng.random()

    def keep(value: str | None, factor: float = 1.0) -> str | None:
        return value if rng.random() < share_stated * factor else None

    if rng.random() < 0.06:
        return WantedScene(background=keep(scene.background))
    is_named = scene.kind != "single" or rng.random() < 0.93
    things = tuple(
        Stated(
            thing.shape if is_named else None,
            thing.colour if not is_named else keep(thing.colour),
            keep(thing.size, 0.15 if thing.size == "medium" else 1.0),
        )
        for thing in scene.things
    )
    is_plural = scene.kind == "group" and rng.random() < 0.15
    return WantedScene(
        things,
        (2, 3) if is_plural else (scene.count,),
        keep(scene.background),
        keep(scene.place),
        keep(scene.relation, 1.6),
    )


def _noun(stated: Stated, wanted: WantedScene, rng: np.random.Generator) -> str:
    count = wanted.counts[0]
    shape = stated.shape or pick(rng, ("thing", "shape", "one"))
    if count > 1:
        shape += "es" if shape == "cross" else "s"
    size = pick(rng, SAID_SIZES[stated.size]) if stated.size else None
    words = " ".join(word for word in (size, stated.colour, shape) if word)
    if len(wanted.counts) > 1:
        return words
    if count > 1:
        return f"{pick(rng, SAID_COUNTS[count])} {words}"
    if rng.random() < 0.4:
        return words
    article = "an" if words[0] in "aeiou" else "a"
    return f"{pick(rng, (article, article, article, 'one', 'the'))} {words}"


def _background(colour: str, rng: np.random.Generator) -> str:
    article = "an" if colour[0] in "aeiou" else "a"
    options = (
        f"on {article} {colour} background",
        f"on {article} {colour} background",
        f"on {colour}",
        f"with {article} {colour} background",
        f"{colour} background",
        f"against {colour}",
    )
    return pick(rng, options)


def _core(wanted: WantedScene, rng: np.random.Generator) -> str:
    nouns = [_noun(stated, wanted, rng) for stated in wanted.things]
    if len(nouns) == 2:
        link = pick(rng, SAID_RELATIONS[wanted.relation]) if wanted.relation else "and"
        return f"{nouns[0]} {link} {nouns[1]}"
    place = pick(rng, SAID_PLACES[wanted.place]) if wanted.place else None
    return " ".join(filter(None, (*nouns, place)))


def _strange_word(rng: np.random.Generator) -> str:
    return "".join(chr(97 + int(c)) for c in rng.integers(0, 26, int(rng.integers(2, 7))))


def _with_noise(text: str, rng: np.random.Generator) -> str:
    """Insert words that the grammar does not know."""
    words = text.split()
    for _ in range(int(rng.integers(1, 3))):
        words.insert(int(rng.integers(len(words) + 1)), _strange_word(rng))
    return " ".join(words)


def phrase(wanted: WantedScene, rng: np.random.Generator) -> str:
    """Return a prompt that states the wanted facts, in one of many wordings."""
    text = _core(wanted, rng)
    if wanted.background:
        background = _background(wanted.background, rng)
        is_first = background.endswith("background") and rng.random() < 0.12
        separator = pick(rng, (" ", " ", ", "))
        parts = (background, text) if is_first else (text, background)
        text = separator.join(filter(None, parts))
    if not text:
        text = pick(rng, ANYTHING)
    elif rng.random() < 0.25:
        text = f"{pick(rng, OPENINGS)} {text}"
    if rng.random() < 0.1:
        text = _with_noise(text, rng)
    return text + (pick(rng, ENDINGS) if rng.random() < 0.15 else "")


def change(scene: Scene, rng: np.random.Generator) -> tuple[str, Scene] | None:
    """Return a request to change one fact of a scene, and the changed scene. None for some scenes,
    such as pairs."""
    if scene.kind == "pair":
        return None
    (thing,) = scene.things
    match int(rng.integers(4)):
        case 0:
            colour = pick(rng, [c for c in COLOURS if c not in (thing.colour, scene.background)])
            request = pick(rng, (f"make it {colour}", f"now in {colour}", f"{colour} instead"))
            return request, replace(scene, things=(replace(thing, colour=colour),))
        case 1:
            colour = pick(rng, [c for c in COLOURS if c not in (thing.colour, scene.background)])
            request = pick(rng, ("change the background to {}", "make the background {}"))
            return request.format(colour), replace(scene, background=colour)
        case 2:
            size = pick(rng, [s for s in SIZES if s != thing.size])
            request = f"make it {pick(rng, SAID_SIZES[size])}"
            return request, replace(scene, things=(replace(thing, size=size),))
        case _:
            if scene.kind == "group":
                return None
            place = pick(rng, [p for p in PLACES if p != scene.place])
            request = f"{pick(rng, ('move it', 'put it'))} {pick(rng, SAID_PLACES[place])}"
            return request, replace(scene, place=place)
