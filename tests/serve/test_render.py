"""`sdxl render` on a fake pipeline: flags, files, metadata, JSON lines and errors."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

import engines
from sdxl import cli, images
from sdxl.adapters import Use
from sdxl.catalogue import DIFFUSERS_FILE, Catalogue
from sdxl.checkpoint import find
from sdxl.noise import NoiseSource
from sdxl.params import GenerationParams, InvalidParams, Sizes
from sdxl.pipeline import Forming, Result
from sdxl.places import LORAS
from tests.fakes import FakeShelf

DEFAULTS = GenerationParams()
Capture = pytest.CaptureFixture[str]


class FakePipeline:
    """Its picture depends only on the seed. The prompt "broken" fails, and "overflow" gives NaN."""

    sizes = Sizes(default=64, minimum=32, maximum=128)
    checkpoint = find("mini")
    catalogue = Catalogue([LORAS])

    def __init__(self) -> None:
        self.asked: list[GenerationParams] = []

    def resolve(self, params: GenerationParams) -> GenerationParams:
        return params.resolve(self.sizes, lambda: 0)

    def check(self, params: GenerationParams) -> GenerationParams:
        if params.prompt == "too long":
            raise InvalidParams("prompt", "1300 tokens", "must be at most 225")
        return self.resolve(params)

    def uses(self, params: GenerationParams) -> list[Use]:
        return [(self.catalogue.find("lora", each.name), 1.0, 1.0) for each in params.loras or ()]

    def stream(
        self,
        requests: list[GenerationParams],
        on_tick: Callable[[int], object],
        on_forming: Callable[[Forming], None] | None,
    ) -> Iterator[Result]:
        self.asked = requests
        for index, params in reversed(list(enumerate(requests))):
            on_tick(params.steps)
            yield self.result(index, params)

    def result(self, index: int, params: GenerationParams) -> Result:
        assert params.seed is not None and params.height and params.width
        if params.prompt == "broken":
            return Result(index, params, error=RuntimeError("the engine broke"))
        source = NoiseSource(params.seed, (3, params.height, params.width))
        picture = torch.full_like(source.start(), torch.nan if params.prompt == "overflow" else 0.5)
        timings = {"encode_s": 0.1, "denoise_s": 1.0, "decode_s": 0.2}
        image = picture * torch.rand(3, 1, 1, generator=torch.Generator().manual_seed(params.seed))
        files = FakeShelf().lease(self.uses(params)).facts
        latents = picture[:, ::8, ::8]
        return Result(index, params, image, latents, None, timings, 10, 10, files=files)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePipeline:
    fake = FakePipeline()
    monkeypatch.setattr(engines, "load", lambda **_: fake)
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


def render_json(capsys: Capture, *argv: str) -> list[dict[str, Any]]:
    code = cli.main(["render", *argv, "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_defaults_are_the_dataclass_s(pipeline: FakePipeline, capsys: Capture) -> None:
    (facts,) = render_json(capsys, "a ring")
    (asked,) = pipeline.asked
    filled: dict[str, Any] = {"width": 64, "height": 64, "seed": asked.seed, "cache_interval": 2}
    assert asked == GenerationParams("a ring", **filled)
    assert facts["file"] == f"out/a-ring-{asked.seed}.png" and Path(facts["file"]).exists()


def test_json_has_every_parameter_and_time(pipeline: FakePipeline, capsys: Capture) -> None:
    flags = "--steps 8 --guidance 2.5 --seed 3 --width 96 --height 40 --scheduler ddim"
    flags += " --negative-prompt grey --cache-interval 3 --deep-steps 0,5"
    (facts,) = render_json(capsys, "a ring", *flags.split())
    assert facts == {
        "file": "out/a-ring-3.png", "index": 0, "model": "sdxl-mini", "backend": "auto",
        "prompt": "a ring", "negative_prompt": "grey", "width": 96, "height": 40, "steps": 8,
        "guidance": 2.5, "seed": 3, "scheduler": "ddim", "cache_interval": 3, "deep_plan": [0, 5],
        "encode_s": 0.1, "denoise_s": 1.0, "decode_s": 0.2, "deep_steps": 10, "shallow_steps": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image", "none.png"], "image must be a readable file .*No such file"),
        (["--image", "text.png"], "image must be a PNG, JPEG or WEBP file"),
        (["--mask", "text.png"], "mask needs --image"),
        (["--strength", "0.5"], "strength needs an image to edit"),
        (["--image", "red.png", "--strength", "0.01"], "strength must be .*to take one"),
        (["--image", "red.png", "--mask-blur", "4"], "mask_blur needs a mask"),
    ],
)
def test_a_wrong_image_is_found_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(engines, "load")
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    (tmp_path / "text.png").write_text("not a picture")
    Image.new("RGB", (64, 64), "red").save("red.png")
    assert cli.main(["render", "a ring", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_image_i_of_n_uses_seed_plus_i(pipeline: FakePipeline, capsys: Capture) -> None:
    facts = render_json(capsys, "a", "b", "--n", "3", "--seed", "7")
    pairs = {fact["index"]: (fact["prompt"], fact["seed"]) for fact in facts}
    assert pairs == dict(enumerate((prompt, seed) for prompt in "ab" for seed in (7, 8, 9)))
    assert len({fact["file"] for fact in facts}) == 6


def test_a_random_seed_is_reported_and_counted_up_for_n_images(
    pipeline: FakePipeline, capsys: Capture
) -> None:
    assert cli.main(["render", "a ring", "--n", "2"]) == 0
    out = capsys.readouterr().out
    first, second = (request.seed for request in pipeline.asked)
    assert first is not None and second == first + 1
    assert f"seed {first}" in out and f"seed {second}" in out


def test_an_empty_prompt_makes_a_picture(pipeline: FakePipeline, capsys: Capture) -> None:
    facts = render_json(capsys, "", " ", "--seed", "7")
    assert [request.prompt for request in pipeline.asked] == ["", " "]
    assert len({fact["file"] for fact in facts}) == 2
    for fact in facts:
        (again,) = render_json(capsys, "--from", fact["file"])
        assert again["prompt"] == fact["prompt"]


def test_prompts_are_read_from_stdin(
    pipeline: FakePipeline, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO("première\r\n\n  second \n".encode()), "ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    render_json(capsys, "zeroth", "-")
    assert [request.prompt for request in pipeline.asked] == ["zeroth", "première", "second"]


@pytest.mark.parametrize(("format", "suffix"), [("png", "png"), ("jpeg", "jpg"), ("webp", "webp")])
def test_a_picture_is_made_again_from_itself(
    format: str, suffix: str, pipeline: FakePipeline, capsys: Capture
) -> None:
    render_json(capsys, "étoile", "--format", format, "--deep-steps", "0,3", "--steps", "9")
    first = pipeline.asked[0]
    (facts,) = render_json(capsys, "--from", f"out/étoile-{first.seed}.{suffix}", "--out", "again")
    assert pipeline.asked == [first]
    assert facts["deep_plan"] == [0, 3] and facts["file"].startswith("again/")


def test_loras_are_flags_and_part_of_the_picture(
    pipeline: FakePipeline, capsys: Capture, tmp_path: Path
) -> None:
    flags = ["--lora", "hollow:0.5", "--lora", "few_steps:1:0,outlined"]
    (facts,) = render_json(capsys, "a ring <lora:hollow:0.25>", *flags, "--out", "a.png")
    first, *_ = pipeline.asked
    assert facts["loras"] == [
        {"name": "hollow", "weight": 0.75, "text_weight": None},
        {"name": "few_steps", "weight": 1.0, "text_weight": 0.0},
        {"name": "outlined", "weight": 1.0, "text_weight": None},
    ]
    render_json(capsys, "--from", "a.png", "--out", "b.png")
    assert pipeline.asked == [first]
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    for name in ("few_steps", "outlined", "hollow"):
        (tmp_path / f"{name}.safetensors").write_bytes(
            (LORAS / "few_steps" / DIFFUSERS_FILE).read_bytes()
        )
    pipeline.catalogue = Catalogue([tmp_path])
    assert cli.main(["render", "--from", "a.png", "--out", "c.png"]) == 0
    said = capsys.readouterr().err
    assert "'hollow' is not the picture's file" in said and "'few_steps'" not in said


def test_a_flag_overrides_the_picture_s_parameters(pipeline: FakePipeline, capsys: Capture) -> None:
    render_json(capsys, "a ring", "--seed", "5", "--steps", "9", "--out", "a.png")
    render_json(capsys, "a star", "--from", "a.png", "--steps", "12", "--out", "b.png")
    filled: dict[str, Any] = {"width": 64, "height": 64, "cache_interval": 2}
    expected = GenerationParams("a star", seed=5, steps=12, **filled)
    assert pipeline.asked == [expected]


def test_one_file_and_a_sheet_are_written(pipeline: FakePipeline, capsys: Capture) -> None:
    render_json(capsys, "a ring", "--out", "deep/er/a.webp", "--sheet", "sheets/all.png")
    with Image.open("deep/er/a.webp") as image:
        assert image.format == "WEBP" and image.size == (64, 64)
    with Image.open("sheets/all.png") as sheet:
        assert np.asarray(sheet).std() > 0
    assert os.listdir("deep/er") == ["a.webp"] and os.listdir("sheets") == ["all.png"]


def test_a_wrong_prompt_is_refused_before_any_is_drawn(
    pipeline: FakePipeline, capsys: Capture
) -> None:
    assert cli.main(["render", "a ring", "too long", "a star"]) == 2
    assert "1300 tokens" in capsys.readouterr().err and not pipeline.asked


def test_one_failed_image_does_not_cost_the_others(pipeline: FakePipeline, capsys: Capture) -> None:
    assert cli.main(["render", "a", "broken", "b", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["b", "a"]
    assert err == "sdxl: 1 of 3 images failed: the engine broke\n"


def test_an_overflow_is_an_error_and_no_file(pipeline: FakePipeline, capsys: Capture) -> None:
    assert cli.main(["render", "overflow"]) == 1
    assert "not finite" in capsys.readouterr().err and os.listdir("out") == []


@pytest.mark.parametrize(
    ("steps", "interval", "is_told"), [(7, 2, True), (7, 1, False), (8, 2, False)]
)
def test_few_steps_advise_against_deepcache(
    pipeline: FakePipeline, capsys: Capture, steps: int, interval: int, is_told: bool
) -> None:
    asked = ["a ring", "--steps", str(steps), "--cache-interval", str(interval), "--n", "2"]
    assert cli.main(["render", *asked]) == 0
    assert capsys.readouterr().err.count("--cache-interval 1") == is_told


@pytest.mark.parametrize(("steps", "interval"), [(7, 1), (8, 2)])
def test_few_steps_use_no_deepcache_by_default(
    pipeline: FakePipeline, capsys: Capture, steps: int, interval: int
) -> None:
    assert cli.main(["render", "a ring", "--steps", str(steps), "--out", "a.png"]) == 0
    assert capsys.readouterr().err == ""
    assert images.read_parameters(Path("a.png"))["cache_interval"] == interval
    flags = ["--quality", "medium", "--steps", str(steps)]
    assert cli.main(["render", "a ring", *flags, "--out", "b.png"]) == 0
    assert images.read_parameters(Path("b.png"))["cache_interval"] == 2, "the quality names it"
    assert cli.main(["render", "--from", "b.png"]) == 0
    assert pipeline.asked[0].cache_interval == 2, "the file names it"


def test_a_progress_bar_is_for_terminals(
    pipeline: FakePipeline, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["render", "a ring", "--json"]) == 0
    assert "/20" in terminal.getvalue()
    assert json.loads(capsys.readouterr().out)["steps"] == 20


def test_stdout_gets_the_file_s_bytes(
    pipeline: FakePipeline, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert cli.main(["render", "a ring", "--seed", "7", "--out", "-"]) == 0
    out, err = capsysbinary.readouterr()
    assert cli.main(["render", "a ring", "--seed", "7", "--out", "a.png"]) == 0
    assert out == Path("a.png").read_bytes() and out.startswith(b"\x89PNG")
    assert err.startswith(b"-  seed 7"), "messages went to stdout"


def test_help_shows_the_defaults(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["render", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"denoising steps (default {DEFAULTS.steps})" in shown
    assert f"(default {DEFAULTS.guidance})" in shown and "(default mini)" in shown


BAD_REQUESTS = {
    "--preview ascii": "preview must be one of auto, off, kitty, iterm, sixel, got 'ascii'",
    "--preview kitty": "preview needs a terminal on stderr",
    "--out x.gif": "out must be a folder, or .png",
    "--steps 10000": "steps must be a whole number from 1 to 1000, got 10000",
    "--steps x": "--steps: must be a whole number, got 'x'",
    "--guidance nan": "guidance must be a number from 0 to 100, got nan",
    "--width 24": "width must be a multiple of 8 from 32 to 128, got 24",
    "--height 136": "height must be a multiple of 8 from 32 to 128, got 136",
    "--scheduler magic": "scheduler must be one of",
    "--seed -1": "seed must be a whole number from 0 to 9223372036854775807, got -1",
    f"--seed {2**63 - 1} --n 2": f"seed must be a whole number from 0 to {2**63 - 1}, got {2**63}",
    "--cache-interval 0": "cache_interval must be a whole number from 1 to 1000, got 0",
    "--deep-steps 1,2": "deep_steps must start with step 0, got (1, 2)",
    "--deep-steps a,b": "argument --deep-steps: must be step numbers with commas",
    "--n 0": "n must be 1 to 10000 for 1 prompts, got 0",
    f"--n {'9' * 30}": "n must be 1 to 10000 for 1 prompts",
    "--format gif": "format must be one of png, jpeg, webp, got 'gif'",
    "--sheet a.txt": "sheet must be a file name that ends in .png, .jpg or .webp, got 'a.txt'",
    "--stepz 3": "--stepz",
    "--steps": "--steps",
    "--from none.png": "from must be a picture",
    "--from .": "from must be a picture",
    "--negative-prompt \udcff": "negative_prompt must be valid Unicode, without lone surrogates",
    f"{'円' * 9000} --format jpeg": (
        "prompt must fit into a JPEG's metadata; use png or webp, got '9000 characters'"
    ),
}


@pytest.mark.parametrize("flags", BAD_REQUESTS, ids=lambda flags: flags[:30])
def test_a_bad_request_is_one_line(
    flags: str, pipeline: FakePipeline, refused: Callable[..., str]
) -> None:
    assert BAD_REQUESTS[flags] in refused("render", "a ring", *flags.split())
    assert not [name for _, _, files in os.walk(".") for name in files] and not pipeline.asked


def test_a_prompt_is_needed(pipeline: FakePipeline, refused: Callable[..., str]) -> None:
    assert "prompt needs at least one, or --from IMAGE" in refused("render")


def test_an_unwritable_place_is_refused_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setattr(engines, "load", lambda **_: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    for flag, name in (("--out", "file/sub"), ("--out", "file/a.png"), ("--sheet", "file/s.png")):
        extra = ["--out", str(tmp_path)] if flag == "--sheet" else []
        assert cli.main(["render", "a ring", flag, str(tmp_path / name), *extra]) == 1
        err = capsys.readouterr().err
        assert re.fullmatch("sdxl: out must be .*can be written.*\n", err), err


@pytest.mark.parametrize(
    "stored", ['{"model": 5}', '{"steps": 5, "spells": 1}', '{"steps": "5"}', "[1]", '"text"']
)
def test_a_nonsense_picture_is_refused(
    stored: str, pipeline: FakePipeline, refused: Callable[..., str]
) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("sdxl", stored)
    Image.new("RGB", (8, 8)).save("made.png", pnginfo=info)
    refused("render", "--from", "made.png")


@pytest.mark.parametrize("model", ["org/name", "org/name@v1", "~nobody/x", "a" * 5000, "nowhere"])
def test_a_picture_does_not_choose_what_is_downloaded(
    model: str, pipeline: FakePipeline, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdxl import checkpoint

    monkeypatch.setattr(checkpoint, "download", lambda *_: pytest.fail("asked the hub"))
    info = PngImagePlugin.PngInfo()
    info.add_text("sdxl", json.dumps({"prompt": "a ring", "model": model}))
    Image.new("RGB", (8, 8)).save("made.png", pnginfo=info)
    error = refused("render", "--from", "made.png")
    assert "sdxl: from needs --model: the picture's model" in error
    assert not pipeline.asked
    assert cli.main(["render", "--from", "made.png", "--model", "mini"]) == 0


def test_a_hub_model_s_picture_has_its_commit(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = f"org/name@{'a' * 40}"
    monkeypatch.setattr(pipeline, "checkpoint", replace(find("mini"), origin=origin))
    assert cli.main(["render", "a ring", "--model", "org/name", "--out", "made.png"]) == 0
    assert images.read_parameters(Path("made.png"))["model"] == origin
