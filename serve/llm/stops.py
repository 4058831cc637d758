"""Stop strings in a text that comes in pieces: nothing of one is ever let out, wherever the borders
between the pieces lie.
"""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""
        self.is_over = False

    def feed(self, text: str) -> str:
        """What may be let out; the rest may be the beginning of a stop string."""
        self._held += text
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_over = True
            return self._let_out(min(found))
        keep = max((_overlap(self._held, stop) for stop in self.stops), default=0)
        return self._let_out(len(self._held) - keep)

    def rest(self) -> str:
        """What was held back, once no more comes."""
        return "" if self.is_over else self._let_out(len(self._held))

    def _let_out(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out


def _overlap(text: str, stop: str) -> int:
    """How much of the text's end is how the stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
