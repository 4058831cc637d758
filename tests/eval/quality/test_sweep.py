"""The settings of a sweep, their Pareto front, and the presets chosen from them."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.folders.export_folder import ExportError
from eval.measuring.bootstrap import Interval
from eval.measuring.timing import Spread
from eval.quality import sweep
from eval.quality.evaluation import Figure
from eval.quality.pareto import QualitySetting, Tried, change, front, table
from eval.quality.plot import plot_pareto
from eval.quality.presets import choose_presets
from eval.quality.sweep import EXACT, read_settings
from eval.quality.task import embedded_task
from eval.tuning.plans import CachePlan, SamplingSpec
from sdxl.checkpoint import find
from sdxl.params import GenerationParams, InvalidParams
from sdxl.presets import Preset
from tests.tools import ROOT


def tried(setting: QualitySetting, speed: float, fid: float, clip: float) -> Tried:
    scores = {"FID": fid, "CLIP": clip}
    figures = {name: Figure(value, Interval(value, value)) for name, value in scores.items()}
    resamples = {name: value * SPREAD for name, value in scores.items()}
    return Tried(setting, figures, Spread(speed, speed, speed), resamples)


SPREAD = torch.linspace(0.9, 1.1, 41, dtype=torch.float64)
TUNING = ROOT / "docs" / "tuning.json"
EXAMPLES = [
    tried(EXACT, 1.0, 10.0, 30.0),
    tried(QualitySetting(cache_interval=2), 2.0, 10.1, 30.0),
    tried(QualitySetting(cache_interval=3), 3.0, 11.0, 29.0),
    tried(QualitySetting("int8", 1), 1.5, 10.5, 29.9),
]


def test_the_exact_model_is_first_and_no_setting_is_repeated() -> None:
    settings = read_settings(None)
    assert settings[0] == EXACT and len(set(settings)) == len(settings)
    assert {s.precision for s in settings} == {"fp32", "fp16", "int8", "fp8"}
    assert {s.cut for s in settings} == {"reference", "fresh_skips"}


def test_a_grid_is_a_product(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps([{"precision": ["fp32", "int8"], "cache_interval": [1, 2]}]))
    settings = [(s.precision, s.cache_interval) for s in read_settings(str(path))]
    assert settings == [("fp32", 1), ("fp32", 2), ("int8", 1), ("int8", 2)]
    path.write_text("[1, 2]")
    with pytest.raises(InvalidParams, match="grid must hold JSON such as"):
        read_settings(str(path))
    path.write_text('[{"speed": [1]}]')
    with pytest.raises(InvalidParams, match="grid must have known settings .*speed"):
        read_settings(str(path))


@pytest.mark.parametrize(
    ("has_gpu", "grid", "message"),
    [
        (
            False,
            {"precision": ["int9"]},
            "precision must be one of fp32, fp16, int8, fp8.*, got 'int9'",
        ),
        (False, {"precision": ["bf16"]}, "precision must be one of fp32.*, got 'bf16'"),
        (True, {"precision": ["bf16"]}, None),
        (False, {"steps": [20, 0]}, "steps must be .*, got 0"),
        (False, {"scheduler": ["eule"]}, "scheduler must be one of .*, got 'eule'"),
        (False, {"cut": ["fresh"]}, "cut must be one of reference, fresh_skips.*, got 'fresh'"),
        (True, {"precision": ["int8"], "cut": ["fresh_skips"]}, "cut must be reference, the"),
        (False, {"precision": ["int8"], "cut": ["fresh_skips"]}, None),
    ],
)
def test_settings_that_this_machine_cannot_measure_are_refused(
    has_gpu: bool,
    grid: dict[str, object],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    path = tmp_path / "grid.json"
    path.write_text(json.dumps([grid]))
    with pytest.raises(InvalidParams, match=message) if message else nullcontext():
        assert len(read_settings(str(path))) == 2


class Sweep:
    """`run_sweep` on a simulated GPU that makes no pictures. Engines of `missing` do not load, and
    pictures of `failing` fail."""

    def __init__(self, patch: pytest.MonkeyPatch, out: Path, missing: str, failing: str) -> None:
        self.events: list[tuple[str, str]] = []
        self.missing, self.failing, self.out = missing, failing, out
        patch.setattr(torch.cuda, "is_available", lambda: True)
        task = embedded_task({}, 8)
        patch.setattr(sweep, "read_task", lambda _: (task, find("mini")))
        patch.setattr(sweep, "Pipeline", lambda checkpoint, engines: engines)
        for name in ("load_engines", "evaluate", "write_report"):
            patch.setattr(sweep, name, getattr(self, name))

    def run(self, **options: object) -> list[str]:
        """Return the precisions in the order of their evaluation."""
        usual = {"grid": None, "tuned": None, "bootstrap": 1, "stores_presets": False}
        sweep.run_sweep(Namespace(**usual | {"out": str(self.out)} | options))
        return [precision for what, precision in self.events if what == "painted"]

    def load_engines(self, checkpoint: object, options: object, root: Path, *key: str) -> str:
        self.events.append(("loaded", key[0]))
        if key[0] == self.missing:
            raise ExportError(f"no {key[0]} export")
        return key[0]

    def evaluate(self, setting: QualitySetting, *_: object) -> Tried:
        self.events.append(("painted", setting.precision))
        if setting.precision == self.failing:
            raise RuntimeError("out of memory")
        return tried(setting, 1.0, 10.0, 30.0)

    def write_report(self, *_: object) -> None:
        pass


def test_a_precision_without_engines_is_left_out_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Sweep(monkeypatch, tmp_path, missing="fp8", failing="")
    painted = run.run()
    assert set(painted) == {"fp32", "fp16", "int8"} and len(painted) == len(read_settings(None)) - 2
    refused = run.events.index(("loaded", "fp8"))
    assert all(what == "loaded" for what, _ in run.events[:refused])
    assert "fp8 is left out: no fp8 export" in capsys.readouterr().out


def test_presets_are_stored_after_the_last_plain_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Sweep(monkeypatch, tmp_path, missing="", failing="int8")
    with pytest.raises(RuntimeError, match="out of memory"):
        run.run()
    stored = json.loads((tmp_path / "presets.json").read_text())
    assert set(stored["presets"]) == {"low", "medium", "high"}
    assert stored["model_digest"] == find("mini").digest


def test_a_read_only_model_folder_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Sweep(monkeypatch, tmp_path / "out", missing="", failing="")
    (tmp_path / "file").touch()
    model = replace(find("mini"), folder=tmp_path / "file" / "model")
    task = embedded_task({}, 8)
    monkeypatch.setattr(sweep, "read_task", lambda _: (task, model))
    message = r"store_presets must be .*copy .*out/presets\.json.*file/model"
    with pytest.raises(InvalidParams, match=message):
        run.run(stores_presets=True)
    assert not run.events


def test_tuned_plans_are_settings_that_make_the_same_requests(tmp_path: Path) -> None:
    settings = read_settings(None, str(TUNING))
    tuned = [each for each in settings if each.deep_steps is not None]
    verdicts = json.loads(TUNING.read_text())["verdicts"]
    stored = [verdict["plan"] for verdict in verdicts]
    plans = [CachePlan(SamplingSpec(**p["course"]), tuple(p["deep_steps"])) for p in stored]
    given = GenerationParams(seed=3)
    assert len(tuned) == len(plans) == 12 and len({each.slug for each in settings}) == len(settings)
    for setting, plan in zip(tuned, plans, strict=True):
        request = setting.apply_to(given)
        assert request == replace(plan.apply_to(given), guided_steps=request.guided_steps)
    path = tmp_path / "tuning.json"
    path.write_text('{"verdicts": [{}]}')
    with pytest.raises(InvalidParams, match="tuned must be the tuning.json of `sdxl tune`"):
        read_settings(None, str(path))


def test_a_tuned_plan_is_not_chosen_as_a_preset() -> None:
    tuned = QualitySetting(steps=10, deep_steps=(0, 4), guided_until=0.6)
    assert str(tuned) == "fp32, deep 0,4, euler 10, guided to 0.6"
    with pytest.raises(
        InvalidParams, match="grid must hold settings of the usual precision and scheduler"
    ):
        choose_presets([tried(tuned, 1, 10, 30)])


def test_the_front_and_the_changes_from_the_exact_model() -> None:
    intervals = [tried.setting.cache_interval for tried in front(EXAMPLES)]
    assert intervals == [3, 2, 1], "no other setting beats these"
    changes = change(EXAMPLES[1], EXAMPLES[0])
    assert changes.fid == pytest.approx(0.01) and changes.clip == 0 and changes.is_within
    assert not change(EXAMPLES[2], EXAMPLES[0]).is_within


@pytest.mark.slow
def test_the_table_and_the_plot(tmp_path: Path) -> None:
    text = table(EXAMPLES)
    assert text.splitlines()[2].startswith("| ★ fp32, interval 1") and text.count("\n") == 5
    plot_pareto(EXAMPLES, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


ROW = re.compile(
    r"fp32, interval (?P<interval>\d), euler (?P<steps>\d+) \| (?P<speed>[\d.]+) .*?\| "
    r"(?P<fid>[\d.]+) \|.*?\| (?P<clip>[\d.]+) \|"
)


def plain(steps: int, interval: int, speed: float, fid: float, clip: float = 30.0) -> Tried:
    return tried(QualitySetting(steps=steps, cache_interval=interval), speed, fid, clip)


def published() -> list[Tried]:
    """Return the plain settings of docs/quality.md, the exact model first."""
    page = (ROOT / "docs" / "quality.md").read_text()
    rows = (row.groupdict() for row in ROW.finditer(page))
    return [
        plain(int(r["steps"]), int(r["interval"]), *(float(r[k]) for k in ("speed", "fid", "clip")))
        for r in rows
    ]


def test_the_embedded_models_presets_follow_from_its_published_sweep() -> None:
    sweep = published()
    assert sweep[0].setting == EXACT and len(sweep) == 12
    assert choose_presets(sweep) == find("mini").presets


def chosen(*sweep: Tried) -> list[Preset]:
    presets = choose_presets([EXAMPLES[0], *sweep])
    return [presets[name] for name in ("low", "medium", "high")]


def test_settings_outside_the_gates_are_no_presets() -> None:
    outside, best = plain(10, 1, 9, 12), plain(50, 1, 0.5, 9.85, 30.03)
    presets = chosen(outside, plain(30, 2, 2, 9.9, 30.01), best)
    assert presets == [Preset(30, 2), Preset(30, 2), Preset(50, 1)]
    assert chosen() == [Preset(20, 1)] * 3, "a single setting is all three"


def test_a_higher_quality_is_slower_and_nearer() -> None:
    settings = plain(20, 3, 9.5, 10.15), plain(20, 2, 7, 10.1), plain(30, 3, 6, 10.12)
    assert chosen(*settings) == [Preset(20, 3), Preset(20, 2), Preset(20, 1)]
    without_gain = plain(20, 2, 2, 10.1), plain(30, 2, 1.5, 10.1), plain(50, 1, 0.4, 10.05)
    assert chosen(*without_gain) == [Preset(20, 2), Preset(20, 2), Preset(20, 1)]
