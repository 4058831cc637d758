"""`python -m engines.trt.one_plan`: one network's plan by TensorRT-RTX for an architecture that no
target has. It says whether the plan builds, and in what time and memory; nothing serves it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from engines.folders.export_folder import ExportFolder
from engines.folders.targets import listed_target
from engines.trt.build import BuildSpec
from engines.trt.flavours import TENSORRT_RTX
from engines.trt.plan_process import run_worker
from sdxl.arguments import Parser, whole


def main() -> None:
    options = build_parser().parse_args()
    print(build_one(options))


def build_parser() -> Parser:
    parser = Parser(prog="engines.trt.one_plan", description=__doc__)
    add = parser.add_argument
    add("--onnx", type=Path, required=True, metavar="DIR", help="a folder of `sdxl export`")
    add("--network", required=True, metavar="NAME", help="one of the export's")
    add("--sm", required=True, choices=TENSORRT_RTX.architectures)
    add("--max-batch", type=whole, required=True, metavar="N", help="images in one call")
    add("--out", type=Path, required=True, metavar="DIR", help="where to put it")
    return parser


def build_one(options: argparse.Namespace) -> str:
    """The folder appears when the plan is whole."""
    making = options.out.with_name(f".{options.out.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    target = listed_target(options.sm, options.max_batch)
    export = ExportFolder.open(options.onnx)
    order = BuildSpec(export, target, TENSORRT_RTX, options.max_batch, False, making)
    name = options.network
    plan = making / f"{name}.plan"
    cost = export.load_checked(
        lambda: run_worker(order.job(name, plan), making / "log", lambda share: None)
    )
    size = plan.stat().st_size
    making.rename(options.out)
    return (
        f"{name} for {options.sm}: {cost['seconds']:.1f} s, {size / 2**20:.1f} MiB, "
        f"{cost['peak_bytes'] / 2**30:.1f} GiB peak"
    )


if __name__ == "__main__":
    main()
