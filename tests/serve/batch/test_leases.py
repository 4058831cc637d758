"""Leases: whatever fails whenever, each row ends once, and only a bad one is given up."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sdxl.params import GenerationParams
from serve.batch.leases import PARTS, TRIES, Leases, split
from serve.batch.rows import BatchRow, ShardPiece


def shard(number: int, size: int, start: int = 0) -> ShardPiece:
    rows = (BatchRow(start + i, f"line {start + i}", f"r{start + i}") for i in range(size))
    return ShardPiece(
        number, tuple(BatchRow(r.ordinal, r.line, r.id, GenerationParams("a")) for r in rows)
    )


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
    """Bad rows take their whole piece with them; workers die and pieces come back half done at
    random moments besides."""
    leases = Leases(iter(shards(4, 15)))
    done: Counter[int] = Counter()
    given_up: Counter[int] = Counter()
    closed: list[int] = []
    fates = iter(moments)
    for turn in range(5000):
        if leases.is_done:
            break
        holder = f"w{turn % 2}"
        found = leases.next_for(holder)
        if found is None and not leases.of(holder):
            continue
        key = leases.of(holder)[0]
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
        shard_closed = leases.ended(key, left, "it failed")
        closed += [shard_closed] if shard_closed is not None else []
    assert leases.is_done, f"{len(leases.held)} leases are left"
    assert set(done) | set(given_up) == set(range(60)) and max((done + given_up).values()) == 1
    assert bad <= set(given_up)
    assert sorted(closed) == [0, 1, 2, 3], "each shard is told once to be whole"


def test_a_bad_row_is_given_up_after_three_tries_and_a_split_and_no_other_is() -> None:
    leases, deaths = Leases(iter([shard(0, 64)])), 0
    given_up: list[int] = []
    while not leases.is_done:
        found = leases.next_for("w")
        if found is None:
            continue
        key, piece = found
        given_up += [row.ordinal for row in piece.rows if row.error is not None]
        left = [row for row in piece.rows if row.error is None]
        is_bad = any(row.ordinal == 37 for row in left)
        deaths += is_bad
        leases.ended(key, left if is_bad else [], "died")
    assert given_up == [37]
    assert deaths == TRIES + 2, f"{deaths} workers died of one row, allowed {TRIES + 2}"


def test_a_piece_that_gains_ground_is_never_split() -> None:
    leases, size = Leases(iter([shard(0, 10)])), 10
    while not leases.is_done:
        found = leases.next_for("w")
        if found is None:
            continue
        key, piece = found
        assert len(piece.rows) == size and not any(row.error for row in piece.rows)
        size -= 1
        leases.ended(key, piece.rows[1:], "killed")
    assert size == 0


def test_a_suspect_is_leased_by_itself() -> None:
    leases = Leases(iter(shards(5, 4)))
    other = leases.next_for("b")
    assert other is not None and other[1].shard == 0
    for _ in range(2):
        found = leases.next_for("a")
        assert found is not None
        leases.ended(found[0], found[1].rows, "died")
    assert leases.next_for("b") is None, "it drains, to take the suspect"
    assert leases.next_for("c") is not None, "the others go on meanwhile"
    leases.ended(other[0], [], "")
    suspect = leases.next_for("b")
    assert suspect is not None and suspect[1].is_suspect and suspect[1].shard == 1
    assert leases.next_for("b") is None, "nothing beside it"


def test_the_input_is_read_only_as_fast_as_it_is_leased() -> None:
    read = 0

    def source() -> object:
        nonlocal read
        for piece in shards(100, 2):
            read += 1
            yield piece

    leases = Leases(source())  # type: ignore[arg-type]
    for _ in range(3):
        assert leases.next_for("a")
    assert read == 3


@given(st.integers(2, 300))
def test_a_split_loses_nothing(size: int) -> None:
    rows = shard(0, size).rows
    parts = split(rows)
    assert [row for part in parts for row in part] == list(rows) and len(parts) <= PARTS
    assert all(parts)
