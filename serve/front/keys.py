"""API keys: a file with hashes of keys, and the rate limits of each key.

A line is `<sha256 of the key> <name> [<images a minute>] [work=<standard images a minute>]
[weight=<weight of its share>] [operator]`. It knows no HTTP.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sdxl.arguments import Parser, add_option, number, whole
from sdxl.files import OutputError, read_entries
from sdxl.params import InvalidParams

LINE = re.compile(
    r"(?P<digest>[0-9a-f]{64})\s+(?P<name>[\w.-]{1,64})(?:\s+(?P<rate>[1-9]\d{0,8}))?"
    r"(?:\s+work=(?P<work>\d{1,9}(?:\.\d{1,3})?))?(?:\s+weight=(?P<weight>\d{1,3}(?:\.\d{1,3})?))?"
    r"(?P<operator>\s+operator)?"
)
NEEDED = (
    "must hold `<sha256> <name> [<images a minute>] [work=<number>] [weight=<number>] [operator]`"
)
NAME = re.compile(r"[\w.-]{1,64}")
PREFIX = "sk-sdxl-"
MAX_RATE = 10**9 - 1
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100
BOUNDS = {"rate": (1, MAX_RATE), "work": (0.001, MAX_RATE), "weight": (MIN_WEIGHT, MAX_WEIGHT)}
"""Bounds of the flags of `sdxl key`."""


@dataclass(frozen=True)
class ApiKey:
    name: str
    digest: str
    images_a_minute: int | None = None
    work_a_minute: float | None = None
    """in standard images (sdxl/work.py)"""
    weight: float = 1.0
    """weight of its share of a replica while other clients wait"""
    is_operator: bool = False
    """whether the key may load and unload models"""

    @property
    def limits(self) -> Mapping[str, float]:
        """Limits a minute, by unit."""
        limits = {"images": self.images_a_minute, "standard images": self.work_a_minute}
        return {unit: most for unit, most in limits.items() if most is not None}


class Keyring:
    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)

    @classmethod
    def read(cls, path: Path) -> Keyring:
        keys = []
        # Errors name the place and not the line, which may contain a key in clear text.
        for place, text in read_entries("keys", path, "keys"):
            match = LINE.fullmatch(text)
            if match is None:
                raise InvalidParams("keys", place, NEEDED)
            rate, work, weight = (match[name] for name in ("rate", "work", "weight"))
            if not float(work or 1) or not MIN_WEIGHT <= float(weight or 1) <= MAX_WEIGHT:
                needed = f"must have work above 0 and a weight from {MIN_WEIGHT} to {MAX_WEIGHT}"
                raise InvalidParams("keys", place, needed)
            keys.append(
                ApiKey(
                    match["name"],
                    match["digest"],
                    int(rate) if rate else None,
                    float(work) if work else None,
                    float(weight or 1),
                    match["operator"] is not None,
                )
            )
        if not keys:
            raise InvalidParams(
                "keys", str(path), "must hold at least one key; `sdxl key` makes one"
            )
        return cls(keys)

    def find(self, secret: str) -> ApiKey | None:
        """Return the key of this secret. All keys are compared, so that the time reveals
        nothing."""
        digest = sha256(secret)
        match = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match


class RateLimiter:
    """Has a token bucket for each limit of a key, which is refilled evenly and holds the tokens of
    a minute. This process grants `share` of a key's rate, other front ends the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, share: float = 1.0) -> None:
        self._clock, self._share = clock, share
        self._tokens: dict[tuple[str, str], tuple[float, float]] = {}

    def take(
        self, key: ApiKey, images: int, work: float = 0.0, *, is_charged: bool = True
    ) -> tuple[str, float]:
        """Return 0 s if the request is granted; else the limit that is reached, and the seconds to
        wait. A request for more than a full bucket is granted when the bucket is full, which then
        goes below zero. `is_charged=False` only asks."""
        now, wanted = self._clock(), {"images": float(images), "standard images": work}
        left: dict[str, float] = {}
        for unit, rate in key.limits.items():
            most = rate * self._share
            tokens, at = self._tokens.get((key.digest, unit), (most, now))
            left[unit] = min(most, tokens + (now - at) * most / 60)
            needed = min(wanted[unit], most)
            if left[unit] < needed:
                return f"{rate:g} {unit} a minute", (needed - left[unit]) * 60 / most
        for unit, tokens in left.items() if is_charged else ():
            self._tokens[key.digest, unit] = tokens - wanted[unit], now
        return "", 0.0


def sha256(secret: str) -> str:
    # A fast hash is enough for 256 random bits.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def main(argv: Sequence[str]) -> int:
    """`sdxl key`"""
    parser = Parser(prog="sdxl key", description="Make an API key. It is shown once.")
    parser.add_argument("name", help="name of the key's owner; it appears in the log")
    add = partial(add_option, parser)
    add("--file", "keys.txt", "file to which the key's hash is appended")
    add("--rate", None, "images a minute; unlimited by default", "N", type=whole)
    text = "standard images a minute; unlimited by default. One is an image of the model's default "
    text += "size, steps and guidance; twice the pixels or twice the steps count as two"
    add("--work", None, text, "N", type=number)
    add("--weight", 1.0, "weight of the key's share while others wait: 2 is twice as much", "W")
    add("--operator", False, "let the key load and unload models")
    options = parser.parse_args(argv)
    if not NAME.fullmatch(options.name):
        raise InvalidParams(
            "name", options.name, "must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    for flag, (low, high) in BOUNDS.items():
        value = getattr(options, flag)
        if value is not None and not low <= value <= high:
            raise InvalidParams(flag, value, f"must be a number from {low} to {high}")
    secret = PREFIX + secrets.token_urlsafe(32)
    append(Path(options.file), line_of(options.name, sha256(secret), options))
    print(secret)
    return 0


def line_of(name: str, digest: str, options: argparse.Namespace) -> str:
    parts = [digest, name]
    if options.rate is not None:
        parts.append(str(options.rate))
    if options.work is not None:
        parts.append(f"work={plain(options.work)}")
    if options.weight != 1:
        parts.append(f"weight={plain(options.weight)}")
    if options.operator:
        parts.append("operator")
    return " ".join(parts)


def plain(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def append(path: Path, line: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # An editor may have saved the last line without a line feed.
                line = "\n" + line
            file.write(line + "\n")
    except OSError as error:
        raise OutputError(path, error) from error
