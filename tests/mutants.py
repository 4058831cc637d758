"""Change files at random, as an attacker or a failing disk would, and check that readers refuse
them.

The same seed gives the same mutants, and a failure names the seed.
"""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from sdxl import cli

WRONG: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 65_536, 1_000_000, 2**31, 2**63, 10**30, -(10**30)),
    *(0.5, 1e308, float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "a\0b", "\ud800"),
    *("x" * 5000, "~nobody/x", [], {}, [1], [[]], ["x"], [None], {"x": 1}, list(range(1000))),
)
"""Wrong values: other types, huge numbers, paths outside the folder."""
DEEP = "[" * 200_000 + "]" * 200_000
DEEP_MARK = "@deep@"
ALLOWED_S, ALLOWED_BYTES = 60, 2**30
"""Limits of processor time for one mutant, and of memory for all."""


class TookTooLong(BaseException):
    """Not an Exception, so that tested code does not catch it."""


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    """Make a few changes that break parsers."""
    content = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        place = chance.randrange(len(content) + 1)
        match chance.randrange(6):
            case 0 if place < len(content):
                content[place] ^= 1 << chance.randrange(8)
            case 1 if place < len(content):
                content[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                content[place : place + chance.randrange(64)] = b""
            case 3:
                content[place:place] = chance.randbytes(chance.randrange(1, 64))
            case 4:
                content[place : place + 4] = chance.choice((b"\0\0\0\0", b"\xff\xff\xff\x7f"))
            case _:
                piece = content[place : place + chance.randrange(256)]
                target = chance.randrange(len(content) + 1)
                content[target:target] = piece
    is_cut = bool(content) and chance.random() < 0.1
    return bytes(content[: chance.randrange(len(content))] if is_cut else content)


def change_json(text: str, chance: random.Random) -> bytes:
    """Replace one or two fields; sometimes make invalid JSON."""
    if chance.random() < 0.2:
        return change_bytes(text.encode(), chance)
    value = json.loads(text)
    for _ in range(chance.choice((1, 1, 2))):
        value = _changed(value, chance)
    changed = json.dumps(value)
    return changed.replace(json.dumps(DEEP_MARK), DEEP).encode(errors="surrogatepass")


def _changed(value: Any, chance: random.Random) -> Any:
    places = [place for place in _places(value) if place]
    if not places or chance.random() < 0.02:
        return deepcopy(chance.choice((*WRONG, DEEP_MARK)))
    *way, last = chance.choice(places)
    inner = value
    for key in way:
        inner = inner[key]
    match chance.randrange(10):
        case 0:
            del inner[last]
        case 1 if isinstance(inner, dict):
            inner[chance.choice(("new", "", "quantization_config"))] = deepcopy(
                chance.choice(WRONG)
            )
        case 2:
            inner[last] = DEEP_MARK
        case _:
            inner[last] = deepcopy(chance.choice(WRONG))
    return value


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield from _places(inner, (*way, key))


def check_each(count: int, read: Callable[[random.Random], object]) -> None:
    """Call `read`, which makes a mutant and reads it. `read` may succeed or raise one of this
    project's errors, described in one line. Other errors, long times and much memory fail."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        with bounded(f"mutant {seed}"):
            try:
                read(random.Random(seed))
            except Exception as error:
                line = cli.describe(error)
                is_ours = "\n" not in line and not line.startswith("unexpected ")
                assert is_ours, f"mutant {seed}: {line[:500]}"
                assert len(line) < 20_000, f"mutant {seed}: {len(line)} characters: {line[:300]}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < ALLOWED_BYTES, f"took {grown / 2**20:.0f} MiB, allowed {ALLOWED_BYTES >> 20}"


@contextmanager
def bounded(what: str) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TookTooLong(f"{what} took more than {ALLOWED_S} s")

    # Not SIGALRM, which pytest-timeout uses.
    previous = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, ALLOWED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
