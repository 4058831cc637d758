"""docs/h200.md from what `sdxl bench h200` wrote: `python -m eval.h200.page [h200.json]`.

Without a report, or with a dry run's, it says that nothing was measured and how to measure. It
computes no figure but ratios of those in the report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.measuring.markdown import table_lines
from eval.speed.paper_time import table
from eval.speed.variants import INTERVALS, name_of

EXPECTED = Path(__file__).parents[2] / "docs" / "h200_expected.json"
RATES = {"full": 2.43, "DeepCache": 4.2}
"""images/s that are to be reached"""
GOALS = (
    ("ours, full, images/s at 1024² with guidance", f"≥ {RATES['full']}"),
    ("ours, DeepCache (10 + 10), images/s", f"≥ {RATES['DeepCache']}"),
    ("DeepCache over full", "≥ 1.74×"),
    ("ours full over diffusers eager", "≥ 1.8×"),
    ("ours full over diffusers + torch.compile", "≥ 1.2×"),
    ("ours DeepCache over diffusers + torch.compile + DeepCache", "≥ 1.3×"),
    ("fp16 pictures of the embedded model against fp32's", "≥ 40 dB"),
    ("broken pictures among 100 random requests", "0"),
)
HOW = """\
```console
$ sdxl bench h200 --out out/h200                            # ten minutes; figures as they come
$ sdxl bench h200 --out out/h200-more --sections rtx_full   # TensorRT-RTX at full size, apart
$ python -m eval.h200.page out/h200/h200.json > docs/h200.md
```

The weights are random, of Stable Diffusion XL's full size, drawn on the GPU: speed does not depend
on them. `--dry-run` walks the same paths on a CPU with the embedded model, for the tests; its
figures mean nothing. Needed beside the package: its `dev` extra (DeepCache, diffusers) and, for the
section `rtx`, `tensorrt-rtx`.
"""
RECORDS = """\
The goals come from MLCommons' published results of MLPerf Inference, Stable Diffusion XL, Offline,
for each GPU: 2.431 samples/s on an H200 in the closed division (v5.0 and v5.1, TensorRT, FP8, no
caching); 2.852 on an H100 in the open division (v4.0, DeepCache with 10 deep and 10 shallow steps,
INT8), 1.737 times its submitter's closed result. The floors of arithmetic alone, an image without
and with reuse: 353 and 189 ms in fp16 at 790 TFLOP/s, 149 and 84 ms with the steps in 8 bits at
1979 and text encoders and decoder in fp16.
"""


def page(report: Mapping[str, Any] | None) -> str:
    is_measured = report is not None and not report["is_dry"]
    lines = ["# On an H200", ""]
    lines += _measured(report) if is_measured and report is not None else _nothing()
    lines += [*_expected(), ""]
    lines += ["## How to measure", "", HOW, "## What it is held against", "", RECORDS]
    return "\n".join(lines).rstrip() + "\n"


def _nothing() -> Iterator[str]:
    yield "**Nothing here has been measured yet.** No H200 has run this code: the backend, its"
    yield "kernels and the benchmark were tested on a CPU alone. Every line below waits for a run."
    yield ""
    yield from table_lines(
        ["to show", "needed", "measured"], [[*goal, "not yet"] for goal in GOALS]
    )
    yield ""


def _expected() -> Iterator[str]:
    yield from ("## On paper", "")
    yield "Not measured: what the code starts for a picture of 1024×1024, by rates that others"
    yield "measured. To renew it:"
    yield "`sdxl bench floor --gpu h200 --rows 2 8 16 32 --json > docs/h200_expected.json`."
    yield ""
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    yield from (against_goal(kind, expected["images_per_second"]) for kind in RATES)
    yield ""
    yield from table(expected)


def against_goal(kind: str, rates: Mapping[str, Mapping[str, float]]) -> str:
    most = max(
        rate for name, each in rates.items() if name.endswith(kind) for rate in each.values()
    )
    verdict = "misses" if most < RATES[kind] else "reaches"
    return (
        f"- {kind}: at most {most:.2f} images/s on paper, which {verdict} the goal of {RATES[kind]}"
    )


def _measured(report: Mapping[str, Any]) -> Iterator[str]:
    system, sections = report["system"], report["sections"]
    yield f"{', '.join(system['accelerators'])}; torch {system['packages']['torch']}; command:"
    yield f"`sdxl bench h200`, budget {report['budget_s']:.0f} s."
    yield from ("", *table_lines(["to show", "needed"], GOALS))
    yield ""
    for name, found in sections.items():
        yield from (f"## {name}", "")
        if "figures" in found:
            yield from (*_compared(found["figures"]), "")
        yield from _listed(found)
        yield ""


def _compared(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    columns = {what: _by_variant(values) for what, values in figures.items()}
    names = list(figures["seconds"])
    yield from table_lines(
        ["variant", *columns],
        [[name, *(_spread(values.get(name)) for values in columns.values())] for name in names],
    )


def _by_variant(values: Mapping[str, Any]) -> dict[str, Any]:
    """What compares the intervals of a backend and precision belongs to the larger interval."""
    larger = INTERVALS[-1]
    return {name_of(n, larger) if ":" in n else n: value for n, value in values.items()}


def _spread(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def _listed(found: Mapping[str, Any]) -> Iterator[str]:
    """Whatever else a section found, a line each; errors in full, but not their tracebacks."""
    for key, value in found.items():
        if key not in ("figures", "traceback"):
            yield f"- {key}: `{json.dumps(value, ensure_ascii=False)}`"


def main(argv: Sequence[str]) -> int:
    report = json.loads(Path(argv[0]).read_text(encoding="utf-8")) if argv else None
    sys.stdout.write(page(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
