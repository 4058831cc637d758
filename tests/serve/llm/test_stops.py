"""Stop strings: the text is the same however it is split into pieces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from serve.llm.speaker import Stops

SHORT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(SHORT, STOPS, st.lists(st.integers(0, 30)))
def test_the_text_is_the_same_in_any_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found, out = Stops(stops), []
    for i, j in itertools.pairwise(borders):
        if not found.is_over:
            out.append(found.feed(text[i:j]))
    out.append(found.rest())
    # If one stop string ends earlier but begins later than another, the pieces decide.
    first = "".join(out)
    assert text.startswith(first) and found.is_over == bool(ends)
    assert not any(stop in first for stop in stops)
    if len(stops) <= 1:
        assert first == text[: min(ends, default=len(text))]


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    stops = Stops(["END"])
    assert [stops.feed(piece) for piece in ("one E", "NT", "wo EN", "D three")] == [
        "one ",
        "ENT",
        "wo ",
        "",
    ]
    assert stops.is_over and stops.rest() == ""
