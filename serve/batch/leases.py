"""Which worker has which piece of which shard, until when, and what follows when one fails.

A lease lives by progress, not by mere signs of life. Trouble that nothing was gained in counts
against a piece: from the second time on it is leased by itself; at the third its rows are split,
until the bad one stands alone and is given up. Pure: it knows no files and no clock.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from serve.batch.rows import BatchRow, ShardPiece

TRIES = 3
PARTS = 8
"""Into how many a piece is split that failed three times."""


@dataclass
class Lease:
    piece: ShardPiece
    holder: str


class Leases:
    def __init__(self, source: Iterator[ShardPiece]) -> None:
        self._source = source
        self._returned: deque[ShardPiece] = deque()
        self._suspects: deque[ShardPiece] = deque()
        self._keys = itertools.count()
        self.held: dict[int, Lease] = {}
        self._reserved: str | None = None
        self._open: Counter[int] = Counter()
        """pieces of a shard that are not done"""
        self._is_read = False

    @property
    def is_done(self) -> bool:
        waiting = self._returned or self._suspects or self.held
        return self._is_read and not waiting

    def of(self, holder: str) -> list[int]:
        return [key for key, lease in self.held.items() if lease.holder == holder]

    def next_for(self, holder: str) -> tuple[int, ShardPiece] | None:
        """One more piece for this worker, if it may have one now."""
        piece = self._choose(holder)
        if piece is None:
            return None
        key = next(self._keys)
        self.held[key] = Lease(piece, holder)
        return key, piece

    def ended(self, key: int, failed: Sequence[BatchRow], error: str) -> int | None:
        """A piece came back; with rows that failed, they go on. The shard, if that was its last."""
        piece = self.held.pop(key).piece
        self._again(piece, failed, error)
        return self._closed(piece.shard)

    def lost(self, holder: str) -> list[tuple[int, ShardPiece]]:
        """The pieces of a worker that is gone, for `ended` to be told what is left of each."""
        if self._reserved == holder:
            self._reserved = None
        return [(key, self.held[key].piece) for key in self.of(holder)]

    def _choose(self, holder: str) -> ShardPiece | None:
        mine = [self.held[key].piece for key in self.of(holder)]
        if any(piece.is_suspect for piece in mine):
            return None
        if self._suspects and self._reserved in (None, holder):
            # It takes the next suspect once it has finished what it holds.
            self._reserved = holder
            if mine:
                return None
            self._reserved = None
            return self._suspects.popleft()
        return self._returned.popleft() if self._returned else self._from_source()

    def _from_source(self) -> ShardPiece | None:
        piece = next(self._source, None)
        if piece is None:
            self._is_read = True
        else:
            self._open[piece.shard] += 1
        return piece

    def _again(self, piece: ShardPiece, failed: Sequence[BatchRow], error: str) -> None:
        if not failed:
            return
        has_gained = len(failed) < len(piece.rows)
        tries = 1 if has_gained else piece.tries + 1
        if tries < TRIES:
            self._return(ShardPiece(piece.shard, tuple(failed), tries))
        elif len(failed) == 1:
            # To be written down: whoever gets it sees that there is nothing to try.
            self._return(ShardPiece(piece.shard, (replace(failed[0], error=error),)))
        else:
            for part in split(failed):
                self._return(ShardPiece(piece.shard, part, TRIES - 1))

    def _return(self, piece: ShardPiece) -> None:
        self._open[piece.shard] += 1
        (self._suspects if piece.is_suspect else self._returned).append(piece)

    def _closed(self, shard: int) -> int | None:
        self._open[shard] -= 1
        if self._open[shard]:
            return None
        del self._open[shard]
        return shard


def split(rows: Sequence[BatchRow]) -> list[tuple[BatchRow, ...]]:
    size = -(-len(rows) // PARTS)
    return [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
