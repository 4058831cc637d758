"""What a tuning found, as a person reads it: a page and JSON. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.measuring.markdown import table_lines
from eval.tuning.checks import RIGHT, CheckedPlan
from eval.tuning.result import TuningResult
from eval.tuning.tuned_course import TunedCourse
from sdxl.files import write_atomic, write_json

STEM = "tuning"
COLUMNS = ("plan", "cost", "FID", "CLIP", "pixel judge", "PSNR, dB")


def write_report(result: TuningResult, folder: Path) -> None:
    write_json(folder / f"{STEM}.json", result.as_dict())
    write_atomic(folder / f"{STEM}.md", page(result).encode())


def page(result: TuningResult) -> str:
    return f"""# Tuned plans beside plain choices

![cost against FID, CLIP and PSNR]({STEM}.png)

{result.task}, {result.pictures} pictures a plan, by `sdxl tune`. {result.note}.

Cost is that of an image's steps, as a share of the first row's; engine calls are timed by the loop.
PSNR is to the exact pictures of the same scheduler and guidance, and compares only those. A star
marks a tuned plan.

{table(result)}

## Does it pay?

A tuned plan pays where no score is clearly worse than that of the strongest plain choice at its
cost, and either a score is clearly better or its pictures are clearly nearer to the exact ones than
the nearest plain choice's. Clearly: the 95% interval of the paired difference leaves out zero.

{verdicts(result)}

{chosen(result)}

## How well single steps predict

{predictions(result.tuned)}
"""


def table(result: TuningResult) -> str:
    rest = sorted(result.checked[1:], key=lambda each: -each.cost_s)
    rows = (_cells(each, result) for each in [result.exact, *rest])
    return "\n".join(table_lines(COLUMNS, rows))


def _cells(each: CheckedPlan, result: TuningResult) -> list[str]:
    scores = each.scores
    return [
        f"{'' if each.plan.has_even_caches else '★ '}{each.plan}",
        f"{result.share(each):.3f}",
        f"{scores['FID']:.4f}",
        f"{scores['clip']:.3f}",
        f"{scores[RIGHT]:.1%}" if RIGHT in scores else "",
        f"{scores['psnr']:.1f}" if "psnr" in scores else "",
    ]


def verdicts(result: TuningResult) -> str:
    if not result.verdicts:
        return "No tuned plan was found that is better than even caches, or none was checked yet."
    found = sorted(result.verdicts, key=lambda each: -each.tuned.cost_s)
    lines = [f"- {v.tuned.plan} ({result.share(v.tuned):.3f}): {v.told()}." for v in found]
    paying = sum(v.pays for v in found)
    said = f"{paying} of {len(found)} tuned plans pay." if paying else "No tuned plan pays here."
    return "\n".join([said, "", *lines])


def chosen(result: TuningResult) -> str:
    lines = [
        f"- {name}, up to {budget_s / result.exact.cost_s:.3g}: "
        + (
            str(result.chosen[name].plan)
            if name in result.chosen
            else "nothing checked costs so little"
        )
        for name, budget_s in result.budgets_s.items()
    ]
    return "\n".join(["What each quality should stand for:", "", *lines])


def predictions(tuned: Sequence[TunedCourse]) -> str:
    lines = []
    for each in tuned:
        if (prediction := each.prediction) is None:
            continue
        adds = "independent errors" if prediction.power == 2 else "errors that point the same way"
        lines.append(
            f"- {each.course}: {len(each.trials.errors)} plans tried to the end; they add up as "
            f"{adds}, and predictions are off by a factor of {2**prediction.misfit:.2f}."
        )
    return "\n".join(lines)


def told(result: TuningResult | None) -> str:
    """At the end of a command."""
    if result is None:
        return "time was up before anything was checked; the same command goes on"
    return "\n\n".join((table(result), verdicts(result), chosen(result)))
