"""Leases: after any failures, each row ends once, and only bad rows are given up."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sdxl.params import GenerationParams
from serve.batch.leases import TRIES, Leases
from serve.batch.rows import BatchRow, ShardPiece


def shard(number: int, size: int, start: int = 0) -> ShardPiece:
    params, ordinals = GenerationParams("a"), range(start, start + size)
    return ShardPiece(number, tuple(BatchRow(i, f"line {i}", f"r{i}", params) for i in ordinals))


def shards(count: int, size: int) -> list[ShardPiece]:
    return [shard(i, size, i * size) for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.integers(0, 59), max_size=3),
    st.lists(st.sampled_from(["die", "half", "work", "work"]), max_size=60),
)
def test_each_row_ends_once_and_only_the_bad_are_given_up(
    bad: set[int], moments: list[str]
) -> None:
    """A bad row fails its whole piece. Workers also die, or return half a piece, at random."""
    leases = Leases(iter(shards(4, 15)))
    done: Counter[int] = Counter()
    given_up: Counter[int] = Counter()
    closed: list[int] = []
    fates = iter(moments)
    for turn in range(5000):
        if leases.is_done:
            break
        holder = f"w{turn % 2}"
        lease = leases.lease_to(holder)
        if lease is None and not leases.keys_of(holder):
            continue
        key = leases.keys_of(holder)[0]
        piece = leases.held[key].piece
        verdicts = [row for row in piece.rows if row.error is not None]
        alive = [row for row in piece.rows if row.error is None]
        is_bad = any(row.ordinal in bad for row in alive)
        fate = next(fates, "work")
        left = alive
        if not is_bad and fate == "work":
            left = []
        elif fate == "half":
            left = [r for i, r in enumerate(alive) if i % 2 or r.ordinal in bad]
        given_up.update(row.ordinal for row in verdicts)
        done.update(row.ordinal for row in alive if row not in left)
        shard_closed = leases.end(key, left, "it failed")
        closed += [shard_closed] if shard_closed is not None else []
    assert leases.is_done, f"{len(leases.held)} leases are left"
    assert set(done) | set(given_up) == set(range(60)) and max((done + given_up).values()) == 1
    assert bad <= set(given_up)
    assert sorted(closed) == [0, 1, 2, 3], "each shard is complete once"


def test_a_bad_row_alone_is_given_up_after_three_tries_and_a_split() -> None:
    leases, deaths = Leases(iter([shard(0, 64)])), 0
    given_up: list[int] = []
    while not leases.is_done:
        if (lease := leases.lease_to("w")) is None:
            continue
        key, piece = lease
        given_up += [row.ordinal for row in piece.rows if row.error is not None]
        left = [row for row in piece.rows if row.error is None]
        is_bad = any(row.ordinal == 37 for row in left)
        deaths += is_bad
        leases.end(key, left if is_bad else [], "died")
    assert given_up == [37]
    assert deaths == TRIES + 2, f"{deaths} workers died of one row, allowed {TRIES + 2}"


def test_a_piece_that_makes_progress_is_never_split_or_suspected() -> None:
    leases, size = Leases(iter([shard(0, 10)])), 10
    while not leases.is_done:
        if (lease := leases.lease_to("w")) is None:
            continue
        key, piece = lease
        assert len(piece.rows) == size and not any(row.error for row in piece.rows)
        assert not piece.is_suspect
        size -= 1
        leases.end(key, piece.rows[1:], "killed")
    assert size == 0


def test_a_suspect_is_leased_by_itself() -> None:
    leases = Leases(iter(shards(5, 4)))
    other = leases.lease_to("b")
    assert other is not None and other[1].shard == 0
    for _ in range(2):
        failed = leases.lease_to("a")
        assert failed is not None
        leases.end(failed[0], failed[1].rows, "died")
    assert leases.lease_to("b") is None, "it finishes its pieces first"
    assert leases.lease_to("c") is not None, "other workers continue"
    leases.end(other[0], [], "")
    suspect = leases.lease_to("b")
    assert suspect is not None and suspect[1].is_suspect and suspect[1].shard == 1
    assert leases.lease_to("b") is None, "a suspect is alone"


def test_the_input_is_read_only_as_fast_as_it_is_leased() -> None:
    source = iter(shards(100, 2))
    leases = Leases(source)
    for _ in range(3):
        assert leases.lease_to("a")
    assert next(source).shard == 3
