"""API keys: only hashes on disk, one line each, and a rate per key."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdxl import cli
from sdxl.params import InvalidParams
from serve.front import keys
from serve.front.keys import Key, Keyring, RateLimiter, sha256
from tests.fakes import FakeClock


def test_a_made_key_is_found_and_is_not_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.txt"
    secrets = []
    for name in ("ann", "bob"):
        assert keys.main([name, "--file", str(path), "--rate", "30"]) == 0
        secrets.append(capsys.readouterr().out.strip())
    ring = Keyring.read(path)
    assert [ring.find(secret) for secret in secrets] == list(ring.keys)
    assert [(key.name, key.images_a_minute) for key in ring.keys] == [("ann", 30), ("bob", 30)]
    assert not any(secret in path.read_text() for secret in secrets)
    assert path.stat().st_mode & 0o077 == 0, "others can read it"


@pytest.mark.parametrize("secret", ["", "wrong", sha256("right"), "right ", "\udcff"])
def test_anything_else_is_not_found(secret: str) -> None:
    assert Keyring([Key("ann", sha256("right"))]).find(secret) is None


@pytest.mark.parametrize("text", ["", "# none\n", "secret-in-the-clear ann\n", "0" * 64 + "\n"])
def test_a_file_that_is_not_keys_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(text)
    with pytest.raises(InvalidParams) as caught:
        Keyring.read(path)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match="nowhere"):
        Keyring.read(tmp_path / "nowhere")


def test_a_rate_is_a_minute_s_worth_refilled_evenly() -> None:
    clock = FakeClock()
    limiter, key = RateLimiter(clock), Key("ann", "d", 6)
    assert [limiter.take(key, 3) for _ in range(2)] == [0, 0]
    assert limiter.take(key, 1) == pytest.approx(10)
    clock.now = 10
    assert limiter.take(key, 1) == 0 and limiter.take(key, 1) == pytest.approx(10)
    assert limiter.take(Key("bob", "e", 6), 6) == 0, "keys do not share"
    assert limiter.take(Key("eve", "f"), 1000) == 0, "no rate, no limit"


def test_two_fronts_grant_what_one_would() -> None:
    clock = FakeClock()
    fronts, key = [RateLimiter(clock, share=0.5) for _ in range(2)], Key("ann", "d", 60)
    granted = 0
    for second in range(600):
        clock.now = second
        granted += sum(front.take(key, 1) == 0 for front in fronts for _ in range(3))
    assert granted == pytest.approx(60 * 11, abs=2), "ten minutes, and a full bucket before them"


def test_more_than_a_minute_s_worth_waits_for_a_full_bucket() -> None:
    clock = FakeClock()
    limiter, key = RateLimiter(clock), Key("ann", "d", 4)
    assert limiter.take(key, 10) == 0
    clock.now = 60
    assert limiter.take(key, 1) > 0
    clock.now = 200
    assert limiter.take(key, 1) == 0


def test_the_command_is_in_the_front_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["key", "a b", "--file", str(tmp_path / "k")]) == 2
    assert cli.main(["key", "ann", "--file", str(tmp_path / "no" / "k")]) == 1
    assert "out:" in capsys.readouterr().err
