"""API keys: a file of hashes, so that whoever reads it cannot use them, and how often each may ask.

A line is `<sha256 of the key> <name> [<images a minute>]`. It knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdxl.arguments import Parser, whole
from sdxl.files import OutputError
from sdxl.params import InvalidParams

LINE = re.compile(
    r"(?P<digest>[0-9a-f]{64})\s+(?P<name>[\w.-]{1,64})(?:\s+(?P<rate>[1-9]\d{0,8}))?"
)
NAME = re.compile(r"[\w.-]{1,64}")
PREFIX = "sk-sdxl-"


@dataclass(frozen=True)
class Key:
    name: str
    digest: str
    images_a_minute: int | None = None


class Keyring:
    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)

    @classmethod
    def read(cls, path: Path) -> Keyring:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            cause = getattr(error, "strerror", None) or error
            raise InvalidParams("keys", str(path), f"needed a file of keys ({cause})") from error
        keys = []
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            match = LINE.fullmatch(text)
            if match is None:
                # Not the line itself: somebody may have put a key there in the clear.
                place = f"{path}, line {number}"
                raise InvalidParams("keys", place, "needed `<sha256> <name> [<images a minute>]`")
            rate = match["rate"]
            keys.append(Key(match["name"], match["digest"], int(rate) if rate else None))
        if not keys:
            raise InvalidParams("keys", str(path), "needed at least one key; `sdxl key` makes one")
        return cls(keys)

    def find(self, secret: str) -> Key | None:
        """Compares with every key, so that the time taken tells nothing."""
        digest = sha256(secret)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


class RateLimiter:
    """A bucket of tokens per key, filled evenly and holding a minute's worth. `share` of a key's
    rate is this one's to grant: others grant the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, share: float = 1.0) -> None:
        self._clock, self._share = clock, share
        self._tokens: dict[str, tuple[float, float]] = {}

    def take(self, key: Key, images: int) -> float:
        """0 if they are granted; else the seconds until they would be. More than a minute's worth
        is granted when the bucket is full, and then paid off."""
        if key.images_a_minute is None:
            return 0.0
        most, now = key.images_a_minute * self._share, self._clock()
        tokens, at = self._tokens.get(key.digest, (most, now))
        tokens = min(most, tokens + (now - at) * most / 60)
        needed = min(float(images), most)
        if tokens < needed:
            self._tokens[key.digest] = tokens, now
            return (needed - tokens) * 60 / most
        self._tokens[key.digest] = tokens - images, now
        return 0.0


def sha256(secret: str) -> str:
    # A fast hash is enough for what was drawn from 256 bits of chance.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def main(argv: Sequence[str]) -> int:
    """`sdxl key`"""
    parser = Parser(prog="sdxl key", description="Make an API key. It is shown once.")
    parser.add_argument("name", help="whose it is; it appears in the log")
    parser.add_argument("--file", default="keys.txt", help="where its hash goes (%(default)s)")
    parser.add_argument("--rate", type=whole, metavar="N", help="images a minute, unless unlimited")
    options = parser.parse_args(argv)
    if not NAME.fullmatch(options.name):
        raise InvalidParams("name", options.name, "needed letters, digits, dots and dashes")
    if options.rate is not None and options.rate < 1:
        raise InvalidParams("rate", options.rate, "needed at least 1")
    secret = PREFIX + secrets.token_urlsafe(32)
    line = " ".join([sha256(secret), options.name, *([str(options.rate)] if options.rate else [])])
    append(Path(options.file), line)
    print(secret)
    return 0


def append(path: Path, line: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise OutputError(path, error) from error
