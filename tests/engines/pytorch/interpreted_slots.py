"""Maps of several sizes in one call: each kernel's result for a row equals that for the map alone,
and no row changes another. Like interpreted_kernels.py, this is a separate program: `python -m
tests.engines.pytorch.interpreted_slots`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.pytorch import triton_product
from engines.pytorch.eight_bit import EightBit, quartered
from engines.pytorch.launches import UNROUNDED, Rounding
from engines.pytorch.slot_convolution import SlotConvolution
from engines.pytorch.slots import bordered, in_slots, sides_of, slot_of, widest
from engines.pytorch.tiles import Tile
from engines.pytorch.triton_attention import attention
from engines.pytorch.triton_group_norm import summed
from engines.pytorch.triton_kernels import affine, norm_act
from tests.engines.pytorch.kernel_checks import NAN, check, print_results, wrong_by

SLOT, CHANNELS = 512, 16
SIDES = ((20, 24), (14, 36), (24, 20))
EXACT = 1e-6


def table() -> Tensor:
    return torch.tensor(SIDES, dtype=torch.int32)


def maps(channels: int = CHANNELS, by: int = 1) -> list[Tensor]:
    layout = torch.channels_last
    sides = [(h // by, w // by) for h, w in SIDES]
    return [torch.randn(1, channels, *each).to(memory_format=layout) for each in sides]


def together(each: Sequence[Tensor], slot: int = SLOT) -> Tensor:
    """The maps in slots, with arbitrary finite numbers as padding."""
    whole = torch.randn(len(each), 1, slot, each[0].shape[1]).permute(0, 3, 1, 2)
    for row, x in zip(whole, each, strict=True):
        row[:, 0, : x[0, 0].numel()] = x[0].flatten(1)
    return whole


def apart(x: Tensor, times: int = 1) -> list[Tensor]:
    """Each row's map. `times`: the map's sides divided by the table's."""
    rows = []
    for row, (h, w) in zip(x, SIDES, strict=True):
        height, width = int(h * times), int(w * times)
        rows.append(row[:, 0, : height * width].unflatten(1, (height, width))[None])
    return rows


def bordered_apart(x: Tensor) -> list[Tensor]:
    rows = []
    for row, (h, w) in zip(x, SIDES, strict=True):
        rows.append(row[:, 0, : h * (w + 1)].unflatten(1, (h, w + 1))[None, ..., :w])
    return rows


def all_wrong(
    found: Sequence[Tensor], expected: Sequence[Tensor], what: object, most: float = EXACT
) -> Iterator[str]:
    for row, (ours, alone) in enumerate(zip(found, expected, strict=True)):
        yield from wrong_by(ours.float(), alone.float(), most, (what, row))


def pads_wrong(x: Tensor, what: object, times: int = 1) -> Iterator[str]:
    for row, (h, w) in zip(x, SIDES, strict=True):
        if bool(row[:, 0, h * w * times**2 :].float().any()):
            yield f"{what}: pads that are not zero"


@check
def norms_in_slots() -> Iterator[str]:
    each, (weight, bias), steps = maps(), torch.randn(2, CHANNELS), torch.rand(CHANNELS) * 9 + 1
    shift = torch.randn(len(each), CHANNELS)
    for number, is_bordered in ((None, True), (torch.int8, False), (torch.float8_e4m3fn, True)):
        flags = torch.zeros(len(each))
        rounding = Rounding(steps, number, flags) if number else UNROUNDED
        run = partial(norm_act, weight=weight, bias=bias, groups=4, eps=1e-5, has_silu=True)
        alone = [
            run(x, shift=own[None], rounding=rounding) for x, own in zip(each, shift, strict=True)
        ]
        with in_slots(SLOT, table()):
            rounding = replace(rounding, is_bordered=is_bordered)
            found = run(together(each), shift=shift, rounding=rounding)
        what = (number, is_bordered)
        yield from all_wrong((bordered_apart if is_bordered else apart)(found), alone, what)
        if is_bordered:
            if found.shape[3] != bordered(SLOT):
                yield f"{what}: {found.shape}"
            for row, (h, w) in zip(found, SIDES, strict=True):
                behind = [*row[:, 0, : h * (w + 1)].unflatten(1, (h, w + 1))[..., w].flatten()]
                if any(behind) or bool(row[:, 0, h * (w + 1) :].float().any()):
                    yield f"{what}: a border that is not zero"
        else:
            yield from pads_wrong(found, what)


@check
def joined_maps_in_slots() -> Iterator[str]:
    each, beside = maps(), maps(48)
    alone = [summed(x, y) for x, y in zip(each, beside, strict=True)]
    with in_slots(SLOT, table()):
        joined, sums = summed(together(each), together(beside))
    yield from all_wrong(apart(joined), [x for x, _ in alone], "joined")
    yield from pads_wrong(joined, "joined")
    totals = [own.sum(1) for _, own in alone]
    yield from all_wrong([row.sum(0)[None] for row in sums], totals, "sums", 1e-5)


def layer_of(number: torch.dtype, taps: tuple[int, ...] = (3, 3)) -> EightBit:
    weight = torch.randint(-100, 100, (48, *taps, CHANNELS)).to(number)
    scale, bias = torch.rand(48) / 1000, torch.randn(48)
    return EightBit(weight, scale, torch.rand(CHANNELS) * 20 + 1, bias)


@check
def convolutions_in_slots() -> Iterator[str]:
    """Tiles have the size of a GPU's, because small tiles take minutes."""
    with patch.object(triton_product, "SMALL", Tile(128, 64, 32, 4, 1)):
        for number, times, has_residual in (
            (torch.int8, 1, True),
            (torch.float8_e4m3fn, 1, False),
            (torch.int8, 2, False),
        ):
            each, past, layer = maps(), maps(48), layer_of(number)
            layer = layer if times == 1 else quartered(layer)
            alone = [
                layer.product(layer.stored(x), x.dtype, own if has_residual else None)
                for x, own in zip(each, past, strict=True)
            ]
            with in_slots(SLOT * times**2, table() * times):
                residual = together(past) if has_residual else None
                found = layer.product(layer.stored(together(each)), torch.float32, residual)
            what = (number, times, has_residual)
            yield from all_wrong(apart(found, times), alone, what, 1e-5)
            if not has_residual:
                yield from pads_wrong(found, what, times)


@check
def sixteen_bit_convolutions_in_slots() -> Iterator[str]:
    for channels, out, stride in ((4, 24, 1), (CHANNELS, 24, 2), (CHANNELS, 4, 1)):
        conv = nn.Conv2d(channels, out, 3, stride, 1)
        layer, each = SlotConvolution(conv), maps(channels)
        larger = patch.object(triton_product, "SMALL", Tile(128, 64, 32, 4, 1))
        with torch.inference_mode(), larger:
            alone = [conv(x) for x in each]
            with in_slots(SLOT, table()):
                found = layer(together(each))
        times = 1 / stride
        yield from all_wrong(apart(found, times), alone, (channels, out, stride), 1e-5)  # type: ignore[arg-type]


@check
def attention_in_slots() -> Iterator[str]:
    heads, channels = 2, 128
    steps = torch.rand(channels) * 20 + 1
    each = [torch.randn(1, h // 4 * (w // 4), 3 * channels) for h, w in SIDES]
    number = torch.float8_e4m3fn

    def attended(x: Tensor) -> Tensor:
        query, key, value = (t.to(number) for t in x.chunk(3, dim=-1))
        # Lines have multiples of 16 bytes.
        lines = F.pad(value.permute(2, 0, 1).float().contiguous(), (0, -x.shape[1] % 16))
        lines = lines.to(number)[..., : x.shape[1]]
        rounding = Rounding(steps, torch.int8, torch.zeros(len(x)))
        return attention(query, key, lines, heads, rounding)

    alone = [attended(x) for x in each]
    with in_slots(SLOT, table()):
        whole = torch.randn(len(each), SLOT // 16, 3 * channels)
        for row, x in zip(whole, each, strict=True):
            row[: x.shape[1]] = x[0]
        found = attended(whole)
    rows = [row[None, : x.shape[1]] for row, x in zip(found, each, strict=True)]
    yield from all_wrong(rows, alone, "attention", 0.01)


@check
def a_row_of_nan_changes_no_other() -> Iterator[str]:
    each = maps()
    weight, bias = torch.randn(2, CHANNELS)
    results = []
    for is_broken in (False, True):
        whole = together(each)
        if is_broken:
            whole[1] = NAN
        with in_slots(SLOT, table()):
            normed = norm_act(whole, weight, bias, 4, 1e-5, has_silu=True)
            results.append((normed, affine(whole, rounding=Rounding(is_bordered=True))))
    for ours, theirs in zip(*results, strict=True):
        for row in (0, 2):
            if not torch.equal(ours[row], theirs[row]):
                yield f"row {row} changed"
        if not bool(theirs[1].isnan().any()):
            yield "the NaN is lost"


@check
def sizes_that_share_a_slot() -> Iterator[str]:
    for height, width in itertools.product(range(32, 264, 8), repeat=2):
        slot = slot_of(height, width, 128)
        if slot is None:
            continue
        if not height * width <= slot <= max(height * width * 8 / 7, height * width + 2048):
            yield f"{height, width}: slot {slot}"
        for level in range(3):
            h, w, own = height >> level, width >> level, slot >> (2 * level)
            with in_slots(slot, torch.tensor([[height, width]], dtype=torch.int32)):
                found = sides_of(torch.empty(1, 1, 1, own, device="meta"))
            if found is None or found.tolist() != [[h, w]]:
                yield f"{height, width}, level {level}: {found}"
            if h * (w + 1) + widest(own) + 2 > bordered(own):
                yield f"{height, width}, level {level}: too few zeros behind it"


if __name__ == "__main__":
    print_results()
