"""Which layers of the UNet are quantised, to what, and why: data, stated only here.

The reference submission's recipe (MLPerf Inference v4.0, Stable Diffusion XL, open division), but
for one convolution that a compiler fails on. It knows layers by their names in diffusers'
UNet2DConditionModel, and no library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Number = Literal["int8", "fp8"]
Statistic = Literal["max", "min-mean"]


@dataclass(frozen=True)
class Rule:
    """The layers whose whole name matches, and how they are quantised."""

    pattern: str
    is_quantised: bool
    why: str
    statistic: Statistic = "max"
    """of an input's absolute maxima: the largest, or of the means over the calls of each step the
    smallest"""
    smoothing: float | None = None
    """SmoothQuant's alpha: how much of the input's range moves into the weight"""
    headroom: float = 1.0
    """how much further a smoothed channel may reach than it was calibrated, see `channel_limits`"""


@dataclass(frozen=True)
class Recipe:
    number: Number
    rules: tuple[Rule, ...]
    """The first that matches decides; what none matches is kept."""
    further: tuple[Rule, ...] = ()
    """Layers beyond these that PyTorch's backend takes in 8 bits; graphs keep them."""
    steps: int = 20
    calibrated_steps: int = 8
    """Maxima are collected over the first so many of `steps`: later ones have outliers that would
    coarsen the scale for all."""
    prompts: int = 32
    batch: int = 2
    """prompts that are calibrated together"""

    def rule_for(self, layer: str) -> Rule:
        """In graphs."""
        return next((rule for rule in self.rules if re.fullmatch(rule.pattern, layer)), OTHER)

    def further_rule_for(self, layer: str) -> Rule | None:
        return next((rule for rule in self.further if re.fullmatch(rule.pattern, layer)), None)

    def own_rule_for(self, layer: str) -> Rule:
        """In PyTorch's backend."""
        return self.further_rule_for(layer) or self.rule_for(layer)


OTHER = Rule(".*", False, "not in the recipe: small, or too sensitive to gain from 8 bits")

UNCOMPILED = r"down_blocks\.0\.resnets\.1\.conv2"
"""With it and the ResBlock before it in 8 bits an assertion fails within that compiler; one of both
in 16 bits avoids it (docs/log.md, 2026-11-24)."""
EDGES = (
    Rule(r"conv_in|conv_out|conv_norm_out", False, "latents and noise: read and written raw"),
    Rule(r".*\.conv_shortcut", False, "carries the signal around the block unfiltered"),
    Rule(r"(time|add)_embedding\..*|.*\.time_emb_proj", False, "one vector a row: nothing to gain"),
    Rule(r".*\.attn2\.to_[kv]", False, "of the prompt: computed once a picture, nothing to gain"),
    Rule(r".*\.attn\d\.to_out\.0", False, "sums what attention found: the reference keeps it"),
    Rule(UNCOMPILED, False, "TensorRT-RTX 1.7.1 does not compile it at full size"),
)
RESBLOCK_CONVS = r".*\.resnets\.\d+\.conv[12]"
PROJECTIONS = r".*\.(attn1\.to_[qkv]|attn2\.to_q)"
FEED_FORWARD = r".*\.ff\.net\.(0\.proj|2)"
SECOND_PRODUCT = r".*\.ff\.net\.2"

# The reference keeps them; docs/log.md (2026-11-22) has what each costs the embedded model.
FURTHER = (
    Rule(r".*\.attn\d\.to_out\.0", True, "sums what attention found"),
    Rule(r".*\.proj_(in|out)", True, "into a transformer and out of it"),
    Rule(r".*\.upsamplers\.0\.conv", True, "as much arithmetic as several ResBlocks"),
    Rule(UNCOMPILED, True, "like the other convolutions of ResBlocks"),
)

# Headroom of what a norm made, whose channels are within a few times of each other, and of what
# GEGLU made: products, mostly near zero, any channel of which may become as large as the largest.
# docs/log.md (2026-11-24) has the errors from 2 to 16.
NORMED, PRODUCT = 4.0, 8.0

# "min-mean" is the reference's choice for SDXL, whose convolutions see rare outliers. The embedded
# model has none: there plain maxima measured 36.1 dB against 30.1, and both keep its CLIP score.
INT8 = Recipe(
    "int8",
    (
        *EDGES,
        Rule(RESBLOCK_CONVS, True, "most of the arithmetic", statistic="min-mean"),
        Rule(
            PROJECTIONS,
            True,
            "query, key, value of what a step computes",
            smoothing=0.8,
            headroom=NORMED,
        ),
        Rule(
            SECOND_PRODUCT,
            True,
            "feed-forward, behind its product of two",
            smoothing=0.8,
            headroom=PRODUCT,
        ),
        Rule(FEED_FORWARD, True, "feed-forward", smoothing=0.8, headroom=NORMED),
    ),
    FURTHER,
)
FP8 = Recipe(
    "fp8",
    (
        *EDGES,
        Rule(
            r"up_blocks\.2\.resnets\.2\.conv[12]",
            False,
            "the last ResBlock: its outliers cost E4M3 most",
        ),
        Rule(RESBLOCK_CONVS, True, "most of the arithmetic"),
        Rule(PROJECTIONS, True, "query, key, value of what a step computes"),
        Rule(FEED_FORWARD, True, "feed-forward"),
    ),
    FURTHER,
)
RECIPES: dict[str, Recipe] = {recipe.number: recipe for recipe in (INT8, FP8)}


def matching(recipe: Recipe, layers: Iterable[str]) -> dict[str, Rule]:
    """The rule of each layer."""
    return {layer: recipe.rule_for(layer) for layer in layers}
