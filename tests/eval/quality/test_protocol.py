"""The benchmark's task follows its rules."""

from __future__ import annotations

import pytest
import torch

from eval.quality import protocol
from eval.quality.captions import escape_brackets
from sdxl.noise import NoiseSource
from sdxl.prompt import parse


def test_the_gates_are_shares_of_the_reference_scores() -> None:
    for gate, tolerance in (
        (protocol.CLIP_GATE, protocol.CLIP_TOLERANCE),
        (protocol.FID_GATE, protocol.FID_TOLERANCE),
    ):
        middle = (gate.low + gate.high) / 2
        assert (gate.high - gate.low) / 2 / middle == pytest.approx(tolerance, rel=1e-3)


def test_every_picture_starts_from_the_same_noise() -> None:
    """The reference uses one latent for all samples, from a CPU generator of seed 0."""
    expected = torch.randn(1, 4, 128, 128, generator=torch.Generator("cpu").manual_seed(0))
    assert protocol.REQUEST.seed == 0
    assert torch.equal(NoiseSource(0, (4, 128, 128)).start(), expected[0])


def test_brackets_in_a_caption_set_no_weights() -> None:
    text = r"A sign (red) with [two] words: 10\20"
    fragments = parse(escape_brackets(text))
    assert "".join(f.text for f in fragments) == text
    assert {f.weight for f in fragments} == {1.0}
    assert escape_brackets("A sign (BREAK)") == r"A sign \(break\)"
