"""docs/h200.md from the reports of `sdxl bench h200`: `python -m eval.h200.page [REPORT...]`. The
figures of a later report replace those of an earlier one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.measuring.markdown import table_lines
from eval.speed.estimated_time import GAPS, USUAL_ROWS
from eval.speed.variants import COMPILED, COMPILED_CACHED, EAGER, INTERVALS

DOCS = Path(__file__).parents[2] / "docs"
REPORTS = DOCS / "h200"
RATES = {"full": 2.43, "DeepCache": 4.2}
"""the goals, in images/s"""
FULL = "ours, full, images/s at 1024² with guidance"
CACHED_RATE = "ours, DeepCache (10 + 10), images/s"
GAIN = "DeepCache over full"
OVER_EAGER = "ours full over diffusers eager"
OVER_COMPILED = "ours full over diffusers + torch.compile"
OVER_BOTH = "ours DeepCache over diffusers + torch.compile + DeepCache"
PICTURES = "fp16 pictures of the embedded model against fp32's"
BROKEN = "broken pictures among 100 random requests"
GOALS = {
    FULL: f"≥ {RATES['full']}",
    CACHED_RATE: f"≥ {RATES['DeepCache']}",
    GAIN: "≥ 1.74×",
    OVER_EAGER: "≥ 1.8×",
    OVER_COMPILED: "≥ 1.2×",
    OVER_BOTH: "≥ 1.3×",
    PICTURES: "≥ 40 dB",
    BROKEN: "0",
}
LAST = (GAPS, "sum")
NOT_YET = "not yet"
PROFILED = "interval 1"
"""a tick is then a call of the whole UNet"""
HOW = """\
```console
$ sdxl bench h200 --out out/h200                            # ten minutes; figures as they come
$ sdxl bench h200 --out out/h200-more --sections rtx_full   # TensorRT-RTX at full size, apart
$ python -m eval.h200.page docs/h200/*.json > docs/h200.md  # reports in the order of their names
```

The weights are random, of Stable Diffusion XL's full size: speed does not depend on them.
`--dry-run` runs the same code on a CPU with the embedded model, for the tests; its figures mean
nothing. It needs the `dev` extra (DeepCache, diffusers) and, for the section `rtx`, `tensorrt-rtx`.
"""
RECORDS = """\
The goals come from MLCommons' published results of MLPerf Inference, Stable Diffusion XL, Offline,
for each GPU: 2.431 samples/s on an H200 in the closed division (v5.0 and v5.1, TensorRT, FP8, no
caching); 2.852 on an H100 in the open division (v4.0, DeepCache with 10 deep and 10 shallow steps,
INT8), 1.737 times its submitter's closed result. The floors of arithmetic alone, an image without
and with reuse: 353 and 189 ms in fp16 at 790 TFLOP/s, 149 and 84 ms with the steps in 8 bits at
1979 and text encoders and decoder in fp16.
"""


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    measured = [report for report in reports if not report["is_dry"]]
    sections = merged(measured)
    lines = ["# On an H200", ""]
    lines += _measured(measured, sections) if measured else _nothing()
    lines += ["## How to measure", "", HOW, "## The goals", "", RECORDS]
    return "\n".join(lines).rstrip() + "\n"


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, found in report["sections"].items():
            sections.setdefault(name, {}).update(found)
    return sections


def _nothing() -> Iterator[str]:
    yield "**Nothing is measured yet.** Every line below waits for a run on an H200."
    yield ""
    yield from _goals({})
    yield ""


def _goals(found: Mapping[str, str]) -> Iterator[str]:
    rows = [[goal, needed, found.get(goal, NOT_YET)] for goal, needed in GOALS.items()]
    yield from table_lines(["to show", "needed", "measured"], rows)


def _measured(
    reports: Sequence[Mapping[str, Any]], sections: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for number, report in enumerate(reports, 1):
        system = report["system"]
        where = f"{', '.join(system['accelerators'])}, torch {system['packages']['torch']}"
        command, note = report.get("command", "sdxl bench h200"), report.get("note", "all of it")
        yield f"{number}. {where}, `{command}`: {note}"
    yield ""
    yield from _goals(reached(sections))
    yield from ("", *_speeds(sections), "", *_groups(reports), "", *_errors(sections), "")
    yield from (f"- {line}" for report in reports for line in report.get("remarks", ()))
    yield from ("", "Skipped or failed:", "")
    yield from _passed_over(sections)
    yield ""


def ours(sections: Mapping[str, Any], interval: int, what: str = "images/s") -> dict[str, Any]:
    """Our figures by precision."""
    figures = sections.get("peers", {}).get("figures", {}).get(what, {})
    ending = f", interval {interval}"
    return {
        name.removeprefix("ours, torch ").removesuffix(ending): value
        for name, value in figures.items()
        if name.startswith("ours, torch ") and name.endswith(ending)
    }


def reached(sections: Mapping[str, Any]) -> dict[str, str]:
    """The measured values of the goals, by the fastest precision."""
    found: dict[str, str] = {}
    rates = {interval: ours(sections, interval) for interval in INTERVALS}
    full, cached = (best(each) for each in rates.values())
    if not full or not cached:
        return found
    found[FULL] = f"{_spread(rates[1][full])} in {full}"
    found[CACHED_RATE] = f"{_spread(rates[2][cached])} in {cached}"
    gains = {p: rates[2][p]["median"] / rate["median"] for p, rate in rates[1].items()}
    found[GAIN] = ", ".join(f"{gain:.2f}× in {p}" for p, gain in gains.items())
    peers = {
        name: value["median"]
        for section in ("peers", "peers_compiled")
        for name, value in sections.get(section, {}).get("figures", {}).get("images/s", {}).items()
    }
    for goal, peer, rate in (
        (OVER_EAGER, EAGER, rates[1][full]),
        (OVER_COMPILED, COMPILED, rates[1][full]),
        (OVER_BOTH, COMPILED_CACHED, rates[2][cached]),
    ):
        if peer in peers:
            found[goal] = f"{rate['median'] / peers[peer]:.2f}×"
    pictures = sections.get("pictures", {}).get("fp16")
    if pictures:
        found[PICTURES] = f"at least {pictures['least']:.1f} dB"
    requests = {n: v for n, v in sections.get("requests", {}).items() if isinstance(v, Mapping)}
    if requests:
        found[BROKEN] = ", ".join(f"{v['broken']} in {n}" for n, v in requests.items())
    return found


def best(rates: Mapping[str, Mapping[str, float]]) -> str:
    return max(rates, key=lambda name: rates[name]["median"], default="")


def _speeds(sections: Mapping[str, Any]) -> Iterator[str]:
    columns = ("images/s", "seconds", "joules an image")
    both = [sections.get(name, {}).get("figures", {}) for name in ("peers", "peers_compiled")]
    found = {
        column: {k: v for each in both for k, v in each.get(column, {}).items()}
        for column in columns
    }
    yield from table_lines(
        [f"{sections.get('peers', {}).get('batch', '')} pictures together", *columns],
        [[n, *(_spread(found[c].get(n)) for c in columns)] for n in found["images/s"]],
    )


def _spread(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    digits = 0 if value["median"] >= 100 else 2
    low, median, high = (f"{value[key]:.{digits}f}" for key in ("low", "median", "high"))
    return f"{median} ({low} to {high})"


def _groups(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Measured milliseconds of the whole UNet by group; columns name the report."""
    columns: dict[str, Mapping[str, float]] = {}
    for number, report in enumerate(reports, 1):
        for name, value in report["sections"].get("profile", {}).items():
            precision, _, rest = name.partition(", ")
            if rest == PROFILED and "ms_by_group" in value:
                columns[f"{precision} ({number})"] = value["ms_by_group"]
    columns = dict(sorted(columns.items(), key=lambda column: column[0].split()[0]))
    names = list(dict.fromkeys(group for each in columns.values() for group in each))
    names = [*sorted(n for n in names if n not in LAST), *(n for n in LAST if n in names)]
    yield from table_lines(
        [f"ms of a call of the whole UNet, {USUAL_ROWS} rows", *columns],
        [[n, *(f"{each.get(n, 0.0):.1f}" for each in columns.values())] for n in names],
    )


def _errors(sections: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, found in sections.get("agreement", {}).items():
        if isinstance(found, Mapping):
            model, precision = name.rsplit(", ", 1)
            steps = found["by_step"]
            pictures = sections.get("pictures", {}).get(precision)
            decibels = (
                [f"{pictures['least']:.1f} to {max(pictures['psnr_db']):.1f}"] if pictures else [""]
            )
            share = f"{min(steps):.4f} to {max(steps):.4f}"
            rows.append(
                [f"{model}, {precision}", share, f"{found['final_latents']:.4f}", *decibels]
            )
    head = ["against float32", "each step's noise, relative L2", "final latents", "pictures, dB"]
    yield from table_lines(head, rows)


def _passed_over(sections: Mapping[str, Any]) -> Iterator[str]:
    for name, found in sections.items():
        for key, value in found.items():
            if key.startswith(("passed over", "failed", "error")):
                yield f"- {name}, {key}: `{value}`"


def main(argv: Sequence[str]) -> int:
    reports = [json.loads(Path(each).read_text(encoding="utf-8")) for each in argv]
    sys.stdout.write(page(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
