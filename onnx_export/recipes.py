"""Recipes: which layers of the UNet are quantised, to which numbers, and why.

They are the recipe of MLPerf's reference submission (Inference v4.0, Stable Diffusion XL, open
division), except for one convolution that a compiler fails on. Layers have their names in
diffusers' UNet2DConditionModel.
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
    """How the layers are quantised whose whole name matches."""

    pattern: str
    is_quantised: bool
    why: str
    statistic: Statistic = "max"
    """statistic of an input's absolute maxima: the largest, or the smallest of the steps' means"""
    smoothing: float | None = None
    """SmoothQuant's alpha: the share of the input's range that moves into the weight"""
    headroom: float = 1.0
    """factor by which a smoothed channel may exceed its calibrated maximum, see `channel_limits`"""


@dataclass(frozen=True)
class Recipe:
    number: Number
    rules: tuple[Rule, ...]
    """The first rule that matches a layer applies; a layer without a rule is not quantised."""
    further: tuple[Rule, ...] = ()
    """rules for layers that only PyTorch's backend quantises"""
    steps: int = 20
    calibrated_steps: int = 8
    """The number of first steps in which maxima are collected. Later steps have outliers that would
    coarsen the scale for all."""
    prompts: int = 32
    batch: int = 2
    """prompts that are calibrated together"""

    def rule_for(self, layer: str) -> Rule:
        """Return a layer's rule in graphs."""
        return next((rule for rule in self.rules if re.fullmatch(rule.pattern, layer)), OTHER)

    def further_rule_for(self, layer: str) -> Rule | None:
        return next((rule for rule in self.further if re.fullmatch(rule.pattern, layer)), None)

    def own_rule_for(self, layer: str) -> Rule:
        """Return a layer's rule in PyTorch's backend."""
        return self.further_rule_for(layer) or self.rule_for(layer)


OTHER = Rule(".*", False, "not in the recipe: small, or too sensitive to gain from 8 bits")

UNCOMPILED = r"down_blocks\.0\.resnets\.1\.conv2"
"""An assertion in TensorRT-RTX's compiler fails if this layer and the ResBlock before it are in 8
bits; with one of both in 16 bits it does not (docs/log.md, 2026-11-24)."""
EDGES = (
    Rule(r"conv_in|conv_out|conv_norm_out", False, "latents and noise: read and written raw"),
    Rule(r".*\.conv_shortcut", False, "carries the signal around the block unfiltered"),
    Rule(r"(time|add)_embedding\..*|.*\.time_emb_proj", False, "one vector a row: nothing to gain"),
    Rule(r".*\.attn2\.to_[kv]", False, "computed once a picture: nothing to gain"),
    Rule(r".*\.attn\d\.to_out\.0", False, "sums the attention's values: the reference keeps it"),
    Rule(UNCOMPILED, False, "TensorRT-RTX 1.7.1 does not compile it at full size"),
)
RESBLOCK_CONVS = r".*\.resnets\.\d+\.conv[12]"
PROJECTIONS = r".*\.(attn1\.to_[qkv]|attn2\.to_q)"
FEED_FORWARD = r".*\.ff\.net\.(0\.proj|2)"
SECOND_PRODUCT = r".*\.ff\.net\.2"

# The reference does not quantise these; docs/log.md (2026-11-22) has their costs in quality.
FURTHER = (
    Rule(r".*\.attn\d\.to_out\.0", True, "sums the attention's values"),
    Rule(r".*\.proj_(in|out)", True, "into a transformer and out of it"),
    Rule(r".*\.upsamplers\.0\.conv", True, "as much arithmetic as several ResBlocks"),
    Rule(UNCOMPILED, True, "like the other convolutions of ResBlocks"),
)

# Headroom of a norm's outputs, whose channels differ by small factors, and of GEGLU's products,
# which are mostly near zero while any channel may become as large as the largest.
# docs/log.md (2026-11-24) has the errors for headroom from 2 to 16.
NORMED, PRODUCT = 4.0, 8.0

# "min-mean" is the reference's choice for SDXL, whose convolutions have rare outliers. The embedded
# model has none: plain maxima measured 36.1 dB, "min-mean" 30.1, with the same CLIP score.
INT8 = Recipe(
    "int8",
    (
        *EDGES,
        Rule(RESBLOCK_CONVS, True, "most of the arithmetic", statistic="min-mean"),
        Rule(
            PROJECTIONS, True, "query, key and value in every step", smoothing=0.8, headroom=NORMED
        ),
        Rule(
            SECOND_PRODUCT, True, "feed-forward, after its product", smoothing=0.8, headroom=PRODUCT
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
        Rule(PROJECTIONS, True, "query, key and value in every step"),
        Rule(FEED_FORWARD, True, "feed-forward"),
    ),
    FURTHER,
)
RECIPES: dict[str, Recipe] = {recipe.number: recipe for recipe in (INT8, FP8)}


def matching(recipe: Recipe, layers: Iterable[str]) -> dict[str, Rule]:
    """Return the rule of each layer."""
    return {layer: recipe.rule_for(layer) for layer in layers}
