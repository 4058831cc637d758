"""A picture by OpenAI's Python client: `python generate.py "a red circle" picture.png`."""

import base64
import os
import sys
from pathlib import Path

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
prompt, file = sys.argv[1:3]
model = next(each.id for each in client.models.list() if "sdxl" in each.id)
answer = client.images.generate(
    model=model,
    prompt=prompt,
    # What OpenAI's own service has no field for.
    extra_body={"seed": 7, "negative_prompt": "blurry", "scheduler": "dpmpp_2m_karras"},
)
Path(file).write_bytes(base64.b64decode(answer.data[0].b64_json))
print(f"{file}: {answer.size}")
