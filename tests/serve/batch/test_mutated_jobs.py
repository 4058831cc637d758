"""Damaged files of a job are made again or named in one line, and do not stop the job."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from sdxl import cli
from sdxl.params import InvalidParams
from serve.batch import ledger, reading
from serve.batch.job import load_job, open_job
from serve.batch.progress import describe, read_status
from serve.batch.results import write_lists, write_sheet
from serve.batch.store import open_store
from tests.mutants import change_bytes, change_json, check_each
from tests.serve.batch.drawers import SMALL, Drawer, lines_of, make, parquet, pictures

LEDGER = "ledger/000000.jsonl"


WRONG_TYPES = {
    "an ordinal that is text": {"ordinal": "0"},
    "an ordinal that is a list": {"ordinal": [0]},
    "parameters that are a list": {"params": [1]},
    "parameters without a prompt": {"params": {}},
    "a width that is text": {"params": {"prompt": "a", "width": "x"}},
    "timings that are text": {"timings": {"total_s": "x"}},
    "a time beyond any number": {"timings": {"total_s": -(10**30)}},
    "a size beyond 64 bits": {"size": 2**70},
    "a digest that is no Unicode": {"sha256": "\ud800"},
    "a file that is a number": {"file": 5},
    "a file above the folder": {"file": "../outside.png"},
    "a file above the pictures": {"file": "images/../../outside.png"},
    "an absolute file": {"file": "/etc/passwd"},
}


@pytest.mark.parametrize("changes", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_a_wrong_ledger_line_costs_one_picture_only(
    changes: dict[str, Any], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = pictures(copied / "out"), copied / "out"
    shutil.copy(next((out / "images").rglob("*.png")), copied / "outside.png")
    first, *rest = (out / LEDGER).read_text().splitlines(keepends=True)
    wrong = json.dumps({**json.loads(first), **changes}) + "\n"
    (out / LEDGER).write_text("".join([wrong, *rest]))
    assert cli.main(["batch", "--verify", str(out)]) == 1
    output = capsys.readouterr()
    assert "neither a picture nor a dead letter" in output.err and "2 problems" in output.out
    assert cli.main(["batch", "--status", str(out)]) == 0
    log = copied / "log"
    assert make(copied / "prompts.txt", out, *SMALL, load=partial(Drawer, str(log))) == 0
    assert len(lines_of(log)) == 1 and pictures(out) == before
    assert cli.main(["batch", "--verify", str(out)]) == 0


def test_a_ledger_line_may_name_loras_as_requests_do(copied: Path) -> None:
    ledger_file = copied / "out" / LEDGER
    first, *rest = ledger_file.read_text().splitlines(keepends=True)
    entry = json.loads(first)
    entry["params"]["loras"] = ["paper"]
    ledger_file.write_text("".join([json.dumps(entry) + "\n", *rest]))
    store = open_store(str(copied / "out"), "run")
    store.join()
    write_lists(store)
    table = read_table(copied / "out/manifest.parquet")
    (row,) = [row for row in table.to_pylist() if row["id"] == entry["id"]]
    assert [each["name"] for each in row["loras"]] == ["paper"]


def test_a_folder_in_place_of_a_picture_is_a_problem_of_the_audit(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = next((copied / "out/images").rglob("*.png"))
    picture.unlink()
    picture.mkdir()
    assert cli.main(["batch", "--verify", str(copied / "out")]) == 1
    assert "it cannot be read (Is a directory)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"inputs": 5}', "[" * 200_000, "null", '{"n": 1e9}'])
def test_a_damaged_job_json_is_an_error_of_one_line(
    text: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "out/job.json").write_text(text)
    assert cli.main(["batch", "--status", str(copied / "out")]) == 1
    error = capsys.readouterr().err
    assert "job.json: not what sdxl batch writes" in error and error.count("\n") == 1


def test_an_input_line_that_is_too_long_is_an_error_in_little_memory(tmp_path: Path) -> None:
    for name, head in (("a.txt", b""), ("b.jsonl", b'{"prompt": "')):
        path = tmp_path / name
        with path.open("wb") as file:
            file.write(head)
            for _ in range(64):
                file.write(b"x" * 2**20)
            file.write(b"\n" + (b"a ring\n" if not head else b'{"prompt": "a ring"}\n'))
        tracemalloc.start()
        first, second = reading.read([path])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert first.error is not None and "longer than 1048576 bytes" in first.error
        assert (second.line, second.values) == (f"{name}, line 2", {"prompt": "a ring"})
        assert peak < 16 * 2**20, f"{peak >> 20} MiB for a line of 64 MiB"


def test_a_csv_line_has_1_mib_and_a_field_may_fill_it(tmp_path: Path) -> None:
    path, image = tmp_path / "a.csv", "data:image/png;base64," + "A" * 200_000
    path.write_text(f'prompt,image\na,"{image}"\n')
    assert [record.values["image"] for record in reading.read([path])] == [image]
    path.write_text("prompt\n" + "x," * 2**20 + "\n")
    with pytest.raises(InvalidParams, match="a line is longer than 1048576 characters"):
        list(reading.read([path]))


# -- mutants --------------------------------------------------------------------------------


def read_job(original: Path, folder: Path, chance: random.Random) -> None:
    """Change a file of a copied job, and read the copy in every way."""
    out, names = folder / "out", ["job.json", "status.json", LEDGER]
    for name in names:
        shutil.copy(original / "out" / name, out / name)
    name = chance.choice(names)
    text = (out / name).read_text()
    if name == LEDGER:
        lines = text.splitlines()
        place = chance.randrange(len(lines))
        changed = change_json(lines[place], chance)
        (out / name).write_bytes("\n".join(lines[:place]).encode() + b"\n" + changed + b"\n")
    else:
        (out / name).write_bytes(change_json(text, chance))
    store, job = open_job(str(out))
    store.join()
    describe(read_status(store, job))
    list(job.shards())
    write_lists(store)
    write_sheet(store, 1000)
    job.check_same(load_job(store) or job)


def read_input(folder: Path, chance: random.Random) -> None:
    """Change an input of any form, and read it."""
    name = chance.choice(["a.txt", "a.jsonl", "a.csv", "a.parquet"])
    path = folder / f"mutant{Path(name).suffix}"
    data = (folder / name).read_bytes()
    is_json = name == "a.jsonl" and chance.random() < 0.7
    path.write_bytes(change_json(data.decode(), chance) if is_json else change_bytes(data, chance))
    _, job = open_job(str(folder / "out"))
    reading.count([path])
    for row in job.intake().rows(reading.read([path])):
        ledger.as_json({"error": row.error, "id": row.id})


@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.long)])
def test_mutated_jobs_and_inputs_are_read_or_refused(
    times: int, finished: Path, copied: Path
) -> None:
    row = {"prompt": "a ring", "seed": 7, "width": 128, "guidance_scale": 4.5, "id": "a/b"}
    (copied / "a.txt").write_text("a ring\nune étoile\n")
    (copied / "a.jsonl").write_text(json.dumps(row) + "\n")
    (copied / "a.csv").write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    parquet(copied, [row] * 3, "a.parquet")
    check_each(100 * times, partial(read_job, finished, copied))
    check_each(300 * times, partial(read_input, copied))
