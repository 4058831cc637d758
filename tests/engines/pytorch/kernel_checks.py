"""Compares kernels with float64, and describes the differences."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.launches import LARGEST, Rounding
from engines.pytorch.triton_tma_product import gelu

Check = Callable[[], Iterator[str]]
NUMBERS = (torch.int8, torch.float8_e4m3fn)
CHECKS: dict[str, Check] = {}
ROWS, CHANNELS, HEIGHT, WIDTH = 3, 72, 5, 7
"""neither powers of two nor multiples of a block"""
NAN, INFINITY = torch.nan, torch.inf
MOST_OF_GELU, BEYOND_5 = 0.007, 2e-6
"""the largest relative error up to 5, and the largest absolute error beyond 5"""


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def print_results() -> None:
    """Run the checks, and print the errors by the name of the check, as JSON."""
    torch.manual_seed(0)
    # NumPy warns of infinity times zero, which some checks need.
    warnings.simplefilter("ignore", RuntimeWarning)
    print(json.dumps({name: list(run()) for name, run in CHECKS.items()}))


def map_of(*dims: int) -> Tensor:
    return torch.randn(dims).to(memory_format=torch.channels_last)


def whole(*dims: int) -> Tensor:
    return torch.randint(-100, 100, dims).float()


def wrong_by(found: Tensor, expected: Tensor, most: float, what: object) -> Iterator[str]:
    if not torch.equal(found.isnan(), expected.isnan()):
        yield f"{what}: {int(found.isnan().sum())} NaN, needed {int(expected.isnan().sum())}"
        return
    difference = found.double().nan_to_num() - expected.double().nan_to_num()
    error = float(difference.norm() / expected.double().nan_to_num().norm())
    if not error <= most:
        yield f"{what}: {error:.2e}, at most {most:.0e}"


def rounded(x: Tensor, number: torch.dtype) -> Tensor:
    largest = LARGEST[number]
    whole = x.nan_to_num(0, INFINITY, -INFINITY).round() if number is torch.int8 else x
    return whole.clamp(-largest, largest).float().to(number)


def differing(found: Tensor, expected: Tensor, what: object) -> Iterator[str]:
    """Few values may differ: halfway values go either way, and the interpreter loses a carry into
    E4M3's exponent. Its E4M3 also has no NaN, which compiled code must keep."""
    most = 0.002 if found.dtype is torch.int8 else 0.05
    ours, theirs = found.float(), expected.float()
    wrong = float(((ours != theirs) & ~theirs.isnan()).float().mean())
    if wrong > most:
        yield f"{what}: {wrong:.4f} of the values differ, at most {most}"


def flags_wrong(
    flags: Tensor, broken: set[int], number: torch.dtype, what: object
) -> Iterator[str]:
    found = set(torch.nonzero(flags.isnan()).flatten().tolist())
    if number is torch.int8 and found != broken:
        yield f"{what}: flags of the rows {found}, needed {broken}"


def rounding_wrong(
    run: Callable[..., Tensor],
    steps: Tensor,
    scaled: Tensor,
    what: object,
    broken: set[int] | None = None,
) -> Iterator[str]:
    """Check that `run` with these steps rounds `scaled` to each 8-bit type and, in int8, flags the
    broken rows."""
    for number in NUMBERS:
        flags = torch.zeros(ROWS)
        found = run(rounding=Rounding(steps, number, flags))
        yield from differing(found, rounded(scaled, number), (what, number))
        rows = broken_rows(scaled) if broken is None else broken
        yield from flags_wrong(flags, rows, number, what)


def broken_rows(x: Tensor) -> set[int]:
    return set(torch.nonzero(x.flatten(1).isnan().any(1)).flatten().tolist())


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.double(), weight.double() * scale.double()[:, None], bias.double())


def convolved(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    filters = weight.double().permute(0, 3, 1, 2) * scale.double().view(-1, 1, 1, 1)
    return F.conv2d(x.double(), filters, bias.double(), padding=1)


def normed(x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    value = x.double() if shift is None else x.double() + shift.double()[:, :, None, None]
    value = F.group_norm(value, 4, weight.double(), bias.double(), 1e-5)
    return F.silu(value) if silu else value


def gated_wrong(found: Tensor, expected: Tensor, number: torch.dtype) -> Iterator[str]:
    """Few values may differ, each at most by one step of the type."""
    ours, theirs = found.double(), expected.double()
    step = 1.0 if number is torch.int8 else theirs.abs().clamp(min=2.0**-6) / 8
    far = float(((ours - theirs).abs() > step * 1.001).double().mean())
    unequal = float((ours != theirs).double().mean())
    # The interpreter loses a carry into E4M3's exponent: see `differing`.
    if far > (0 if number is torch.int8 else 0.05):
        yield f"{number}: {far:.4f} of the values are further off than a step"
    most = 0.02 if number is torch.int8 else 0.08
    if unequal > most:
        yield f"{number}: {unequal:.4f} of the values differ, at most {most}"


def attended(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Attend in float64; value is [channels, rows, tokens]."""
    found = [query.double(), key.double(), value.double().permute(1, 2, 0)]
    split = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in found)
    return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


def gelu_of(gates: Tensor) -> Tensor:
    """The GELU of the gated product."""
    found = torch.empty_like(gates)
    _gelus[(1,)](gates, found, len(gates), SIZE=triton.next_power_of_2(len(gates)))
    return found


@triton.jit
def _gelus(x, out, count, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, gelu(tl.load(x + place, mask=place < count)), mask=place < count)
