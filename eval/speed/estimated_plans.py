"""`sdxl bench floor --gpu NAME --plan …`: the estimated cost of pictures by step plans at SDXL's
full size, and the MLPerf division that allows each plan.

The arithmetic depends on the number of deep steps; seconds come from estimated_time.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.measuring.arithmetic import FULL_SIZE, Shapes, calls_a_picture, configs_of
from eval.measuring.arithmetic import work_of as work_of_model
from eval.quality.protocol import REQUEST
from eval.speed.estimated_time import GPUS, TERA, images_per_second
from eval.speed.meta_networks import PRECISIONS
from sdxl.deepcache import deep_count, plan_of
from sdxl.params import GenerationParams, InvalidParams

SIDE, ROWS = 1024, 2
"""an image with guidance has two rows"""
PLAN = re.compile(r"(?:([a-z]\w*):)?(\d{1,4})(?:/(\d{1,4})|:(\d+(?:,\d+)*))?", re.ASCII)
PLANS = (
    *("20", "15", "dpmpp_2m:15"),
    *("20:0,1,2,3,4,5,6,9,11,13,15,17,18,19", "dpmpp_2m:20:0,1,2,3,4,5,6,8,10,13,15,17,18,19"),
    *("14", "20/2", "10", "dpmpp_2m:10"),
    *("20:0,1,2,4,9,15,18,19", "dpmpp_2m:20:0,1,2,4,6,11,18,19"),
    *("9", "dpmpp_2m:9", "20/3", "7", "dpmpp_2m:7"),
    *("20:0,2,4,11,18", "dpmpp_2m:20:0,2,4,11,18", "20/4", "6", "dpmpp_2m:6"),
)
"""the plans of docs/tuning.md, the most expensive first"""
RULES = (
    "MLPerf Inference's rules, mlcommons/inference_policies at 8adac31 (29 July 2025, v5.1; SDXL "
    "left the suite with v6.0): the closed division needs the reference's model, 20 steps of "
    "EulerDiscrete, and allows no caching of values derived from activations; an open submission "
    "may change the model, and reports the accuracy that it has. DeepCache with 10 + 10 steps was "
    "one (v4.0, 2.852 samples/s on an H100)."
)


def read(text: str) -> GenerationParams:
    """Parse a plan of the command line."""
    match = PLAN.fullmatch(text)
    if match is None:
        needed = "needed [SCHEDULER:]STEPS[/INTERVAL|:I,J,…], such as 20/2 or dpmpp_2m:20:0,2,5"
        raise InvalidParams("plan", text, needed)
    scheduler, steps, interval, deep = match.groups()
    return GenerationParams(
        scheduler=scheduler or GenerationParams.scheduler,
        steps=int(steps),
        cache_interval=int(interval or 1),
        deep_steps=tuple(map(int, deep.split(","))) if deep else None,
    )


def describe(params: GenerationParams) -> str:
    caches = f"interval {params.interval}" if params.interval > 1 else "exact"
    if params.deep_steps is not None:
        caches = f"deep {','.join(map(str, params.deep_steps))}"
    return f"{params.scheduler} {params.steps}, {caches}"


def is_closed(params: GenerationParams) -> bool:
    """True if the closed division allows the plan: the reference's steps, all of them deep."""
    is_exact = deep_count(plan_of(params)) == params.steps
    return is_exact and (params.scheduler, params.steps) == (REQUEST.scheduler, REQUEST.steps)


def report(name: str, rows: int, plans: Sequence[GenerationParams]) -> dict[str, Any]:
    gpu = GPUS[name]
    work = work_of_model(configs_of(FULL_SIZE), Shapes(SIDE, ROWS), "fp16")

    def teraflops(deep: int, shallow: int) -> float:
        counts = calls_a_picture(deep, shallow)
        return sum(n * work[network].flops for network, n in counts.items()) / TERA

    full = teraflops(REQUEST.steps, 0)
    rates: dict[tuple[int, int], dict[str, float]] = {}
    rows_of_table = []
    for params in plans:
        deep = deep_count(plan_of(params))
        steps = deep, params.steps - deep
        if steps not in rates:
            rates[steps] = {each: images_per_second(gpu, each, rows, *steps) for each in PRECISIONS}
        rows_of_table.append(
            {
                "plan": describe(params),
                "deep": deep,
                "shallow": steps[1],
                "teraflops": teraflops(*steps),
                "share": teraflops(*steps) / full,
                "images_per_second": rates[steps],
                "mlperf": ["closed", "open"] if is_closed(params) else ["open"],
            }
        )
    return {"gpu": gpu.name, "rows": rows, "plans": rows_of_table, "rules": RULES}


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    rates = " | ".join(PRECISIONS)
    title = f"{report['gpu']}, {report['rows']} rows in flight"
    yield f"{title}: estimated images/s by precision"
    yield ""
    yield f"| plan | deep + shallow | TFLOP an image | of all deep | {rates} | MLPerf |"
    yield f"|{'---|' * (5 + len(PRECISIONS))}"
    for each in report["plans"]:
        speeds = " | ".join(f"{each['images_per_second'][name]:.2f}" for name in PRECISIONS)
        cells = (
            f"{each['deep']} + {each['shallow']} | {each['teraflops']:.1f} | {each['share']:.3f}"
        )
        yield f"| {each['plan']} | {cells} | {speeds} | {', '.join(each['mlperf'])} |"
    yield ""
    yield report["rules"]
