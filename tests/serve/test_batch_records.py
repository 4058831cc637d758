"""The folder that files and batches are kept in, without a service."""

from __future__ import annotations

import os
import time
from pathlib import Path

from serve.batch_api.records import Records
from serve.batch_api.runner import sweep


def test_what_a_killed_front_left_unfinished_is_removed_and_the_living_go_on(
    tmp_path: Path,
) -> None:
    records, day_s = Records(str(tmp_path)), 24 * 3600
    records.prepare()
    (scratch,) = (tmp_path / "tmp").iterdir()
    old, new = scratch / ".old.tmp", scratch / ".new.tmp"
    for path, age_s in ((old, day_s + 60), (new, day_s - 60)):
        path.write_bytes(b"of an upload")
        os.utime(path, (time.time() - age_s,) * 2)
    sweep(records, int(time.time()))
    assert not old.exists() and new.exists()
    sweep(records, int(time.time()) + 2 * day_s)
    records.store.put("data/file", b"x")
    assert records.data("file") == b"x" and not new.exists()
