"""`sdxl bench floor`: the arithmetic and bytes of each stage, their minimum time on this machine,
and that minimum as a share of each engine's time.

`--model sdxl-1.0` derives the full-size model's figures from its shape and times nothing. `--gpu`
estimates the time of full-size calls of the torch backend on another GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from sdxl.arguments import Parser, add_option, whole
from sdxl.params import GenerationParams, InvalidParams

if TYPE_CHECKING:
    from eval.measuring.arithmetic import CallWork, Shapes
    from eval.measuring.ceilings import Ceilings
    from sdxl.engine import Engines

GIGA = 1e9


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    for rows in options.rows:
        if rows < 2 or rows % 2:
            raise InvalidParams("rows", rows, "must be even and at least 2: an image has two")
    if options.gpu:
        from eval.speed import estimated_time

        report = estimated_time.report(options.gpu, options.rows)
        lines = "\n".join(estimated_time.table(report))
    else:
        report = measure(options)
        lines = table(report)
    print(json.dumps(report) if options.is_json else lines)
    return 0


def build_parser() -> Parser:
    description = "Compare engines with the machine's minimum time."
    parser = Parser(prog="sdxl bench floor", description=description)
    add = partial(add_option, parser)
    add("--model", "mini", "a model, or sdxl-1.0 for the arithmetic alone")
    add("--backend", ["torch", "onnxruntime"], "backends to time")
    add("--precision", "fp32", "of weights and activations")
    add("--rows", [2, 16], "rows of a UNet's call; an image has two")
    add("--side", None, "of the image (default: the model's)", "PIXELS", type=whole)
    add("--gpu", None, "estimate this GPU instead", choices=("h200", "h100", "l40s"))
    add("--json", False, "print the figures as JSON", dest="is_json")
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    import engines
    from eval.measuring import arithmetic
    from eval.measuring.ceilings import measure_ceilings
    from eval.measuring.system_description import describe_system

    configs = arithmetic.configs_of(options.model)
    side = options.side or arithmetic.architecture_of(configs).default_side
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Compare 8-bit engines with the ceiling of fp16, the precision of their other networks.
    dtype = getattr(torch, arithmetic.DTYPES.get(options.precision, "float16"))
    ceilings = measure_ceilings(device, dtype)
    report: dict[str, Any] = {
        "model": options.model,
        "precision": options.precision,
        "side": side,
        "system": describe_system(),
        "ceilings": asdict(ceilings),
        "calls": [],
    }
    loaded = {
        backend: engines.load(options.model, backend, precision=options.precision).engines
        for backend in (options.backend if options.model != arithmetic.FULL_SIZE else ())
    }
    for rows in options.rows:
        shapes = arithmetic.Shapes(side, rows)
        work = arithmetic.work_of(configs, shapes, options.precision)
        report["calls"].append(measure_stages(shapes, work, ceilings, loaded))
    report["image"] = sum_picture(report["calls"][0])
    return report


def measure_stages(
    shapes: Shapes, work: dict[str, CallWork], ceilings: Ceilings, loaded: dict[str, Engines]
) -> dict[str, Any]:
    call: dict[str, Any] = {"rows": shapes.rows, "stages": {}}
    for name, each in work.items():
        floor_s = ceilings.floor_s(each.flops, each.bytes)
        call["stages"][name] = {
            "flops": each.flops,
            "bytes": each.bytes,
            "floor_s": floor_s,
            "engines": {
                backend: time_call(engines, name, shapes, floor_s)
                for backend, engines in loaded.items()
            },
        }
    return call


def time_call(engines: Engines, name: str, shapes: Shapes, floor_s: float) -> dict[str, float]:
    import torch

    from eval.measuring.ceilings import fastest
    from sdxl.engine import allocate, torch_dtype

    engine, axes = engines[name], shapes.axes(engines.arch)
    # Use random values: a GPU is faster on numbers that change few bits.
    inputs = {
        t.name: torch.randn(t.shape(axes), device=engines.device).abs().to(torch_dtype(t))
        for t in engine.spec.inputs
    }
    outputs = {t.name: allocate(t, axes, engines.device) for t in engine.spec.outputs}
    seconds = fastest(lambda: engine(inputs, outputs))
    return {"seconds": seconds, "share": floor_s / seconds}


def sum_picture(call: dict[str, Any]) -> dict[str, Any]:
    """A picture of the default steps with guidance, exact and at interval 2."""
    from eval.measuring.arithmetic import calls_a_picture

    usual, stages, images = GenerationParams(), call["stages"], call["rows"] // 2
    by_interval = {}
    for interval in (1, 2):
        deep = -(-usual.steps // interval)
        counts = calls_a_picture(deep, usual.steps - deep)
        by_interval[f"interval {interval}"] = {
            key: sum(n * stages[name][key] for name, n in counts.items()) / images
            for key in ("flops", "floor_s")
        }
    return by_interval


def table(report: dict[str, Any]) -> str:
    system, ceilings = report["system"], report["ceilings"]
    lines = [
        f"{report['model']}, {report['precision']}, {report['side']}×{report['side']}; "
        f"{', '.join(system['accelerators']) or system['processor']}, {system['threads']} threads",
        f"measured here: {ceilings['flops'] / GIGA:.1f} GFLOP/s in products, "
        f"{ceilings['bytes'] / GIGA:.1f} GB/s in a copy",
    ]
    for call in report["calls"]:
        lines.append(f"\n{call['rows']} rows")
        names = list(next(iter(call["stages"].values()))["engines"])
        head = "".join(f"{name:>22}" for name in names)
        lines.append(f"{'stage':<14}{'GFLOP':>12}{'MB':>10}{'floor ms':>13}{head}")
        lines += [stage_line(name, stage) for name, stage in call["stages"].items()]
    lines.append(f"\na picture, {GenerationParams().steps} steps with guidance, minimum")
    lines += [
        f"  {name}: {each['flops'] / GIGA:.1f} GFLOP, {1000 * each['floor_s']:.2f} ms"
        for name, each in report["image"].items()
    ]
    return "\n".join(lines)


def stage_line(name: str, stage: dict[str, Any]) -> str:
    cells = "".join(
        f"{1000 * each['seconds']:>12.2f} ms {each['share']:>6.1%}"
        for each in stage["engines"].values()
    )
    return (
        f"{name:<14}{stage['flops'] / GIGA:>12.3f}{stage['bytes'] / 1e6:>10.2f}"
        f"{1000 * stage['floor_s']:>13.3f}{cells}"
    )
