"""A whole job on workers in this process: what it leaves, what it refuses, how it goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdxl.params import InvalidParams
from serve.batch import command
from serve.batch.batch_spec import HAS_DEAD, BatchFailed
from serve.batch.results import MANIFEST
from tests.serve.batch.drawers import (
    RAISES,
    SMALL,
    Drawer,
    dead_letters,
    jsonl,
    make,
    noted,
    pictures,
    prompts,
)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The same, for a test to disturb."""
    shutil.copytree(finished, tmp_path / "job")
    shutil.rmtree(tmp_path / "job" / "out" / "tmp", ignore_errors=True)
    return tmp_path / "job"


def again(folder: Path, *flags: str, **options: Any) -> int:
    return make(folder / "prompts.txt", folder / "out", *SMALL, *flags, **options)


def test_a_job_leaves_a_picture_a_row_and_an_audit_is_clean(
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


def test_the_manifest_has_a_row_a_picture_in_order_of_the_input(finished: Path) -> None:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(finished / "out" / MANIFEST).to_pylist()
    assert [row["prompt"] for row in rows] == [f"a red circle, number {i}" for i in range(30)]
    assert [row["ordinal"] for row in rows] == list(range(30))
    assert all((finished / "out" / row["file"]).exists() and row["sha256"] for row in rows)


def test_doing_it_again_renders_nothing(copied: Path) -> None:
    before, log = pictures(copied / "out"), copied / "log"
    assert again(copied, load=partial(Drawer, str(log))) == 0
    assert pictures(copied / "out") == before and noted(log) == []


def remove(out: Path, name: str) -> None:
    (out / "images" / name).unlink()


def shorten(out: Path, name: str) -> None:
    path = out / "images" / name
    path.write_bytes(path.read_bytes()[:-8])


def damage(out: Path, name: str) -> None:
    path = out / "images" / name
    path.write_bytes(path.read_bytes()[:-8] + b"damaged!")


def forget(out: Path, name: str) -> None:
    """The last line of a ledger, as a crash right after the rename would."""
    path = out / "ledger" / f"{name[:6]}.jsonl"
    lines = [line for line in path.read_bytes().splitlines(True) if name.encode() not in line]
    path.write_bytes(b"".join(lines))


def tear(out: Path, name: str) -> None:
    """Half a line at the end, as a crash while it was written would."""
    forget(out, name)
    path = out / "ledger" / f"{name[:6]}.jsonl"
    path.write_bytes(path.read_bytes() + b'{"ordinal": 3, "id": "x", "file": "ima')


@pytest.mark.parametrize("disturb", [remove, shorten, damage, forget, tear])
def test_a_picture_that_is_not_as_the_ledger_says_is_made_again_and_no_other(
    disturb: Callable[[Path, str], None], copied: Path
) -> None:
    before, log = pictures(copied / "out"), copied / "log"
    disturb(copied / "out", sorted(before)[11])
    if disturb is not forget:
        assert command.main(["--verify", str(copied / "out")]) == 1
    # Damage that leaves the length as it was is seen by reading alone.
    flags = ["--read-back"] if disturb is damage else []
    assert again(copied, *flags, load=partial(Drawer, str(log))) == 0
    assert len(noted(log)) == 1, f"{len(noted(log))} pictures were made, needed 1"
    assert pictures(copied / "out") == before
    assert command.main(["--verify", str(copied / "out")]) == 0


def test_stale_temporary_files_go_and_never_lie_below_images(copied: Path) -> None:
    stale = copied / "out" / "tmp" / "killed" / ".1234.tmp"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half a picture")
    assert again(copied) == 0
    assert not stale.exists() and all(name.endswith(".png") for name in pictures(copied / "out"))


def extra(out: Path) -> None:
    (out / "images" / "000001" / "stranger.png").write_bytes(b"x")


def undecodable(out: Path) -> None:
    """Damage that the ledger agrees with."""
    import hashlib

    name = sorted(pictures(out))[0]
    path, ledger = out / "images" / name, out / "ledger" / "000000.jsonl"
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(b"no picture")
    new = hashlib.sha256(b"no picture").hexdigest()
    ledger.write_text(ledger.read_text().replace(old, new))


def lost_row(out: Path) -> None:
    forget(out, sorted(pictures(out))[5])


@pytest.mark.parametrize(
    ("disturb", "said"),
    [
        (extra, "no row asks for it"),
        (undecodable, "not a picture"),
        (lost_row, "neither a picture nor a dead letter"),
    ],
)
def test_the_audit_finds(
    disturb: Callable[[Path], None], said: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disturb(copied / "out")
    assert command.main(["--verify", str(copied / "out")]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--steps", "9"), "parameters"),
        (("--n", "2"), "n: "),
        (("--format", "webp"), "format"),
        (("--shard-size", "9"), "shard_size"),
        (("--tar",), "is_tarred"),
    ],
)
def test_going_on_with_something_else_is_refused_and_says_what_differs(
    flags: tuple[str, ...], field: str, copied: Path
) -> None:
    with pytest.raises(InvalidParams, match=field):
        make(copied / "prompts.txt", copied / "out", *SMALL, *flags)


def test_another_input_or_engine_is_refused(copied: Path) -> None:
    with pytest.raises(BatchFailed, match="engine: .*another.* --mixed-gpus allows both"):
        again(copied, load=partial(Drawer, engine="another"))
    (copied / "prompts.txt").write_text("something else\n")
    with pytest.raises(InvalidParams, match="input_sha256"):
        again(copied)


def test_bad_rows_are_dead_letters_with_their_line_and_the_exit_code_says_so(
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": "a", "id": "a"},
        {"steps": 4},
        {"prompt": "b", "width": 1},
        {"prompt": "c", "id": "a"},
    ]
    out = tmp_path / "out"
    for _ in range(2):
        assert make(jsonl(tmp_path, rows), out) == HAS_DEAD
        letters = dead_letters(out)
        assert [letter["line"] for letter in letters] == [
            f"rows.jsonl, line {i}" for i in (2, 3, 4)
        ]
        assert len(pictures(out)) == 1
    assert command.main(["--verify", str(out)]) == 0


def test_a_row_whose_engine_call_raises_is_the_only_dead_letter_and_can_be_tried_again(
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
    assert noted(log) == [], "a dead letter is not tried again unless asked"
    assert make(source, out, "--retry-dead", load=partial(Mended, str(log))) == 0
    assert len(noted(log)) == 1 and dead_letters(out) == [] and len(pictures(out)) == 10
    assert command.main(["--verify", str(out)]) == 0


class Mended(Drawer):
    async def _misbehave(self, prompt: str) -> None:
        pass


def test_ids_that_lead_out_of_the_folder_stay_in_it(tmp_path: Path) -> None:
    ids = ["../../evil", "/etc/evil", "..", ".hidden", "ü/ö", "a b"]
    out = tmp_path / "deep" / "out"
    rows = [{"prompt": "a", "id": id_} for id_ in ids]
    assert make(jsonl(tmp_path, rows), out) == 0
    assert len(pictures(out)) == len(ids) and command.main(["--verify", str(out)]) == 0
    others = {p.name for p in tmp_path.rglob("*.png")} - {p.name for p in out.rglob("*.png")}
    assert not others


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_other_formats(format: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert make(prompts(tmp_path, 3), out, "--format", format) == 0
    assert {Path(name).suffix for name in pictures(out)} == {{"jpeg": ".jpg"}.get(format, ".webp")}
    assert command.main(["--verify", str(out)]) == 0


def test_tar_shards_hold_the_same_pictures_and_resume(finished: Path, tmp_path: Path) -> None:
    import tarfile

    source, out = prompts(tmp_path, 30), tmp_path / "out"
    assert make(source, out, *SMALL, "--tar") == 0
    before = pictures(out)
    assert sorted(before) == [f"00000{i}.tar" for i in range(4)]
    with tarfile.open(out / "images" / "000000.tar") as tar:
        names = tar.getnames()
        inside = {name: tar.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    assert [Path(name).suffix for name in names] == [".png", ".json"] * 8
    singles = set(pictures(finished / "out").values())
    assert all(data in singles for name, data in inside.items() if name.endswith(".png"))
    assert command.main(["--verify", str(out)]) == 0
    log = tmp_path / "log"
    (out / "images" / "000002.tar").write_bytes(b"damaged")
    assert make(source, out, *SMALL, "--tar", load=partial(Drawer, str(log))) == 0
    assert len(noted(log)) == 8 and pictures(out) == before
    assert command.main(["--verify", str(out)]) == 0 and not list(out.glob("loose/*/*"))


def test_long_names_fit_into_tar_shards(tmp_path: Path) -> None:
    ids = ["x" * 97, "红色圆圈在蓝色背景上面呢", "красный круг на синем фоне"]
    source = jsonl(tmp_path, [{"prompt": "a circle", "id": id_} for id_ in ids])
    out = tmp_path / "out"
    assert make(source, out, "--tar") == 0
    assert command.main(["--verify", str(out)]) == 0


def test_an_id_of_dots_has_a_name_in_its_tar_that_a_file_can_have(tmp_path: Path) -> None:
    import tarfile

    ids = ["x" + "." * 150, "x" + "." * 151]
    out = tmp_path / "out"
    rows = [{"prompt": "a circle", "id": id_} for id_ in ids]
    assert make(jsonl(tmp_path, rows), out, "--tar") == 0
    with tarfile.open(out / "images" / "000000.tar") as tar:
        names = tar.getnames()
    assert len(set(names)) == 4 and max(map(len, names)) <= 255
    assert command.main(["--verify", str(out)]) == 0


def test_what_is_no_unicode_is_a_dead_letter_and_keeps_its_place(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "id": "\ud800"},
        {"prompt": "c\udfff"},
        {"prompt": "d"},
        {"prompt": "e", "\ud800": 1},
    ]
    out = tmp_path / "out"
    for _ in range(2):
        assert make(jsonl(tmp_path, rows), out) == HAS_DEAD
        assert len(pictures(out)) == 2
        assert [letter["line"][-1] for letter in dead_letters(out)] == ["2", "3", "5"]
    assert command.main(["--verify", str(out)]) == 0


def test_the_status_of_a_finished_job(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--status", str(finished / "out")]) == 0
    assert capsys.readouterr().out.startswith("finished: 30 of 30 rows\n")
    assert command.main(["--status", str(finished / "out"), "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 30


def test_a_place_without_a_job_says_so(tmp_path: Path) -> None:
    from serve.batch.job import NoJob

    for flag in ("--status", "--verify"):
        with pytest.raises(NoJob, match="job.json is not there"):
            command.main([flag, str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--n", "0"), "n: 0"),
        (("--format", "bmp"), "format: 'bmp'"),
        (("--shard-size", "0"), "shard_size: 0"),
        (("--steps", "0"), "steps: 0"),
        (("--stall-s", "0"), "stall_s: 0"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_by_name(
    flags: tuple[str, ...], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParams, match=field):
        make(prompts(tmp_path, 1), tmp_path / "out", *flags)


def test_quiet_says_json_lines_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(prompts(tmp_path, 3), tmp_path / "out")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["event"] == "finished" and lines[-1]["images"] == 3
    assert {line["event"] for line in lines[:-1]} == {"progress"}
    assert set(lines[0]["workers"]) <= {"w0"}
