"""A file of requests in, a file of answers out: `batch.py requests.jsonl answers.jsonl`.

The service needs a place for files: `sdxl serve --batches-dir batches`.
"""

import os
import sys
import time
from pathlib import Path

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
requests, answers = sys.argv[1:]
file = client.files.create(file=Path(requests), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(1)
    batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts, (batch.model_extra or {}).get("eta_s"))
if batch.errors:
    sys.exit(str(batch.errors))
if batch.error_file_id:
    print(client.files.content(batch.error_file_id).text, file=sys.stderr)
if batch.output_file_id:
    client.files.content(batch.output_file_id).write_to_file(answers)
