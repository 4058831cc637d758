"""The recorded configuration classes."""

from __future__ import annotations

from serve.llm import trtllm_api

from . import recorded

for kind, fields in trtllm_api.tables().values():
    globals()[kind] = recorded(kind, dict.fromkeys(fields))
EagleDecodingConfig = recorded(
    "EagleDecodingConfig", dict.fromkeys(trtllm_api.speculative_names("Eagle"))
)
DraftTargetDecodingConfig = recorded(
    "DraftTargetDecodingConfig", dict.fromkeys(trtllm_api.speculative_names("Draft_Target"))
)
