"""The recorded configuration classes."""

from __future__ import annotations

from serve.llm import trtllm_api

from . import recorded

KvCacheConfig = recorded(
    "KvCacheConfig", trtllm_api.record()["tensorrt_llm.llmapi"]["KvCacheConfig"]
)
EagleDecodingConfig = recorded(
    "EagleDecodingConfig", dict.fromkeys(trtllm_api.speculative_names("Eagle"))
)
DraftTargetDecodingConfig = recorded(
    "DraftTargetDecodingConfig", dict.fromkeys(trtllm_api.speculative_names("Draft_Target"))
)
