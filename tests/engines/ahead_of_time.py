"""Compiles our Triton kernels for other GPUs, in every form that the code launches at SDXL's full
size: `python -m tests.engines.ahead_of_time ARCH...` prints a JSON line for each form.

It is a separate program, so that PYTHONPATH chooses the version of Triton.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget

from engines.pytorch import eight_bit
from engines.pytorch.forms import PRODUCTS, Form, compile_form, forms_of
from engines.pytorch.launches import Launch, like_a_gpu
from engines.pytorch.tiles import KIB, TENSOR_MEMORY, Tiles
from eval.speed.meta_networks import NUMBERS, PRECISIONS, UNETS
from tests.engines.meta_launches import (
    launches_in_slots,
    launches_of,
    launches_of_a_picture,
    launches_with_loras,
)

SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}
"""shared memory of a block by compute capability (CUDA C++ Programming Guide, 'Technical
Specifications per Compute Capability')"""
TENSOR_CORES = re.compile(r"\b(UTC[QIH]MMA|[QIH]G?MMA)\b")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/ +[@A-Z]")
FROM_REGISTERS = re.compile(r"[QI]GMMA\S* R\d+, R\d+, gdesc")
ROWS = (2, 16, 32)
FACTORS = {
    **dict.fromkeys(PRODUCTS, "x"),
    **dict.fromkeys(("_attention", "_text_attention"), "query"),
}
"""the parameter with the type that a kernel multiplies on tensor cores"""


def number_of(form: Form) -> str:
    given = form.signature.get(FACTORS.get(form.kernel, "out"), "*fp32")
    return "*" + given.removeprefix("tensordesc<").partition("[")[0].removeprefix("*")


def launches(arch: int, only_products: bool) -> Iterator[Launch]:
    """`only_products`: of products alone, from the fewest calls that have all kinds of them."""
    with like_a_gpu(divmod(arch, 10)):
        if only_products:
            yield from launches_of("unet_deep", "int8", ROWS[1])
        for precision in NUMBERS:
            yield from launches_with_loras(precision, ROWS[1])
        for precision in () if only_products else PRECISIONS:
            for rows in ROWS:
                for name in UNETS:
                    yield from launches_of(name, precision, rows)
        if not only_products:
            for precision in PRECISIONS:
                yield from launches_of_a_picture(precision)
            for name, precision in product(UNETS, NUMBERS if arch >= 90 else ()):
                yield from launches_in_slots(name, precision, ROWS[1])
        # Where PyTorch has no FP8 product, ours is used.
        with patch.object(eight_bit, "has_scaled_mm", lambda *_: False):
            yield from launches_of("unet_deep", "fp8", ROWS[1])


def target_of(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, 32)


def compiled(form: Form, arch: int) -> dict[str, Any]:
    try:
        compiled = compile_form(form, target_of(arch))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[-400:]}"}
    shared = {"shared_bytes": compiled.metadata.shared}
    return {**shared, **inspect(compiled.asm["cubin"], compiled.asm["ptx"])}


def inspect(cubin: bytes, ptx: str) -> dict[str, Any]:
    """Registers, spills and instructions, from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = run("cuobjdump", "-res-usage", file.name), run("nvdisasm", "-c", file.name)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "tensor_cores": sorted(set(TENSOR_CORES.findall(code))),
        "from_registers": len(FROM_REGISTERS.findall(code)),
        "behind_sums": len(INSTRUCTION.findall(code[last_of(TENSOR_CORES, code) :])),
        "copies_tiles": "UTMALDG" in code,
        "keeps_nan": "max.NaN.f32" in ptx or "max.f32" not in ptx,
    }


def last_of(pattern: re.Pattern[str], text: str) -> int:
    """The begin of the pattern's last match; the end of the text without a match."""
    return max((each.start() for each in pattern.finditer(text)), default=len(text))


def run(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("archs", nargs="+", type=int)
    parser.add_argument("--products", action="store_true", help="these alone, in the usual tile")
    options = parser.parse_args(argv)
    for arch in options.archs:
        for form in chosen(arch, options.products):
            facts: dict[str, Any] = {
                "triton": triton.__version__,
                "arch": arch,
                "kernel": form.kernel,
                "number": number_of(form),
                # Read or written.
                "has_fp8": any("fp8e4nv" in given for given in form.signature.values()),
                "constants": form.constants,
            }
            print(json.dumps(facts | compiled(form, arch)), flush=True)
    return 0


def chosen(arch: int, only_products: bool) -> Iterator[Form]:
    usual: set[tuple[Any, ...]] = set()
    names = ("TAPS", "residual", "ranks", "IS_TRANSPOSED")
    tiles = Tiles(SHARED_BYTES[arch], arch // 10 in TENSOR_MEMORY)
    for form in forms_of(launches(arch, only_products), target_of(arch), tiles.fitting):
        facts = (form.constants.get(name, "given") for name in names)
        kind = (form.kernel, number_of(form), *facts)
        if not only_products:
            yield form
        elif form.kernel in FACTORS and kind not in usual:
            usual.add(kind)
            yield form


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
