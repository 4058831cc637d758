"""Our Triton kernels against PyTorch, on a CPU under Triton's interpreter.

That is chosen when a kernel is defined, so they run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip(
    "triton",
    reason="Triton comes with a GPU's PyTorch; here `pip install triton` runs its interpreter",
)

PRELUDE = """
import torch, torch.nn.functional as F
from engines.triton_kernels import affine, gated, norm_act, product
torch.manual_seed(0)
def map_of(*dims): return torch.randn(dims).to(memory_format=torch.channels_last)
def near(found, expected, most, what):
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error <= most, f"{what}: {error:.2e}, at most {most:.0e}"
def rounded(x, number):
    if number is torch.int8: return x.round().clamp(-127, 127).to(number)
    return x.clamp(-448, 448).to(number)
steps = torch.rand(80) * 20 + 1
NUMBERS = (torch.int8, torch.float8_e4m3fn)
def same(found, expected, what):
    # The interpreter loses a carry into E4M3's exponent: a few values come out at half their size.
    most = 0.001 if found.dtype is torch.int8 else 0.05
    wrong = float((found.float() != expected.float()).float().mean())
    assert wrong <= most, f"{what}: {wrong:.4f} of the values differ, at most {most}"
"""
NORM = """
x, weight, bias, shift = 2 * map_of(2, 80, 6, 5) + 1, *torch.randn(2, 80), torch.randn(2, 80)
for added in (None, shift):
    for has_silu in (True, False):
        expected = x if added is None else x + added[:, :, None, None]
        expected = F.group_norm(expected, 16, weight, bias, 1e-5)
        expected = F.silu(expected) if has_silu else expected
        settings = dict(has_silu=has_silu, shift=added)
        near(norm_act(x, weight, bias, 16, 1e-5, **settings), expected, 1e-6, settings)
for number in NUMBERS:
    found = norm_act(x, weight, bias, 16, 1e-5, has_silu=True, steps=steps, number=number)
    expected = F.silu(F.group_norm(x, 16, weight, bias, 1e-5)) * steps[:, None, None]
    same(found, rounded(expected, number), number)
"""
ROUNDING = """
tokens, wide = torch.randn(3, 7, 80), torch.randn(3, 7, 160)
product_of_halves = wide[..., :80] * F.gelu(wide[..., 80:])
near(gated(wide), product_of_halves, 1e-6, "gated")
for number in NUMBERS:
    same(affine(tokens, steps=steps, number=number), rounded(tokens * steps, number), number)
    expected = rounded(product_of_halves * steps, number)
    same(gated(wide, steps=steps, number=number), expected, ("gated", number))
"""
PRODUCT = """
for number in NUMBERS:
    def whole(*dims): return torch.randint(-100, 100, dims).float()
    scale, bias, past = torch.rand(48) / 1000, torch.randn(48), map_of(2, 48, 6, 5)
    x = whole(2, 80, 6, 5).to(memory_format=torch.channels_last).to(number)
    weight = whole(48, 3, 3, 80).to(number)
    filters = weight.float().permute(0, 3, 1, 2) * scale.view(-1, 1, 1, 1)
    expected = F.conv2d(x.float(), filters, bias, padding=1) + past
    near(product(x, weight, scale, bias, torch.float32, past), expected, 1e-5, ("conv", number))
    x, weight = whole(3, 7, 80).to(number), whole(48, 80).to(number)
    expected = F.linear(x.float(), weight.float() * scale[:, None], bias)
    near(product(x, weight, scale, bias, torch.float16), expected, 1e-3, ("linear", number))
"""


@pytest.mark.parametrize("code", [NORM, ROUNDING, PRODUCT], ids=["norm", "rounding", "product"])
def test_a_kernel_computes_what_pytorch_does(code: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr[-2000:]
