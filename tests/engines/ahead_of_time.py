"""Compiles our Triton kernels for GPUs that are not here, in every form that the code launches at
SDXL's full size: `python -m tests.engines.ahead_of_time ARCH...`, a JSON line for each form.

A program of its own because the Triton that compiles is whichever PYTHONPATH finds first.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.pytorch import eight_bit, triton_attention, triton_tma_product
from engines.pytorch.launches import OPTIONS, Launch
from engines.pytorch.tiles import KIB, TENSOR_MEMORY, TileProblem, fitting
from eval.speed.kernel_work import GATED
from eval.speed.meta_networks import PRECISIONS, UNETS, launches_of, launches_of_a_picture

SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}
"""what a block may have, by compute capability: CUDA C++ Programming Guide, 'Technical
Specifications per Compute Capability'"""
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
TENSOR_CORES = re.compile(r"\b(UTC[QIH]MMA|[QIH]G?MMA)\b")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/ +[@A-Z]")
FROM_REGISTERS = re.compile(r"[QI]GMMA\S* R\d+, R\d+, gdesc")
ROWS = (2, 16, 32)
UNEVEN = 896
"""a side whose tokens fill no whole number of attention's tiles"""
PRODUCTS = ("_product", "_tma_product", "_gated_product")
FACTORS = {
    **dict.fromkeys(PRODUCTS, "x"),
    **dict.fromkeys(("_attention", "_text_attention"), "query"),
}
"""the parameter that says what a kernel on tensor cores multiplies"""


@dataclass(frozen=True)
class Form:
    """One way in which a kernel is compiled."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def has_fp8(self) -> bool:
        """Read or written."""
        return any("fp8e4nv" in given for _, given in self.signature)

    @property
    def number(self) -> str:
        given = dict(self.signature).get(FACTORS.get(self.kernel, "out"), "*fp32")
        return "*" + given.removeprefix("tensordesc<").partition("[")[0].removeprefix("*")


def form_of(launch: Launch) -> Form:
    """As Triton specialises a launch: a 1 is a constant, multiples of 16 are known to be."""
    signature: dict[str, str] = {}
    constants = {k: v for k, v in launch.constants.items() if k not in OPTIONS}
    aligned = []
    names = launch.kernel.arg_names
    for name, value in zip(names, launch.arguments, strict=False):
        if isinstance(value, TensorDescriptor):
            element = TYPES[value.base.dtype].removeprefix("*")
            signature[name] = f"tensordesc<{element}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
            aligned.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            aligned += [name] if value % 16 == 0 else []
    signature |= dict.fromkeys(constants, "constexpr")
    options = {k: v for k, v in launch.constants.items() if k in OPTIONS}
    return Form(
        launch.name,
        tuple((name, signature[name]) for name in names),
        tuple(sorted(constants.items())),
        tuple(aligned),
        tuple(options.items()),
    )


def launches(has_tma: bool, only_products: bool) -> Iterator[Launch]:
    """`only_products`: from as few calls as have all kinds of them."""
    with ExitStack() as patches:
        for module in (triton_tma_product, triton_attention):
            patches.enter_context(patch.object(module, "has_tma", lambda _: has_tma))
        if only_products:
            yield from launches_of("unet_deep", "int8", ROWS[1])
        uneven = launches_of("unet_deep", "fp8", ROWS[1], UNEVEN)
        yield from (each for each in uneven if each.name == "_attention")
        for precision in () if only_products else PRECISIONS:
            for rows in ROWS:
                for name in UNETS:
                    yield from launches_of(name, precision, rows)
        if not only_products:
            for precision in PRECISIONS:
                yield from launches_of_a_picture(precision)
        # Where PyTorch's own FP8 product is not there, ours takes its place.
        with patch.object(eight_bit, "has_scaled_mm", lambda *_: False):
            yield from launches_of("unet_deep", "fp8", ROWS[1])


def cut(launch: Launch, arch: int) -> Iterator[Launch]:
    """A product in every tile that may be chosen for it."""
    if launch.name not in PRODUCTS:
        yield launch
        return
    constants = dict(launch.constants)
    is_gated = launch.name == GATED
    has_residual = bool(constants.get("HAS_RESIDUAL"))
    given: Any = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))["x"]
    number = str(getattr(given, "base", given).dtype).removeprefix("torch.")
    problem = TileProblem(number, 1, 1, 1, 1, has_residual, is_gated)
    for tile in fitting(problem, SHARED_BYTES[arch], arch // 10 in TENSOR_MEMORY):
        names = ("M", "N", "K", "num_warps", "num_stages")
        own = constants | dict(zip(names, astuple(tile), strict=True))
        lines = [2, tile.n // 2] if is_gated else [tile.n]
        blocks = iter(([tile.m, tile.k], [*lines, tile.k]))
        arguments = tuple(
            replace(each, block_shape=next(blocks)) if isinstance(each, TensorDescriptor) else each
            for each in launch.arguments
        )
        yield Launch(launch.kernel, launch.grid, arguments, own)


def forms(arch: int, only_products: bool) -> dict[Form, Any]:
    """And the kernel of each."""
    found: dict[Form, Any] = {}
    seen: set[Form] = set()
    for launch in launches(arch >= 90, only_products):
        if (form := form_of(launch)) not in seen:
            seen.add(form)
            found |= {form_of(each): each.kernel for each in cut(launch, arch)}
    return found


def compile_form(form: Form, kernel: Any, arch: int) -> dict[str, Any]:
    place = {name: i for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        dict(form.signature),
        {(place[name],): value for name, value in form.constants},
        {(place[name],): [["tt.divisibility", 16]] for name in form.aligned},
    )
    options = {**dict(form.options), "enable_fp_fusion": True}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
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
    """Where its last match begins; the end of the text if it has none."""
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
        for form, kernel in chosen(arch, options.products):
            found = compile_form(form, kernel, arch)
            about = {"triton": triton.__version__, "arch": arch, "kernel": form.kernel}
            facts: dict[str, Any] = {"number": form.number, "has_fp8": form.has_fp8}
            facts["constants"] = dict(form.constants)
            print(json.dumps({**about, **facts, **dict(form.options), **found}), flush=True)
    return 0


def chosen(arch: int, only_products: bool) -> Iterator[tuple[Form, Any]]:
    usual: set[tuple[Any, ...]] = set()
    for form, kernel in forms(arch, only_products).items():
        constants = dict(form.constants)
        given = ("TAPS", "HAS_RESIDUAL", "IS_TURNED", "HAS_TAIL")
        kind = (form.kernel, form.number, *(constants.get(name) for name in given))
        if not only_products:
            yield form, kernel
        elif form.kernel in FACTORS and kind not in usual:
            usual.add(kind)
            yield form, kernel


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
