"""A whole job on workers in this process: its output, its refusals, and its resumption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sdxl.params import InvalidParams
from serve.batch import command
from serve.batch.batch_spec import HAS_DEAD
from serve.batch.results import MANIFEST, SHEET_PICTURES
from serve.errors import invalid
from serve.render.contact_sheet import Pixels, contact_sheet
from tests.serve.batch.drawers import (
    RAISES,
    SMALL,
    Drawer,
    dead_letters,
    jsonl,
    lines_of,
    make,
    parquet,
    pictures,
    prompts,
)

LONG = "x" * 2**20


def rerun(folder: Path, *flags: str, **options: Any) -> int:
    return make(folder / "prompts.txt", folder / "out", *SMALL, *flags, **options)


def test_a_job_makes_a_picture_a_row_and_its_audit_is_clean(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished / "out"
    names = sorted(pictures(out))
    assert len(names) == 30 and names[0].startswith("000000/") and names[-1].startswith("000003/")
    assert not list(out.glob("tmp/*")) and (out / "contact_sheet.png").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["images"], summary["dead_letters"]) == (30, 0)
    assert command.main(["--verify", str(out)]) == 0
    assert "30 rows: 30 pictures, 0 dead letters, no problems" in capsys.readouterr().out


def test_the_manifest_lists_the_pictures_in_the_inputs_order(finished: Path) -> None:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(finished / "out" / MANIFEST).to_pylist()
    assert [row["prompt"] for row in rows] == [f"a red circle, number {i}" for i in range(30)]
    assert [row["ordinal"] for row in rows] == list(range(30))
    assert all((finished / "out" / row["file"]).exists() and row["sha256"] for row in rows)


def test_the_contact_sheet_is_spread_over_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_sheet(pictures: Sequence[tuple[Pixels, str]]) -> Pixels:
        shown.extend(int(caption.split()[-1]) for _, caption in pictures)
        return contact_sheet(pictures)

    monkeypatch.setattr("serve.batch.results.contact_sheet", draw_sheet)
    for count in (3, 47):
        shown: list[int] = []
        assert make(prompts(tmp_path, count), tmp_path / f"out{count}") == 0
        assert len(shown) == min(count, SHEET_PICTURES)
        gaps = {b - a for a, b in pairwise([*shown, count])}
        assert shown[0] == 0 and gaps <= {count // len(shown), -(-count // len(shown))}, shown


def change(out: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = out / "images" / name
    path.write_bytes(change(path.read_bytes()))


def remove(out: Path, name: str) -> None:
    (out / "images" / name).unlink()


def shorten(out: Path, name: str) -> None:
    change(out, name, lambda data: data[:-8])


def damage(out: Path, name: str) -> None:
    change(out, name, lambda data: data[:-8] + b"damaged!")


def forget(out: Path, name: str) -> None:
    """Remove a ledger line, as if the job crashed right after the rename."""
    path = out / "ledger" / f"{name[:6]}.jsonl"
    lines = [line for line in path.read_bytes().splitlines(True) if name.encode() not in line]
    path.write_bytes(b"".join(lines))


def tear(out: Path, name: str) -> None:
    """Write half a line, as if the job crashed while writing it."""
    forget(out, name)
    path = out / "ledger" / f"{name[:6]}.jsonl"
    path.write_bytes(path.read_bytes() + b'{"ordinal": 3, "id": "x", "file": "ima')


@pytest.mark.parametrize("disturb", [remove, shorten, damage, forget, tear])
def test_only_a_picture_that_differs_from_the_ledger_is_made_again(
    disturb: Callable[[Path, str], None], copied: Path
) -> None:
    before, log = pictures(copied / "out"), copied / "log"
    disturb(copied / "out", sorted(before)[11])
    if disturb is not forget:
        assert command.main(["--verify", str(copied / "out")]) == 1
    # Damage that keeps the length shows only when the file is read.
    flags = ["--read-back"] if disturb is damage else []
    assert rerun(copied, *flags, load=partial(Drawer, str(log))) == 0
    assert len(lines_of(log)) == 1
    assert pictures(copied / "out") == before
    assert command.main(["--verify", str(copied / "out")]) == 0


def test_stale_temporary_files_are_removed_and_never_lie_below_images(copied: Path) -> None:
    stale = copied / "out" / "tmp" / "killed" / ".1234.tmp"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half a picture")
    assert rerun(copied) == 0
    assert not stale.exists() and all(name.endswith(".png") for name in pictures(copied / "out"))


def add_file(out: Path, name: str) -> None:
    (out / "images" / "000001" / "stranger.png").write_bytes(b"x")


def overwrite(out: Path, name: str) -> None:
    """Damage a picture and write the damaged file's digest into the ledger."""
    ledger = out / "ledger" / "000000.jsonl"
    old = hashlib.sha256((out / "images" / name).read_bytes()).hexdigest()
    new = hashlib.sha256(b"no picture").hexdigest()
    change(out, name, lambda data: b"no picture")
    ledger.write_text(ledger.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("disturb", "problem"), [(add_file, "no row asks for it"), (overwrite, "not a picture")]
)
def test_the_audit_reports_each_problem(
    disturb: Callable[[Path, str], None],
    problem: str,
    copied: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disturb(copied / "out", sorted(pictures(copied / "out"))[5])
    assert command.main(["--verify", str(copied / "out")]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--steps", "9"), "parameters"),
        (("--n", "2"), "n must be 1 to resume the job there, or use another --out, got 2"),
        (("--format", "webp"), "format"),
        (("--shard-size", "9"), "shard_size"),
        (("--tar",), "is_tarred"),
    ],
)
def test_a_rerun_with_another_flag_is_refused_by_name(
    flags: tuple[str, ...], field: str, copied: Path
) -> None:
    with pytest.raises(InvalidParams, match=field):
        rerun(copied, *flags)


def test_a_rerun_and_the_audit_refuse_an_input_that_changed(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 2), tmp_path / "out"
    assert make(source, out) == 0
    source.write_text("something else\n")
    with pytest.raises(InvalidParams, match="input_sha256"):
        make(source, out)
    with pytest.raises(InvalidParams, match=f"must not change after .*, got '{tmp_path}'"):
        command.main(["--verify", str(out)])


def test_bad_rows_are_dead_letters_with_their_line_and_an_exit_code(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "id": "a"},
        {"steps": 4},
        {"prompt": "b", "width": 1},
        {"prompt": "c", "id": "a"},
        {"prompt": "d", "id": "\ud800"},
        {"prompt": "e\udfff"},
        {"prompt": "f", "\ud800": 1},
        {"prompt": "g"},
    ]
    out = tmp_path / "out"
    for _ in range(2):
        assert make(jsonl(tmp_path, rows), out) == HAS_DEAD
        lines = [letter["line"] for letter in dead_letters(out)]
        assert lines == [f"rows.jsonl, line {i}" for i in range(2, 8)]
        assert len(pictures(out)) == 2
    assert command.main(["--verify", str(out)]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduler": LONG},
        {"controls": [{"name": "edges", "image": LONG, "weight": 1}]},
        {"id": LONG},
    ],
)
def test_a_row_that_is_as_long_as_a_ledger_line_may_be_is_a_dead_letter(
    wrong: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = parquet(tmp_path, [{"prompt": "a", **wrong}]), tmp_path / "out"
    assert make(source, out) == HAS_DEAD
    assert len(dead_letters(out)) == 1 and command.main(["--verify", str(out)]) == 0
    shown = json.loads((out / "summary.json").read_text())["run"]["trouble"]
    assert len(shown) < 5000, f"the error has {len(shown)} characters"


def test_a_long_name_or_error_is_cut_in_the_ledger(tmp_path: Path) -> None:
    """The name of a column that does not exist, and the error of an engine."""

    class Verbose(Drawer):
        async def _misbehave(self, prompt: str) -> None:
            raise invalid(LONG, LONG)

    out = tmp_path / "out"
    row = {"prompt": "a", LONG[: len(LONG) // 2]: 1}
    assert make(jsonl(tmp_path, [row, {"prompt": "b"}]), out, load=Verbose) == HAS_DEAD
    assert [letter["ordinal"] for letter in dead_letters(out)] == [0, 1]
    longest = max(map(len, (out / "ledger" / "000000.jsonl").read_bytes().splitlines()))
    assert longest < 20_000, f"a line has {longest} bytes"


class Mended(Drawer):
    async def _misbehave(self, prompt: str) -> None:
        pass


def test_a_row_whose_engine_call_raises_is_the_one_dead_letter_and_can_be_retried(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": RAISES if i == 4 else f"p{i}", "id": f"i{i}"} for i in range(10)]
    source, out = jsonl(tmp_path, rows), tmp_path / "out"
    assert make(source, out) == HAS_DEAD
    (letter,) = dead_letters(out)
    assert letter["id"] == "i4" and "does not like this one" in letter["error"]
    assert len(pictures(out)) == 9 and command.main(["--verify", str(out)]) == 0
    log = tmp_path / "log"
    assert make(source, out, load=partial(Mended, str(log))) == HAS_DEAD
    assert lines_of(log) == [], "a dead letter was retried without --retry-dead"
    assert make(source, out, "--retry-dead", load=partial(Mended, str(log))) == 0
    assert len(lines_of(log)) == 1 and dead_letters(out) == [] and len(pictures(out)) == 10
    assert command.main(["--verify", str(out)]) == 0


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_pictures_may_be_jpeg_or_webp(format: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert make(prompts(tmp_path, 3), out, "--format", format) == 0
    assert {Path(name).suffix for name in pictures(out)} == {{"jpeg": ".jpg"}.get(format, ".webp")}
    assert command.main(["--verify", str(out)]) == 0


def test_a_finished_job_has_a_status(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--status", str(finished / "out")]) == 0
    assert capsys.readouterr().out.startswith("finished: 30 of 30 rows\n")
    assert command.main(["--status", str(finished / "out"), "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 30


def test_a_folder_without_a_job_is_refused(tmp_path: Path) -> None:
    from serve.batch.job import NoJob

    for flag in ("--status", "--verify"):
        with pytest.raises(NoJob, match="job.json is not there"):
            command.main([flag, str(tmp_path)])


def test_quiet_prints_only_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(prompts(tmp_path, 3), tmp_path / "out")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["event"] == "finished" and lines[-1]["images"] == 3
    assert {line["event"] for line in lines[:-1]} == {"progress"}
    assert set(lines[0]["workers"]) <= {"w0"}
