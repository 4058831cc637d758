"""Each of our kernels compiles for its GPUs as the code launches it at SDXL's full size, on tensor
cores and without spills. This needs no GPU, because Triton includes the compiler and the
disassembler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux alone")

from engines.pytorch.forms import PRODUCTS
from engines.pytorch.tiles import USUAL
from eval.speed.kernel_work import GATED, GATED_OPERATIONS
from tests.engines.ahead_of_time import FACTORS, SHARED_BYTES

ROOT = Path(__file__).parent.parent.parent
PINNED, OF_TORCH_2_11 = "pinned", "3.6.0"
MOST_SPILLED_BYTES = 0
BY_DESCRIPTORS = ("_tma_product", GATED)
INSTRUCTIONS = {
    (80, "*i8"): "IMMA",
    (89, "*i8"): "IMMA",
    (89, "*fp8e4nv"): "QMMA",
    (90, "*i8"): "IGMMA",
    (90, "*fp8e4nv"): "QGMMA",
}
"""instructions of the tensor cores, by compute capability and type; no others are searched"""
HALVES = {80: "HMMA", 89: "HMMA", 90: "HGMMA"}
"""instructions for the LoRAs' products"""


def compiled(place: Path, *arguments: str, path: str = "") -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(place),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.ahead_of_time", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def has_loras(form: dict[str, Any]) -> bool:
    """Whether a product has LoRAs. Arguments that are left out are constants."""
    return form["kernel"] in PRODUCTS and "ranks" not in form["constants"]


def wrong(form: dict[str, Any]) -> str:
    """The errors of a form; empty if it is right."""
    if "error" in form:
        return str(form["error"])
    arch, number = form["arch"], form["number"]
    if form["spilled_bytes"] > MOST_SPILLED_BYTES:
        return f"spills {form['spilled_bytes']} bytes, at most {MOST_SPILLED_BYTES}"
    if form["shared_bytes"] > SHARED_BYTES[arch]:
        return f"{form['shared_bytes']} bytes of shared memory, at most {SHARED_BYTES[arch]}"
    if not form["keeps_nan"]:
        return "a NaN is lost where values are limited"
    needed = INSTRUCTIONS.get((arch, number))
    if form["kernel"] in FACTORS and needed:
        others = {HALVES[arch]} if has_loras(form) else set[str]()
        if {*form["tensor_cores"]} != {needed, *others}:
            return f"instructions {form['tensor_cores']}, needed {needed} {others or ''}"
    if form["kernel"] in (*BY_DESCRIPTORS, "_attention") and not form["copies_tiles"]:
        return "tiles do not come by the copy engine"
    if form["kernel"] in BY_DESCRIPTORS and form["from_registers"]:
        return "a factor goes through registers on its way to the tensor cores"
    return ""


def report(forms: list[dict[str, Any]]) -> str:
    return "\n".join(f"{why}: {form}" for form in forms if (why := wrong(form)))


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Path:
    """The cache is kept between runs, so unchanged kernels are not compiled again."""
    return Path(request.config.cache.mkdir("triton"))


@pytest.mark.slow
def test_products_compile_for_hopper(cache: Path) -> None:
    forms = compiled(cache, "90", "--products")
    assert [f["number"] for f in forms if f["kernel"] == "_attention"] == ["*fp8e4nv"]
    forms_of_products = [f for f in forms if f["kernel"] in PRODUCTS]
    assert any(f["constants"].get("IS_TRANSPOSED") for f in forms_of_products)
    kinds = {(f["number"], f["constants"].get("TAPS", GATED)) for f in forms_of_products}
    assert kinds == {(n, t) for n in ("*i8", "*fp8e4nv") for t in (1, 4, 9, GATED)}
    assert not report(forms), report(forms)
    assert_gates_take_what_the_paper_says(forms_of_products)


def assert_gates_take_what_the_paper_says(products: list[dict[str, Any]]) -> None:
    """Compare the instructions with a plain product's, in the usual tile of both."""
    plain = {
        f["number"]: f["behind_sums"]
        for f in products
        if f["constants"].get("TAPS") == 1
        and "residual" in f["constants"]
        and not (has_loras(f) or f["constants"]["IS_TRANSPOSED"])
    }
    gated = {
        f["number"]: f["behind_sums"] for f in products if f["kernel"] == GATED and not has_loras(f)
    }
    values = USUAL.m * USUAL.n / 2 / (32 * USUAL.warps)
    for number, most in GATED_OPERATIONS.items():
        name = {torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv"}[number]
        found = (gated[name] - plain[name]) / values
        assert found <= most, f"{name}: {found:.1f} instructions a value, at most {most} expected"


@pytest.mark.long
@pytest.mark.parametrize("version", [PINNED, OF_TORCH_2_11])
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_every_form_compiles(
    arch: int, version: str, cache: Path, triton_of: dict[str, str]
) -> None:
    """torch 2.11 includes Triton 3.6."""
    forms = compiled(cache, str(arch), path=triton_of[version])
    assert forms and all(version in (PINNED, form["triton"]) for form in forms)
    for form in forms:
        print({k: v for k, v in form.items() if k != "keeps_nan"})
    if arch == 80:
        # Its tensor cores have no FP8, so Triton refuses.
        refused = [f for f in forms if f["has_fp8"]]
        assert refused and all("fp8e4nv not supported" in f.get("error", "") for f in refused)
        forms = [f for f in forms if not f["has_fp8"]]
    assert not report(forms), report(forms)


@pytest.fixture(scope="module")
def triton_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The path of each version; the older one's folder comes before the environment's."""
    folder = tmp_path_factory.mktemp("triton")
    wanted = ["--no-deps", "--target", str(folder), f"triton=={OF_TORCH_2_11}"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return {PINNED: "", OF_TORCH_2_11: str(folder)}
