"""Our Triton kernels under Triton's interpreter against PyTorch in float64, each with every
combination of its flags, at odd sizes. `python -m tests.engines.pytorch.interpreted_kernels` also
runs the checks of interpreted_attention.py.

The interpreter is chosen when a kernel is defined, so this is a separate program. It prints one
JSON object with the errors by the name of the check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engines.pytorch.eight_bit import EightBit, quartered
from engines.pytorch.launches import Rounding
from engines.pytorch.triton_group_norm import FOLDED, summed
from engines.pytorch.triton_kernels import add_norm, affine, gated, norm_act
from engines.pytorch.triton_low_rank import low_rank
from engines.pytorch.triton_product import gated_product, product, transposed_product
from engines.pytorch.triton_tma_product import is_bordered
from sdxl.specs import PAGE_RANK
from tests.engines.pytorch import interpreted_attention  # noqa: F401
from tests.engines.pytorch.kernel_checks import (
    BEYOND_5,
    CHANNELS,
    HEIGHT,
    INFINITY,
    MOST_OF_GELU,
    NAN,
    NUMBERS,
    ROWS,
    WIDTH,
    check,
    convolved,
    differing,
    flags_wrong,
    gated_wrong,
    gelu_of,
    linear,
    map_of,
    normed,
    print_results,
    rounded,
    rounding_wrong,
    whole,
    wrong_by,
)


@check
def norm() -> Iterator[str]:
    x, (weight, bias) = 2 * map_of(ROWS, CHANNELS, HEIGHT, WIDTH) + 1, torch.randn(2, CHANNELS)
    added, steps = torch.randn(ROWS, CHANNELS), torch.rand(CHANNELS) * 20 + 1
    for shift, silu in itertools.product((None, added), (False, True)):
        expected = normed(x, shift, weight, bias, silu)
        what: Any = ("shift" if shift is not None else "", "silu" if silu else "")
        run = partial(norm_act, x, weight, bias, 4, 1e-5, has_silu=silu, shift=shift)
        yield from wrong_by(run(), expected, 1e-6, what)
        yield from rounding_wrong(run, steps, expected * steps[:, None, None], what)


@check
def norm_of_a_large_map() -> Iterator[str]:
    """More programs share the sums than are folded at once, and some programs have no pixels."""
    x, (weight, bias) = 2 * map_of(1, CHANNELS, 64, 144) + 1, torch.randn(2, CHANNELS)
    if (splits := summed(x)[1].shape[1]) <= FOLDED:
        yield f"{splits} programs, needed more than {FOLDED}"
    found = norm_act(x, weight, bias, 4, 1e-5, has_silu=True)
    yield from wrong_by(found, normed(x, None, weight, bias, True), 1e-6, "large")


@check
def maps_joined_for_their_norm() -> Iterator[str]:
    """The result equals that of a map joined before, wherever the second map begins in a block of
    channels. A NaN or infinity shows in its group alone."""
    for first, second in ((72, 72), (8, 136), (80, 64)):
        x, beside = (2 * map_of(ROWS, width, HEIGHT, WIDTH) + 1 for width in (first, second))
        beside[1, 3, 2, 4], x[2, 5, 0, 0] = NAN, INFINITY
        both, (weight, bias) = torch.cat([x, beside], 1), torch.randn(2, first + second)
        joined, sums = summed(x, beside)
        if not joined.is_contiguous(memory_format=torch.channels_last):
            yield f"{first, second}: strides {joined.stride()}"
        if not torch.equal(joined.nan_to_num(), both.nan_to_num()):
            yield f"{first, second}: another map"
        found = norm_act(joined, weight, bias, 4, 1e-5, has_silu=True, sums=sums)
        yield from wrong_by(found, normed(both, None, weight, bias, True), 1e-6, (first, second))


@check
def norm_of_nan_and_infinity() -> Iterator[str]:
    """A group that holds a NaN or an infinity is all NaN; other groups are not."""
    weight, bias = torch.randn(2, CHANNELS)
    for bad, silu in itertools.product((NAN, INFINITY, -INFINITY), (False, True)):
        x = map_of(ROWS, CHANNELS, HEIGHT, WIDTH)
        x[1, 10, 3, 2] = bad
        expected = normed(x, None, weight, bias, silu)
        run = partial(norm_act, x, weight, bias, 4, 1e-5, has_silu=silu)
        yield from wrong_by(run(), expected, 1e-6, (bad, silu))
        yield from rounding_wrong(run, torch.ones(CHANNELS), expected, (bad, silu), {1})


@check
def rounding() -> Iterator[str]:
    """Maps and tokens, with and without factors by row and channel."""
    steps, (factor, offset) = torch.rand(CHANNELS) * 20 + 1, torch.randn(2, ROWS, CHANNELS)
    for x in (map_of(ROWS, CHANNELS, HEIGHT, WIDTH), torch.randn(ROWS, 7, CHANNELS)):
        for row, bad in ((0, INFINITY), (0, -INFINITY), (2, NAN)):
            x[row, 2 + (bad < 0), ..., 3] = bad
        by_row = ((1,) * 2 if x.dim() == 4 else (1,), (ROWS, CHANNELS, 1, 1))
        for has_affine, silu in itertools.product((False, True), (False, True)):
            if has_affine and x.dim() == 3:
                continue
            value, given = x.double(), {}
            if has_affine:
                value = value * factor.double().view(by_row[1]) + offset.double().view(by_row[1])
                given = {"factor": factor, "offset": offset}
            value = F.silu(value) if silu else value
            what = (x.dim(), has_affine, silu)
            finite = x.isfinite()
            run = partial(affine, x, **given, has_silu=silu)
            yield from wrong_by(run()[finite], value[finite], 1e-6, what)
            scaled = value * (steps[:, None, None] if x.dim() == 4 else steps)
            yield from rounding_wrong(run, steps, scaled, what)


@check
def rounding_of_sums() -> Iterator[str]:
    """A NaN or infinity in either summand shows."""
    steps = torch.rand(CHANNELS) * 20 + 1
    x, added = torch.randn(2, ROWS, 7, CHANNELS)
    yield from wrong_by(affine(x, added=added), x.double() + added.double(), 1e-6, "sum")
    x[1, 2, 3], added[2, 4, 5], added[0, 1, 2], x[0, 3, 4] = NAN, NAN, INFINITY, -INFINITY
    expected = (x.double() + added.double()) * steps
    yield from rounding_wrong(partial(affine, x, added=added), steps, expected, "sum", {1, 2})


@check
def gating() -> Iterator[str]:
    for width in (CHANNELS, 1100):
        wide, steps = torch.randn(ROWS, 5, 2 * width), torch.rand(width) * 20 + 1
        value, gate = wide.double().chunk(2, dim=-1)
        yield from wrong_by(gated(wide), value * F.gelu(gate), 1e-6, width)
        wide[1, 2, 3], wide[2, 4, width + 1] = NAN, NAN
        wide[0, 0, 2], wide[0, 1, 2] = INFINITY, -INFINITY
        value, gate = wide.double().chunk(2, dim=-1)
        expected = value * F.gelu(gate)
        yield from wrong_by(gated(wide)[1:], expected[1:], 1e-6, (width, "NaN"))
        yield from rounding_wrong(partial(gated, wide), steps, expected * steps, width, {1, 2})


@check
def sums_and_their_layer_norms() -> Iterator[str]:
    """A token that holds a NaN or an infinity is all NaN; other tokens are not."""
    cases = [(1100, None), *((CHANNELS, bad) for bad in (None, NAN, INFINITY, -INFINITY))]
    for width, bad in cases:
        x, added, steps = *torch.randn(2, ROWS, 3, width), torch.rand(width) * 20 + 1
        (weight, bias), broken = torch.randn(2, width), set[int]()
        if bad is not None:
            added[1, 2, 3], broken = bad, {1}
        for given in (added, None):
            total = x.double() if given is None else x.double() + given.double()
            expected = F.layer_norm(total, (width,), weight.double(), bias.double(), 1e-5)
            what: Any = (width, bad, given is not None)
            found, normed = add_norm(x, given, weight, bias, 1e-5)
            yield from wrong_by(found, total, 1e-6, (*what, "sum"))
            yield from wrong_by(normed, expected, 2e-6, what)
            run = partial(add_norm, x, given, weight, bias, 1e-5)
            second = lambda rounding, run=run: run(rounding=rounding)[1]  # noqa: E731
            shown = broken if given is not None else set[int]()
            yield from rounding_wrong(second, steps, expected * steps, what, shown)


@check
def products() -> Iterator[str]:
    """Linears and convolutions, with and without addends, into every type."""
    out = 41
    for number, dtype in zip(NUMBERS, (torch.float16, torch.float32), strict=True):
        most = 1e-5 if dtype is torch.float32 else 1e-3
        scale, bias = torch.rand(out) / 1000, torch.randn(out)
        x = whole(ROWS, CHANNELS, HEIGHT, WIDTH).to(memory_format=torch.channels_last)
        for exact, left, right, addend in (
            (convolved, x, whole(out, 3, 3, CHANNELS), map_of(ROWS, out, HEIGHT, WIDTH)),
            (linear, whole(ROWS, 7, CHANNELS), whole(out, CHANNELS), torch.randn(ROWS, 7, out)),
        ):
            factors = left.to(number), right.to(number)
            for residual in (None, addend.to(dtype)):
                expected = exact(*factors, scale, bias)
                expected = expected if residual is None else expected + residual.double()
                found = product(*factors, scale, bias, dtype, residual)
                what: Any = (exact.__name__, number, dtype, residual is not None)
                yield from wrong_by(found, expected, most, what)


@check
def products_by_descriptors() -> Iterator[str]:
    """A convolution of a map whose border a kernel made, with several pictures and odd sizes."""
    inside, out, steps = 80, 41, torch.ones(80)
    for number, residual in itertools.product(NUMBERS, (False, True)):
        x = whole(ROWS, inside, HEIGHT, WIDTH).to(memory_format=torch.channels_last)
        stored, plain = (
            affine(x, rounding=Rounding(steps, number, torch.zeros(ROWS), has_border))
            for has_border in (True, False)
        )
        what: Any = (number, residual)
        if not is_bordered(stored) or is_bordered(plain):
            yield f"{what}: strides {stored.stride()}"
        yield from wrong_by(stored.float(), plain.float(), 0, (*what, "border"))
        scale, bias = torch.rand(out) / 1000, torch.randn(out)
        past = map_of(ROWS, out, HEIGHT, WIDTH) if residual else None
        weight = whole(out, 3, 3, inside).to(number)
        found = product(stored, weight, scale, bias, torch.float32, past)
        expected = convolved(plain, weight, scale, bias)
        expected = expected if past is None else expected + past.double()
        yield from wrong_by(found, expected, 1e-5, what)
    tokens, weight = whole(ROWS, 7, inside).to(number), whole(out, inside).to(number)
    found = product(tokens, weight, scale, bias, torch.float32)
    expected = linear(tokens, weight, scale, bias)
    yield from wrong_by(found, expected, 1e-5, "linear")


@check
def products_of_doubled_maps() -> Iterator[str]:
    """The result equals that of doubling a map and then convolving it, also at the edges, with and
    without a border. Only the weights' sums are rounded, in the reference too."""
    inside, out, steps = 80, 41, torch.ones(80)
    for number, has_border in itertools.product(NUMBERS, (False, True)):
        x = whole(ROWS, inside, HEIGHT, WIDTH).to(memory_format=torch.channels_last)
        stored = affine(x, rounding=Rounding(steps, number, torch.zeros(ROWS), has_border))
        weight = whole(out, 3, 3, inside).to(number)
        scale, bias = torch.rand(out) / 1000, torch.randn(out)
        layer = EightBit(weight, scale, steps, bias)
        quarters = quartered(layer)
        doubled = F.interpolate(stored.double(), scale_factor=2, mode="nearest")
        expected = convolved(doubled, weight, scale, bias)
        what: Any = (number, has_border)
        found = product(stored, quarters.weight, quarters.scale, bias, torch.float32)
        most = 0.01 if number is torch.int8 else 0.04
        yield from wrong_by(found, expected, most, what)
        yield from wrong_by(found, quarters._reference(stored, None), 1e-5, (*what, "reference"))


@check
def products_with_loras() -> Iterator[str]:
    """Each row has its own pages, in every kind of product. A tile has tokens of three rows."""
    out = 41
    for number, (inside, count) in itertools.product(NUMBERS, ((CHANNELS, 1), (80, 3))):
        tokens, weight = whole(ROWS, 7, inside).to(number), whole(2 * out, inside).to(number)
        scale, bias = torch.rand(2 * out) / 1000, torch.randn(2 * out)
        down, up = torch.randn(5, PAGE_RANK, inside) / 50, torch.randn(5, PAGE_RANK, 2 * out) / 50
        pages = torch.tensor([[0, 1, 4], [2, 2, 3], [4, 0, 1]])[:, :count].contiguous()
        scales = torch.randn(ROWS, count * PAGE_RANK)
        flags = torch.zeros(ROWS)
        both = low_rank(tokens, flags, down, up, pages, scales)
        ranks = torch.einsum("rti,rpki->rtpk", tokens.double(), down.double()[pages])
        ranks = ranks.flatten(2) * scales.double()[:, None]
        added = ranks @ up.double()[pages].flatten(1, 2)
        expected, past = linear(tokens, weight, scale, bias) + added, torch.randn(ROWS, 7, 2 * out)
        what: Any = (number, inside, count)
        yield from wrong_by(both.ranks, ranks, 1e-5, (*what, "ranks"))
        yield from flags_wrong(flags, set(), number, what)
        # The complete sums are rounded to units of the scale.
        most = 2e-4 if number is torch.int8 else 1e-5
        found = product(tokens, weight, scale, bias, torch.float32, past, both)
        yield from wrong_by(found, expected + past.double(), most, (*what, "residual"))
        if inside % 16:
            continue
        found = transposed_product(tokens, weight, scale, bias, torch.float32, both)
        yield from wrong_by(found, expected.permute(2, 0, 1), most, (*what, "turned"))
        steps = torch.cat([torch.rand(out) * 20 + 1, torch.ones(out)])
        given = (tokens, weight, scale * steps, bias * steps, flags, number, both, scale)
        value, gate = expected.chunk(2, dim=-1)
        wanted = rounded(value * F.gelu(gate) * steps[:out], number)
        yield from gated_wrong(gated_product(*given), wanted, number)
        down[2, 3, 5] = INFINITY
        low_rank(tokens, flags, down, up, pages, scales)
        yield from flags_wrong(flags, {1}, number, (*what, "infinite"))


@check
def turned_products() -> Iterator[str]:
    """A linear layer whose results are stored with adjacent tokens. E4M3 holds at most 448."""
    inside, out = 80, 41
    scale, bias = torch.rand(out) / 1000, torch.randn(out)
    scale[7], bias[8] = 10, NAN
    for number in NUMBERS:
        tokens, weight = whole(ROWS, 7, inside).to(number), whole(out, inside).to(number)
        expected = linear(tokens, weight, scale, bias)
        found = transposed_product(tokens, weight, scale, bias, torch.float32)
        yield from wrong_by(found, expected.permute(2, 0, 1), 1e-5, number)
        for small, straight in (
            (transposed_product(tokens, weight, scale, bias, torch.float8_e4m3fn), False),
            (product(tokens, weight, scale, bias, torch.float8_e4m3fn), True),
        ):
            wanted = expected if straight else expected.permute(2, 0, 1)
            limited = rounded(wanted, torch.float8_e4m3fn)
            yield from differing(small, limited, (number, "E4M3", straight))


@check
def gated_products() -> Iterator[str]:
    """Into both 8-bit types, at odd sizes. Our GELU rounds few values to another number."""
    inside, out = 80, 41
    scale, bias = torch.rand(2 * out) / 1000, torch.randn(2 * out)
    steps = torch.cat([torch.rand(out) * 20 + 1, torch.ones(out)])
    for number in NUMBERS:
        tokens, weight = whole(ROWS, 7, inside).to(number), whole(2 * out, inside).to(number)
        value, gate = linear(tokens, weight, scale, bias).chunk(2, dim=-1)
        expected = value * F.gelu(gate) * steps[:out]
        flags = torch.zeros(ROWS)
        found = gated_product(tokens, weight, scale * steps, bias * steps, flags, number)
        yield from gated_wrong(found, rounded(expected, number), number)
        yield from flags_wrong(flags, set(), number, number)


@check
def gated_products_of_nan_and_infinity() -> Iterator[str]:
    """A token's NaN shows in its row alone, and so does an infinite gate."""
    inside, out = 80, 41
    scale, tokens = torch.rand(2 * out) / 1000, whole(ROWS, 7, inside).to(torch.float8_e4m3fn)
    weight = whole(2 * out, inside).to(torch.float8_e4m3fn)
    for number, bad in itertools.product(NUMBERS, (NAN, INFINITY, -INFINITY)):
        for place in (3, out + 3) if bad is NAN else (out + 3,):
            bias, flags = torch.randn(2 * out), torch.zeros(ROWS)
            bias[place] = bad
            gated_product(tokens, weight, scale, bias, flags, number)
            yield from flags_wrong(flags, set(range(ROWS)), number, (number, bad, place))
        broken, flags = tokens.float(), torch.zeros(ROWS)
        broken[1, 2, 3] = bad
        gated_product(broken, weight.float(), scale, torch.zeros(2 * out), flags, number)
        yield from flags_wrong(flags, {1}, number, (number, bad, "token"))


@check
def gelus() -> Iterator[str]:
    """The GELU of the product, gate by gate."""
    gates = torch.cat([torch.linspace(-12, 12, 9601), torch.tensor([-1e30, -300, 300, 1e30])])
    found = gelu_of(gates)
    exact = F.gelu(gates.double())
    beyond = (found.double() - exact).abs() - MOST_OF_GELU * exact.abs() - BEYOND_5
    if not bool((beyond <= 0).all()):
        at = int(beyond.argmax())
        yield f"gelu({gates[at]:.4g}): {found[at]:.6g}, needed {exact[at]:.6g}"


if __name__ == "__main__":
    print_results()
