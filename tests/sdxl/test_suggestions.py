"""The nearest names in refusals; the usual flags in --help; other programs' parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module

import pytest

from sdxl import cli
from sdxl.arguments import HELP_FLAGS, Parser
from sdxl.parameter import InvalidParams
from sdxl.params import BY_NAME, PARAMETERS, GenerationParams, Parameter, renamed
from sdxl.scheduler_names import OTHER_NAMES, SCHEDULERS, full_label
from sdxl.suggestions import did_you_mean, nearest

SHORT = {
    "render": "serve.render.command",
    "batch": "serve.batch.command",
    "eval": "eval.command",
    "bench mlperf": "eval.mlperf.command",
    "serve": "serve.settings",
}
"""commands with a short --help, and the list of their usual flags"""
FEW = 16


def help_of(line: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*line.split(), flag])
    return capsys.readouterr().out


def flags_in(page: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w[ A-Z]*, )?(--[a-z-]+)", page, re.M)) - {*HELP_FLAGS}


def test_case_and_dashes_do_not_matter() -> None:
    assert nearest("Num-Inference-Step", ["steps", "num_inference_steps"]) == [
        "num_inference_steps"
    ]
    assert did_you_mean("zzz", ["steps"]) == "" == did_you_mean(5, ["steps"])


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("rendr", "got 'rendr'; did you mean render?"),
        ("render a --step 5", "--step is not a flag of sdxl render; did you mean --steps?"),
        ("serve --prot 80", "--prot is not a flag of sdxl serve; did you mean --port?"),
        ("render a --scheduler dpm2m", "got 'dpm2m'; did you mean dpmpp_2m?"),
        ("render a --quality hi", "got 'hi'; did you mean high?"),
        ("render a --backend onxruntime", "got 'onxruntime'; did you mean onnxruntime?"),
        ("serve --backend tensort", "got 'tensort'; did you mean tensorrt?"),
        ("build --onnx a --backend tensort-rtx", "got 'tensort-rtx'; did you mean tensorrt-rtx?"),
        ("bench flor", "got 'flor'; did you mean floor?"),
        ("render a --zzzz", "--zzzz is not a flag of sdxl render; --help-all lists them"),
        ("key a b", "argument 'b' must be left out; sdxl key --help lists all"),
    ],
)
def test_an_unknown_name_has_the_nearest_one_beside_it(
    line: str, end: str, refused_early: Callable[..., str]
) -> None:
    assert refused_early(*line.split()).rstrip().endswith(end)


@pytest.mark.parametrize(("line", "module"), SHORT.items())
def test_help_shows_the_usual_flags_and_help_all_every_flag(
    line: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = set(import_module(module).COMMON_FLAGS)
    short, whole = (help_of(line, flag, capsys) for flag in ("--help", "--help-all"))
    assert flags_in(short) == common, "a usual flag is not there, or another one is"
    assert len(common) <= FEW and common < flags_in(whole)
    assert "--help-all" in short


def test_a_command_of_few_flags_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = (help_of("key", flag, capsys) for flag in ("--help", "--help-all"))
    assert short == whole and "--help-all" not in short


def test_underscores_in_flags_are_dashes() -> None:
    parser = Parser()
    parser.add_argument("--cache-interval")
    parser.add_argument("prompt", nargs="?")
    assert parser.parse_args(["--cache_interval=a_b"]).cache_interval == "a_b"
    assert parser.parse_args(["--", "--a_prompt"]).prompt == "--a_prompt"


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ("DPM++ 2M Karras", "dpmpp_2m_karras"),
        ("dpm++ 2m sde exponential", "dpmpp_2m_sde_exponential"),
        ("Euler a", "euler_a"),
        ("euler_ancestral", "euler_a"),
        ("k_euler", "euler"),
        ("EulerDiscreteScheduler", "euler"),
        ("DPMSolverMultistepScheduler", "dpmpp_2m"),
        ("Euler SGM Uniform", "euler_trailing"),
    ],
)
def test_other_programs_names_of_schedulers_are_ours(other: str, ours: str) -> None:
    assert GenerationParams("a", scheduler=other).scheduler == ours


def test_no_other_name_stands_for_two_schedulers() -> None:
    assert all(OTHER_NAMES[name] == name for name in SCHEDULERS)
    assert all(OTHER_NAMES[full_label(name).lower()] == name for name in SCHEDULERS)
    assert len({full_label(name) for name in SCHEDULERS}) == len(SCHEDULERS)


def test_no_name_stands_for_two_parameters() -> None:
    names = [name for each in PARAMETERS.values() for name in each.names]
    assert len(names) == len(set(names)) == len(BY_NAME)


def test_other_names_become_ours_once() -> None:
    def name_of(each: Parameter) -> str:
        return each.name

    given = {"num_inference_steps": 5, "cfg_scale": 3.0, "colour": "red"}
    assert renamed(given, name_of) == {"steps": 5, "guidance": 3.0, "colour": "red"}
    for twice in ({"steps": 5, "num_inference_steps": 5}, {"cfg": 1, "cfg_scale": 1}):
        with pytest.raises(InvalidParams, match="must not be set beside"):
            renamed(twice, name_of)
