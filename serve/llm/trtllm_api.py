"""TensorRT-LLM's public names from trtllm_api.json: the options of an options file, and the API
that the adapter uses. TensorRT-LLM is not imported.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("trtllm_api.json")
UNCOMMITTED = "also (not committed to stay)"
EAGLE = "EagleDecodingConfig (1.2; Eagle3DecodingConfig later)"
SPECULATIVE = {
    "Eagle": ("EagleDecodingConfig",),
    "Eagle3": ("Eagle3DecodingConfig", "EagleDecodingConfig"),
    "Draft_Target": ("DraftTargetDecodingConfig",),
}
"""`decoding_type` of an options file → the class, the first that the installed version has"""


@cache
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def llm_names() -> frozenset[str]:
    """Return the names of LLM's arguments."""
    arguments = dict(record()["LLM.__init__"])
    return frozenset(arguments) - {UNCOMMITTED} | frozenset(arguments[UNCOMMITTED])


def tables() -> dict[str, tuple[str, frozenset[str]]]:
    """Return LLM's arguments that are tables in an options file: the name of the argument's class
    and its fields."""
    cache_fields = record()["tensorrt_llm.llmapi"]["KvCacheConfig"]
    tables = {"kv_cache_config": ("KvCacheConfig", frozenset(cache_fields))}
    for name, facts in record()["additions"]["tables"]["fields"].items():
        tables[name] = facts["class"], frozenset(facts["fields"])
    return tables


def speculative_names(decoding_type: str) -> frozenset[str]:
    base = record()["additions"]["DecodingBaseConfig"]["fields"]
    names = {*base, "speculative_model_dir"}
    if decoding_type != "Draft_Target":
        names |= set(record()["tensorrt_llm.llmapi"][EAGLE])
    return frozenset(names)
