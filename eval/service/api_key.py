"""The key of a service that asks for one, as OpenAI's own client finds it."""

from __future__ import annotations

import os

VARIABLE = "OPENAI_API_KEY"


def headers(given: str = "") -> dict[str, str]:
    key = given or os.environ.get(VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}
