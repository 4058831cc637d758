"""A real TensorRT reads and builds every graph, here without a GPU.

A plan that builds does not prove that 8-bit kernels run: that takes a GPU and a clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.build import Order
from engines.flavours import TENSORRT_RTX
from engines.plan_process import run_worker
from engines.targets import TARGETS
from tests.onnx_export.exports import Exports

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("polygraphy")

GRAPHS = {
    "fp16": ("clip_l", "clip_g", "unet_deep", "unet_shallow", "vae_decoder"),
    "int8": ("unet_deep", "unet_shallow"),
    "fp8": ("unet_deep", "unet_shallow"),
}
"""8-bit exports have fp16's other three graphs"""


@pytest.mark.parametrize(
    ("precision", "name"), [(p, n) for p, names in GRAPHS.items() for n in names]
)
def test_a_plan_for_an_l40s_builds(
    precision: str, name: str, exports: Exports, tmp_path: Path
) -> None:
    order = Order(exports(precision), TARGETS["l40s"], TENSORRT_RTX, 2, False, tmp_path)
    plan = tmp_path / f"{name}.plan"
    cost: dict[str, Any] = run_worker(order.job(name, plan), tmp_path / "log", lambda _: None)
    assert plan.stat().st_size > 100_000 and cost["seconds"] > 0


def test_eight_bit_exports_share_the_other_graphs(exports: Exports) -> None:
    half, *others = (exports(precision).graphs for precision in GRAPHS)
    for name in ("clip_l", "clip_g", "vae_decoder"):
        assert {graphs[name].sha256 for graphs in others} == {half[name].sha256}
