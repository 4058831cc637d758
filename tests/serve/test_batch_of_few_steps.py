"""In batches of few steps all steps are deep, except in older batches."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from unittest.mock import MagicMock

from serve.batch_api.batch_job import BatchJobRun, input_file
from serve.batch_api.records import BatchRecord, Records
from serve.models import image_models
from tests.serve.test_batch_api import BatchService, batch_api, line


def test_few_steps_are_all_deep_except_in_older_batches(tmp_path: Path) -> None:
    asked = [line("few"), line("many", steps=8), line("said", cache_interval=2)]
    with batch_api(tmp_path) as api:
        batch = api.ended(api.begin(*asked))
        bodies = [each["response"]["body"] for each in api.lines(batch.output_file_id)]
        counts = [body["data"][0]["shallow_steps"] for body in bodies]
        assert counts == [0, 4, 1]
        records = Records(api.settings.batches_dir)
        records.prepare()
        ((owner, kept),) = ((o, records.batches(o)[0]) for o in records.owners())
        assert kept.usual_interval is None
        facts = {name: value for name, value in asdict(kept).items() if name != "usual_interval"}
        records.store.put(f"batches/{owner}/{batch.id}.json", json.dumps(facts).encode())
        older = records.batch(owner, batch.id)
        assert older is not None
        intervals = [intervals_of(api, records, each) for each in (kept, older)]
    assert intervals == [[1, 2, 2], [2, 2, 2]]


def intervals_of(api: BatchService, records: Records, batch: BatchRecord) -> list[int]:
    job = BatchJobRun(records, batch, image_models(api.settings)[0], MagicMock(), MagicMock())
    job._keep_card(asyncio.run(api.worker.card()))
    with input_file(records.job_store(batch.id)) as path:
        rows = [row for piece in job._shards(path) for row in piece.rows]
    return [row.params.interval for row in rows if row.params]
