"""README.md and docs/start.md: their commands run unchanged in an empty folder, with a double of
the hub that serves a foreign checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile

import pytest

from engines import build_command
from engines.trt.flavours import FLAVOURS, TENSORRT_RTX, check_buildable
from tests.documents import ROOT, blocks, calls_of_sdxl, commands
from tests.isolation import run_alone
from tests.sdxl.single_files import write_single_file, write_vae_alone
from tests.test_deployment import write_foreign_model

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "start.md")
MOST_LINES = 100
"""the most lines of README"""
PORT = 8765
LEFT_OUT = ("sdxl eval --sweep", "sdxl tune", "sdxl bench peers")
"""Measurements that take too long for a test."""
HUB = f"""
from pathlib import Path
from tests.sdxl.hub_double import hub
with hub(Path("model"), {{"main": "a" * 40}}, "stabilityai/stable-diffusion-xl-base-1.0", {PORT}):
    input()
"""


def typed() -> list[str]:
    lines = [line for document in DOCUMENTS for line in commands(document)]
    return [line for line in lines if line.startswith("sdxl ")]


def is_run(line: str) -> bool:
    """False for a build without `--gpu`, which needs a GPU here, and for long measurements."""
    if line.startswith("sdxl build"):
        return "--gpu" in line and TENSORRT_RTX.is_installed
    return not line.startswith(LEFT_OUT)


def test_readme_is_short() -> None:
    assert len(DOCUMENTS[0].read_text().splitlines()) <= MOST_LINES


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_a_build_for_a_gpu_that_is_not_here_names_it() -> None:
    builds = [flags for command, *flags in calls_of_sdxl(typed()) if command == "build"]
    orders = [build_command.build_parser().parse_args(flags) for flags in builds]
    assert {order.backend for order in orders} == set(FLAVOURS)
    for order in orders:
        if not FLAVOURS[order.backend].times_kernels:
            target = build_command.chosen_target(order.gpu, None)
            check_buildable(FLAVOURS[order.backend], target, None)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_command_works_in_an_empty_folder_with_a_foreign_checkpoint(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_foreign_model(model)
    write_single_file(model, tmp_path / "juggernautXL.safetensors")
    write_vae_alone(model, tmp_path / "sdxl_vae.safetensors")
    (tmp_path / "prompts.txt").write_text("a red circle\na green star\n")
    rows = [{"id": str(i), "prompt": "a red circle", "steps": 4} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "docs").mkdir()
    for name in ("drawing.png", "reference.png", "demo_captions.txt"):
        copyfile(ROOT / "docs" / name, tmp_path / "docs" / name)
    lines = list(filter(is_run, typed()))
    (library,) = (text for text in blocks(DOCUMENTS[1], "python") if "from engines" in text)
    (tmp_path / "library.py").write_text(library + "assert pixels.shape == (128, 128, 3)\n")
    script = [
        "set -x",
        f"export SDXL_HOME=/mnt/home PYTHONPATH={ROOT} HF_ENDPOINT=http://127.0.0.1:{PORT}",
        "export HF_HUB_DISABLE_XET=1",
        f"(sleep 3500 | python -c '{HUB}') &",
        f"until (echo > /dev/tcp/127.0.0.1/{PORT}) 2> /dev/null; do sleep 0.2; done",
        *lines,
        "python library.py",
    ]
    done = run_alone("\n".join(script), tmp_path, 3400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    for count in (48, 8):
        found = f"{count} rows: {count} pictures, 0 dead letters, no problems"
        assert found in done.stdout, done.stdout[-3000:]
    for name in ("circle.png", "star.png", "again.png"):
        assert (tmp_path / name).read_bytes()
    built = "int8 for L40S, tensorrt-rtx" in done.stdout
    assert built == TENSORRT_RTX.is_installed, done.stdout[-3000:]
