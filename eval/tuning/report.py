"""The report of a tuning: a page and JSON."""

from __future__ import annotations

from pathlib import Path

from eval.measuring.markdown import table_lines
from eval.tuning.results import CheckedPlan, TuningResult
from sdxl.files import write_atomic, write_json

STEM = "tuning"
COLUMNS = ("plan", "cost", "FID", "CLIP", "PSNR, dB")


def write_report(result: TuningResult, folder: Path) -> None:
    write_json(folder / f"{STEM}.json", result.as_dict())
    write_atomic(folder / f"{STEM}.md", page(result).encode())


def page(result: TuningResult) -> str:
    return f"""# Tuned plans beside plain choices

{result.task}, {result.pictures} pictures a plan, by `sdxl tune`. {result.note}.

Cost is that of an image's steps, as a share of the first row's; engine calls are timed by the loop.
PSNR is to the exact pictures of the same scheduler and guidance, and compares only those. A star
marks a tuned plan.

{summary(result)}
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
        f"{scores['psnr']:.1f}" if "psnr" in scores else "",
    ]


def verdicts(result: TuningResult) -> str:
    if not result.verdicts:
        return "No tuned plan is predicted to beat even caches, or none is checked yet."
    ordered = sorted(result.verdicts, key=lambda each: -each.tuned.cost_s)
    lines = [f"- {v.tuned.plan} ({result.share(v.tuned):.3f}): {v}." for v in ordered]
    paying = sum(v.pays for v in ordered)
    head = f"{paying} of {len(ordered)} tuned plans pay." if paying else "No tuned plan pays here."
    return "\n".join([head, "", *lines])


def chosen(result: TuningResult) -> str:
    plans = {name: each.plan for name, each in result.chosen.items()}
    lines = [
        f"- {name}, up to {budget_s / result.exact.cost_s:.3g}: "
        f"{plans.get(name, 'no checked plan costs so little')}"
        for name, budget_s in result.budgets_s.items()
    ]
    return "\n".join(["The plan of each quality:", "", *lines])


def summary(result: TuningResult | None) -> str:
    """The text that the command prints at its end."""
    if result is None:
        return "time is up and no plan is checked yet; rerun the same command to resume"
    return "\n\n".join((table(result), verdicts(result), chosen(result)))
