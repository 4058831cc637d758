"""Leases pieces of shards to workers, and retries pieces that fail.

A piece that failed twice without progress is a suspect and leased alone. After the third failure it
is split, until a bad row is alone and becomes a dead letter. It knows no files and no clock.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from serve.batch.rows import BatchRow, ShardPiece

TRIES = 3
PARTS = 8
"""Number of parts into which a failed piece is split."""


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
        """the worker that gets the next suspect"""
        self._open: Counter[int] = Counter()
        """each shard's unfinished pieces"""
        self._is_read = False

    @property
    def is_done(self) -> bool:
        waiting = self._returned or self._suspects or self.held
        return self._is_read and not waiting

    def keys_of(self, holder: str) -> list[int]:
        return [key for key, lease in self.held.items() if lease.holder == holder]

    def lease_to(self, holder: str) -> tuple[int, ShardPiece] | None:
        """Lease one more piece to this worker, or return None."""
        piece = self._choose(holder)
        if piece is None:
            return None
        key = next(self._keys)
        self.held[key] = Lease(piece, holder)
        return key, piece

    def end(self, key: int, failed: Sequence[BatchRow], error: str) -> int | None:
        """End a lease and queue its failed rows again. Return the shard if it is complete."""
        piece = self.held.pop(key).piece
        self._retry(piece, failed, error)
        self._open[piece.shard] -= 1
        if self._open[piece.shard]:
            return None
        del self._open[piece.shard]
        return piece.shard

    def pieces_of(self, holder: str) -> list[tuple[int, ShardPiece]]:
        """Return the pieces of a dead worker. The caller passes each one's open rows to `end`."""
        if self._reserved == holder:
            self._reserved = None
        return [(key, self.held[key].piece) for key in self.keys_of(holder)]

    def _choose(self, holder: str) -> ShardPiece | None:
        mine = [self.held[key].piece for key in self.keys_of(holder)]
        if any(piece.is_suspect for piece in mine):
            return None
        if self._suspects and self._reserved in (None, holder):
            # This worker gets the next suspect once it has finished its pieces.
            self._reserved = holder
            if mine:
                return None
            self._reserved = None
            return self._suspects.popleft()
        if self._returned:
            return self._returned.popleft()
        piece = next(self._source, None)
        if piece is None:
            self._is_read = True
        else:
            self._open[piece.shard] += 1
        return piece

    def _retry(self, piece: ShardPiece, failed: Sequence[BatchRow], error: str) -> None:
        if not failed:
            return
        has_gained = len(failed) < len(piece.rows)
        tries = 1 if has_gained else piece.tries + 1
        if tries < TRIES:
            self._return(ShardPiece(piece.shard, tuple(failed), tries))
        elif len(failed) == 1:
            # The next worker records the error and does not try again.
            self._return(ShardPiece(piece.shard, (replace(failed[0], error=error),)))
        else:
            for part in split(failed):
                self._return(ShardPiece(piece.shard, part, TRIES - 1))

    def _return(self, piece: ShardPiece) -> None:
        self._open[piece.shard] += 1
        (self._suspects if piece.is_suspect else self._returned).append(piece)


def split(rows: Sequence[BatchRow]) -> list[tuple[BatchRow, ...]]:
    size = -(-len(rows) // PARTS)
    return [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
