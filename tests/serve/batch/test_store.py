"""Folders and object stores as a job's output; S3 is a local server."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from sdxl.files import OutputError
from serve.batch import command, ledger
from serve.batch import store as batch_store
from serve.batch.batch_spec import BatchFailed
from serve.batch.ledger import Entry
from serve.batch.store import FolderStore, ObjectStore, Store
from tests.serve.batch.drawers import SMALL, Drawer, lines_of, make, pictures, prompts
from tests.waiting import wait_until


def objects(url: str) -> dict[str, bytes]:
    import s3fs

    files, root = s3fs.S3FileSystem(), url.removeprefix("s3://")
    files.invalidate_cache()
    return {name.removeprefix(f"{root}/"): files.cat_file(name) for name in files.find(root)}


@pytest.mark.slow
def test_a_job_in_a_bucket_is_the_job_in_a_folder_and_resumes(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import s3fs

    source, log = prompts(tmp_path, 30), tmp_path / "log"
    assert make(source, tmp_path / "out", *SMALL) == 0
    assert make(source, bucket, *SMALL) == 0
    there = objects(bucket)
    images = {n.removeprefix("images/"): d for n, d in there.items() if n.startswith("images/")}
    assert images == pictures(tmp_path / "out")
    assert {"manifest.parquet", "summary.json", "job.json", "contact_sheet.png"} <= set(there)
    assert command.main(["--verify", bucket]) == 0
    assert "30 pictures, 0 dead letters, no problems" in capsys.readouterr().out
    victim = f"{bucket.removeprefix('s3://')}/images/{sorted(images)[9]}"
    s3fs.S3FileSystem().pipe_file(victim, b"damaged")  # and shorter, which a listing tells
    assert make(source, bucket, *SMALL, load=partial(Drawer, str(log))) == 0
    assert len(lines_of(log)) == 1 and command.main(["--verify", bucket]) == 0
    assert command.main(["--status", bucket]) == 0


def test_a_ledger_in_a_bucket_writes_a_line_after_a_while_and_none_after_it_is_closed(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is closed, the lines of a cancelled batch are counted."""
    monkeypatch.setattr(batch_store, "PART_S", 0.05)
    store = ObjectStore(bucket)
    appender = store.append("000000")
    appender.add(b"one\n")
    wait_until(lambda: store.ledger("000000") == b"one\n")
    appender.add(b"two\n")
    appender.close()
    with pytest.raises(OutputError, match="closed"):
        appender.add(b"late\n")
    time.sleep(0.2)
    assert store.ledger("000000") == b"one\ntwo\n"


def test_parts_of_a_ledger_are_numbered_and_never_change(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "PART_LINES", 2)
    store = ObjectStore(bucket)
    params = {"prompt": "a ring"}

    def line(ordinal: int, run: str, name: str) -> bytes:
        file = f"images/000000/{name}.png"
        return Entry(ordinal, f"i{ordinal}", "", run, file=file, params=params).as_line()

    first = store.append("000000")
    for i in range(5):
        first.add(line(i, "r", f"f{i}"))
    first.close()
    before = objects(bucket)
    again = store.append("000000")
    again.add(line(2, "s", "new"))
    again.close()
    after = objects(bucket)
    parts = [name.partition("-")[0] for name in sorted(after)]
    assert parts == [f"ledger/000000/00000{i}" for i in range(4)]
    assert all(after[name] == data for name, data in before.items())
    known = ledger.entries(store.ledger("000000"))
    assert len(known) == 5 and known[2].file.endswith("/new.png"), "the later line wins"


def test_an_unreachable_store_stops_the_job_in_one_line(tmp_path: Path, bucket: str) -> None:
    import s3fs

    missing = "s3://there-is-no-such-bucket/job"
    with pytest.raises((BatchFailed, OutputError), match="there-is-no-such-bucket") as caught:
        make(prompts(tmp_path, 2), missing)
    assert "\n" not in str(caught.value)
    s3fs.S3FileSystem.clear_instance_cache()


def test_both_kinds_of_store_behave_alike(tmp_path: Path) -> None:
    stores: list[Store] = [
        FolderStore(tmp_path / "out", "run"),
        ObjectStore(f"memory://{tmp_path.name}"),
    ]
    for store in stores:
        store.prepare("images", "ledger")
        assert store.names("images") == [] and store.ledger("000000") == b""
        store.put("images/000000/a.png", b"x")
        store.put("images/000000/b.png", b"y")
        store.put("images/000000/a.png", b"z")
        assert store.get("images/000000/a.png") == b"z"
        assert store.sizes("images/000000") == {f"images/000000/{n}.png": 1 for n in "ab"}
        assert store.sizes("images/000000/a.png") == {"images/000000/a.png": 1}
        assert store.sizes("images") == store.sizes("nowhere") == {}
        (tmp_path / "list").write_bytes(b"of a file")
        store.put_file("list", tmp_path / "list")
        assert store.get("list") == b"of a file"
        assert store.names("images/000000") == ["a.png", "b.png"]
        assert store.names("images") == ["000000"]
        for line in (b"one\n", b"two\n"):
            appender = store.append("000000")
            appender.add(line)
            appender.close()
        assert store.ledger("000000") == b"one\ntwo\n" and store.ledgers() == ["000000"]
        for _ in range(2):
            store.remove("images/000000/a.png")
        with pytest.raises(FileNotFoundError):
            store.get("images/000000/a.png")


def test_a_closed_ledger_file_refuses_lines_and_writes_into_no_other_file(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "out", "run")
    store.prepare("ledger")
    appender = store.append("000000")
    appender.close()
    with (tmp_path / "other").open("w+") as other:
        with pytest.raises(OutputError, match=r"000000\.jsonl"):
            appender.add(b"late\n")
        assert other.read() == ""
        appender.close()
        other.write("its file is still open")
