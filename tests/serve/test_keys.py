"""API keys: only hashes on disk, one line each, and a rate for each key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from starlette.requests import Request

from sdxl import cli
from sdxl.params import GenerationParams, InvalidParams, Sizes
from sdxl.work import standard_images
from serve.front import keys
from serve.front.access import client_of
from serve.front.keys import ApiKey, Keyring, RateLimiter, sha256
from tests.fakes import FakeClock


def test_a_new_key_is_stored_as_a_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, secrets = tmp_path / "keys.txt", []
    for name, *flags in (("ann", "--rate", "30"), ("bob", "--work", "90", "--weight", "2.5")):
        assert keys.main([name, "--file", str(path), *flags]) == 0
        secrets.append(capsys.readouterr().out.strip())
    ring = Keyring.read(path)
    assert [ring.find(secret) for secret in secrets] == list(ring.keys)
    ann, bob = ring.keys
    assert (ann.name, ann.images_a_minute, ann.work_a_minute, ann.weight) == ("ann", 30, None, 1.0)
    assert (bob.name, bob.images_a_minute, bob.work_a_minute, bob.weight) == ("bob", None, 90, 2.5)
    assert not any(secret in path.read_text() for secret in secrets)
    assert path.stat().st_mode & 0o077 == 0, "others can read it"


@pytest.mark.parametrize(
    ("flag", "most", "wrong"),
    [
        ("rate", "999999999", "1000000000"),
        ("work", "999999999", "1000000000"),
        ("weight", "100", "0"),
    ],
)
def test_no_limit_is_written_that_could_not_be_read(
    tmp_path: Path, flag: str, most: str, wrong: str
) -> None:
    path = tmp_path / "keys.txt"
    assert keys.main(["ann", "--file", str(path), f"--{flag}", most]) == 0
    with pytest.raises(InvalidParams, match=f"{flag} must be a number from .* to {most}"):
        keys.main(["bob", "--file", str(path), f"--{flag}", wrong])
    assert [key.name for key in Keyring.read(path).keys] == ["ann"]


def test_a_key_is_added_below_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(f"{sha256('a')} ann")
    assert keys.main(["bob", "--file", str(path)]) == 0
    assert [key.name for key in Keyring.read(path).keys] == ["ann", "bob"]


@pytest.mark.parametrize("secret", ["", "wrong", sha256("right"), "right ", "\udcff"])
def test_a_wrong_key_is_not_found(secret: str) -> None:
    assert Keyring([ApiKey("ann", sha256("right"))]).find(secret) is None


WRONG_ENDS = ("weight=0", "weight=x", "weight=101", "work=0", "2 2")
WRONG = ["", "# none\n", "secret-in-the-clear ann\n", "0" * 64 + "\n"]
WRONG += [f"{'0' * 64} ann {end}\n" for end in WRONG_ENDS]


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_is_not_keys_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.txt"
    with pytest.raises(InvalidParams, match="keys.txt"):
        Keyring.read(path)
    path.write_text(text)
    with pytest.raises(InvalidParams, match="keys must ") as caught:
        Keyring.read(path)
    assert "secret" not in str(caught.value)


def wait_s(limiter: RateLimiter, key: ApiKey, images: int, work: float = 0.0) -> float:
    return limiter.take(key, images, work)[1]


def test_a_rate_is_a_minute_s_worth_refilled_evenly() -> None:
    clock = FakeClock()
    limiter, key = RateLimiter(clock), ApiKey("ann", "d", 6)
    assert [wait_s(limiter, key, 3) for _ in range(2)] == [0, 0]
    assert wait_s(limiter, key, 1) == pytest.approx(10)
    clock.now = 10
    assert wait_s(limiter, key, 1) == 0 and wait_s(limiter, key, 1) == pytest.approx(10)
    assert wait_s(limiter, ApiKey("bob", "e", 6), 6) == 0, "keys do not share"
    assert wait_s(limiter, ApiKey("eve", "f"), 1000) == 0, "no rate, no limit"


def test_two_fronts_together_grant_the_rate_of_one() -> None:
    clock = FakeClock()
    fronts, key = [RateLimiter(clock, share=0.5) for _ in range(2)], ApiKey("ann", "d", 60)
    granted = 0
    for second in range(600):
        clock.now = second
        granted += sum(wait_s(front, key, 1) == 0 for front in fronts for _ in range(3))
    assert granted == pytest.approx(60 * 11, abs=2), "ten minutes, and a full bucket before them"


def test_more_than_a_minute_s_worth_waits_for_a_full_bucket() -> None:
    clock = FakeClock()
    limiter, key = RateLimiter(clock), ApiKey("ann", "d", 4)
    assert limiter.take(key, 10, is_charged=False)[1] == wait_s(limiter, key, 10) == 0
    clock.now = 60
    assert limiter.take(key, 1, is_charged=False)[1] == wait_s(limiter, key, 1) > 0
    clock.now = 200
    assert wait_s(limiter, key, 1) == 0


def test_work_is_limited_beside_images() -> None:
    clock = FakeClock()
    limiter, key = RateLimiter(clock), ApiKey("ann", "d", 60, work_a_minute=6)
    assert wait_s(limiter, key, 1, 4.0) == 0
    limit, later_s = limiter.take(key, 1, 4.0)
    assert limit == "6 standard images a minute" and later_s == pytest.approx(20)
    assert wait_s(limiter, key, 58, 2.0) == 0, "what was refused took no images"
    assert limiter.take(key, 2, 0.0)[0] == "60 images a minute"


def test_work_is_steps_times_pixels_times_rows_and_shallow_steps_count_less() -> None:
    sizes = Sizes(128, 64, 256)
    usual = GenerationParams()
    assert standard_images(usual, sizes) == 1
    assert standard_images(replace(usual, width=256, height=256), sizes) == 4
    assert standard_images(replace(usual, steps=40), sizes) == 2
    assert standard_images(replace(usual, guidance=1.0), sizes) == 0.5
    assert 1.9 < standard_images(replace(usual, cache_interval=1), sizes) < 2


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("", (None, None, 1.0)),
        (" 30", (30, None, 1.0)),
        (" work=2.5", (None, 2.5, 1.0)),
        (" 30 work=90 weight=2", (30, 90.0, 2.0)),
    ],
)
def test_lines_of_keys_are_read(tmp_path: Path, rest: str, expected: tuple[object, ...]) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(f"{'0' * 64} ann{rest}\n")
    (key,) = Keyring.read(path).keys
    assert (key.images_a_minute, key.work_a_minute, key.weight) == expected


def test_a_client_is_its_key_or_its_address_and_chooses_neither() -> None:
    forged = {"x-client-address": "9.9.9.9"}
    assert client_of(asked("10.0.0.1", forged), "") == ("address 10.0.0.1", 1.0)
    assert client_of(asked("127.0.0.1", forged), "x-client-address") == ("address 9.9.9.9", 1.0)
    one, other = (client_of(asked(f"2001:db8::{i}"), "") for i in (1, 2))
    assert one == other == ("address 2001:db8::/64", 1.0)
    named = asked("10.0.0.1")
    named.state.key = ApiKey("ann", "d", weight=3.0)
    assert client_of(named, "x-client-address") == ("key d", 3.0)


def asked(peer: str, headers: dict[str, str] | None = None) -> Request:
    raw = [(name.encode(), text.encode()) for name, text in (headers or {}).items()]
    return Request({"type": "http", "client": (peer, 1), "headers": raw})


def test_sdxl_key_is_the_same_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["key", "a b", "--file", str(tmp_path / "k")]) == 2
    assert cli.main(["key", "ann", "--file", str(tmp_path / "no" / "k")]) == 1
    assert "out must be" in capsys.readouterr().err
